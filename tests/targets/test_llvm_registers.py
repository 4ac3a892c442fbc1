"""Accumulators of blocked convolutions stay in registers, on every instruction set."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

tvm = pytest.importorskip("tvm")

from hybridc.targets.llvm.cpu import parse_cpu  # noqa: E402
from hybridc.targets.llvm.layout.kernels import blocked_convolution, weight_shape  # noqa: E402
from hybridc.targets.llvm.schedules import schedule_function  # noqa: E402
from hybridc.targets.llvm.schedules.blocked_tiles import Geometry, choose_tiling  # noqa: E402
from tvm import te, tirx  # noqa: E402

from tests.targets.test_llvm_layouts import geometry  # noqa: E402

MULTIPLY_ADD = re.compile(r"\bvfmadd|\bfmla\b")
VECTOR = re.compile(r"[xyz]mm\d|\b[qv]\d")
STACK = re.compile(r"\(%rsp|\[sp")
WIDE = {"x86-64-v3": "%ymm", "x86-64-v4": "%zmm", "aarch64": ".4s"}


def assembly(found: Geometry, target: str) -> str:
    """Assembly of a blocked convolution alone."""
    g, cpu = found, parse_cpu(target)
    data = (g.batch, -(-g.channels * g.groups // g.lanes), g.height, g.width, g.lanes)
    sizes = [[tirx.IntImm("int64", dim) for dim in shape] for shape in (data, weight_shape(g))]
    tensors = [te.placeholder(size, "float32", f"p{i}") for i, size in enumerate(sizes)]
    function = te.create_prim_func([*tensors, blocked_convolution(g, *tensors)])
    function = schedule_function(function.with_attr("tirx.noalias", True), cpu)
    library = tvm.compile(tvm.IRModule({"main": function}), target=cpu.target)
    return str(library.mod.inspect_source("s"))


def innermost_loops(source: str) -> Iterator[list[str]]:
    """Bodies of the loops that contain no other loop."""
    lines = source.splitlines()
    labels = {line.split(":")[0]: i for i, line in enumerate(lines) if line.startswith(".LBB")}
    jumps = [(labels.get(line.split()[-1]), i) for i, line in enumerate(lines) if ".LBB" in line]
    loops = [(start, end) for start, end in jumps if start is not None and start < end]
    for start, end in loops:
        if not any(start < other and last < end for other, last in loops):
            yield lines[start:end]


@pytest.mark.parametrize("target", sorted(WIDE))
@pytest.mark.parametrize(
    ("shape", "filters", "taps"),
    [((1, 64, 28, 28), 64, 3), ((1, 128, 7, 7), 128, 3), ((1, 128, 14, 14), 256, 1)],
)
def test_inner_loops_touch_no_stack(
    target: str, shape: tuple[int, ...], filters: int, taps: int
) -> None:
    lanes = parse_cpu(target).vector_bytes // 4
    found = geometry(shape, filters, (taps, taps), lanes, 2, pad=taps // 2)
    source = assembly(found, target)
    assert WIDE[target] in source
    loops = [body for body in innermost_loops(source) if any(map(MULTIPLY_ADD.search, body))]
    assert loops
    for body in loops:
        assert not [line for line in body if VECTOR.search(line) and STACK.search(line)]


@pytest.mark.parametrize("target", sorted(WIDE))
def test_tiles_fill_the_registers_of_the_target(target: str) -> None:
    cpu = parse_cpu(target)
    found = geometry((1, 64, 56, 56), 64, (3, 3), cpu.vector_bytes // 4, 2, pad=1)
    tiling = choose_tiling(found, cpu, True)
    accumulators = tiling.tile_rows * tiling.tile_columns * found.vectors
    assert cpu.vector_registers // 2 <= accumulators < cpu.vector_registers


@pytest.mark.parametrize("target", sorted(WIDE))
@pytest.mark.parametrize("taps", [3, 5])
def test_depthwise_loops_touch_no_stack(target: str, taps: int) -> None:
    """The inputs that outputs of a row share are in registers, too."""
    lanes = parse_cpu(target).vector_bytes // 4
    shape = (1, lanes, 60, 60)
    found = geometry(shape, lanes, (taps, taps), lanes, groups=lanes, pad=taps // 2)
    loops = [
        body
        for body in innermost_loops(assembly(found, target))
        if any(map(MULTIPLY_ADD.search, body))
    ]
    assert loops
    for body in loops:
        assert not [line for line in body if VECTOR.search(line) and STACK.search(line)]
