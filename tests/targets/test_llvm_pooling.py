"""Pooling of blocked tensors in register tiles."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

tvm = pytest.importorskip("tvm")

from hybridc.targets.llvm.build import fuse, legalize  # noqa: E402
from hybridc.targets.llvm.cpu import Cpu, parse_cpu  # noqa: E402
from hybridc.targets.llvm.layout import block_layouts  # noqa: E402
from hybridc.targets.llvm.schedules import apply_rule  # noqa: E402
from hybridc.targets.llvm.schedules.blocked_pooling import schedule_blocked_pooling  # noqa: E402
from tvm import relax, te, tirx  # noqa: E402

from tests.targets.properties import kernel_examples  # noqa: E402
from tests.targets.test_llvm_layouts import network, randoms, run  # noqa: E402
from tests.targets.test_llvm_schedules import draw  # noqa: E402

op = relax.op
Array = np.ndarray[Any, Any]


def int64(value: int) -> Any:
    return tirx.IntImm("int64", value)


def pooling(
    shape: tuple[int, ...], taps: tuple[int, int], stride: int, pad: int, name: str, fill: float
) -> Any:
    """Padding and windows over ``(batch, blocks, height, width, lanes)``."""
    batch, blocks, height, width, lanes = shape
    data = te.placeholder([int64(dim) for dim in shape], "float32", "data")

    def padded(n: Any, b: Any, y: Any, x: Any, lane: Any) -> Any:
        inside = tirx.all(y >= pad, y < height + pad, x >= pad, x < width + pad)
        value = data(n, b, y - pad, x - pad, lane)
        return tirx.if_then_else(inside, value, tirx.const(fill, "float32"))

    sizes = (batch, blocks, height + 2 * pad, width + 2 * pad, lanes)
    source = te.compute(tuple(map(int64, sizes)), padded, name="pad") if pad else data
    i, j = (te.reduce_axis((int64(0), int64(extent)), f"r{extent}") for extent in taps)
    reduce = te.max if name == "max" else te.sum

    def window(n: Any, b: Any, y: Any, x: Any, lane: Any) -> Any:
        return reduce(source(n, b, y * stride + i, x * stride + j, lane), axis=[i, j])

    rows, columns = ((size - k) // stride + 1 for size, k in zip(sizes[2:4], taps, strict=True))
    result = te.compute(
        tuple(map(int64, (batch, blocks, rows, columns, lanes))), window, name="pool"
    )
    scaled = te.compute(
        result.shape, lambda *at: result(*at) * tirx.const(0.25, "float32"), name="scaled"
    )
    return te.create_prim_func([data, scaled])


@kernel_examples(15)
@given(
    size=st.tuples(st.integers(1, 19), st.integers(1, 19)),
    taps=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    stride=st.integers(1, 3),
    pad=st.integers(0, 1),
    name=st.sampled_from(["max", "sum"]),
)
def test_any_pooling(
    cpu: Cpu, size: tuple[int, int], taps: tuple[int, int], stride: int, pad: int, name: str
) -> None:
    height, width = (max(s, k) for s, k in zip(size, taps, strict=True))
    shape = (2, 3, height, width, cpu.vector_bytes // 4)
    least = float(np.finfo("float32").min)
    fill = least if name == "max" else 0.0
    function = apply_rule(
        schedule_blocked_pooling, pooling(shape, taps, stride, pad, name, fill), cpu
    )
    assert function is not None
    assert not function.body.block.alloc_buffers
    (x,) = draw([shape], height)
    around = np.pad(x, [(0, 0), (0, 0), (pad, pad), (pad, pad), (0, 0)], constant_values=fill)
    windows = np.lib.stride_tricks.sliding_window_view(around, taps, (2, 3))
    expected = getattr(windows[:, :, ::stride, ::stride], name)(axis=(-1, -2)) * 0.25
    library = tvm.compile(tvm.IRModule({"main": function}), target=cpu.target)
    output = tvm.runtime.tensor(np.zeros(expected.shape, "float32"))
    library["main"](tvm.runtime.tensor(x), output)
    np.testing.assert_allclose(output.numpy(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("name", "fill"), [("sum", 1.0), ("max", 0.0)])
def test_padding_that_counts_is_kept(cpu: Cpu, name: str, fill: float) -> None:
    function = pooling((1, 1, 6, 6, cpu.vector_bytes // 4), (2, 2), 1, 1, name, fill)
    assert apply_rule(schedule_blocked_pooling, function, cpu) is None


@pytest.mark.parametrize("target", ["x86-64-v3", "x86-64-v4", "aarch64"])
def test_pooling_compiles_to_wide_code(target: str) -> None:
    cpu = parse_cpu(target)
    function = pooling((1, 2, 14, 14, cpu.vector_bytes // 4), (3, 3), 2, 1, "sum", 0.0)
    scheduled = apply_rule(schedule_blocked_pooling, function, cpu)
    library = tvm.compile(tvm.IRModule({"main": scheduled}), target=cpu.target)
    wide = {16: ".4s", 32: "%ymm", 64: "%zmm"}[cpu.vector_bytes]
    lines = library.mod.inspect_source("s").splitlines()
    assert any(wide in line and "add" in line for line in lines)


def pooled_net(builder: relax.BlockBuilder, x: Any, weight: Callable[[Array], Any]) -> Any:
    """Convolutions with pools between them, as classic networks have."""
    first, last = randoms((32, 3, 3, 3), (16, 32, 1, 1))
    y = builder.emit(op.nn.conv2d(x, weight(first), padding=1))
    y = builder.emit(op.nn.max_pool2d(y, (3, 3), (2, 2), (1, 1), ceil_mode=True))
    y = builder.emit(op.nn.avg_pool2d(y, (3, 3), (1, 1), (1, 1), count_include_pad=False))
    y = builder.emit(op.nn.max_pool2d(y, (3, 3), (1, 1), (1, 1)))
    return builder.emit(op.nn.conv2d(builder.emit(op.nn.relu(y)), weight(last)))


def test_pools_between_convolutions(cpu: Cpu) -> None:
    shape = (1, 3, 30, 33)
    module, weights = network(shape, pooled_net)
    (x,) = draw([shape])
    with cpu.target:
        blocked = fuse(block_layouts(legalize(module, cpu), weights, cpu)[0], cpu)
    pools = [f for name, f in blocked.functions.items() if "pool" in name.name_hint]
    assert len(pools) == 3
    assert all(apply_rule(schedule_blocked_pooling, pool, cpu) is not None for pool in pools)
    results = [run(module, weights, x, cpu, choice) for choice in (False, True)]
    np.testing.assert_allclose(results[1], results[0], rtol=1e-4, atol=1e-5)
