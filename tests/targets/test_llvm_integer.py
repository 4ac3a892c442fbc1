"""Integer kernels of the llvm target, bit for bit against exact integer arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from onnx import helper, numpy_helper

tvm = pytest.importorskip("tvm")

import tvm_ffi  # noqa: E402
from hybridc.targets.llvm.build import fuse, legalize  # noqa: E402
from hybridc.targets.llvm.cpu import Cpu, parse_cpu  # noqa: E402
from hybridc.targets.llvm.schedules import (  # noqa: E402
    amx_tiles,
    integer_winograd,
    schedule_module,
)
from hybridc.targets.llvm.schedules.blocks import collect  # noqa: E402
from hybridc.targets.llvm.schedules.integer_packing import pack_integer_products  # noqa: E402
from hybridc.targets.llvm.schedules.integer_strips import with_best_panel  # noqa: E402
from hybridc.targets.llvm.schedules.integer_tiles import PAIRS, QUADS, Geometry  # noqa: E402
from hybridc.targets.llvm.scratch import thread_bytes  # noqa: E402
from hybridc.targets.protocol import Section  # noqa: E402
from tvm import relax  # noqa: E402

from hybridc.lowering.lower import lower  # noqa: E402
from hybridc.lowering.ops import default_table  # noqa: E402

Array = np.ndarray[Any, Any]


def _runnable() -> list[str]:
    """CPUs to make code for that this machine can run."""
    flags = set(Path("/proc/cpuinfo").read_text().split())
    names = ("x86-64-v3", "x86-64-v4", "host")
    return [name for name in names if set(parse_cpu(name).kernel_flags) <= flags]


CPUS = _runnable()

TILES = pytest.mark.skipif(
    not amx_tiles.has_tiles(parse_cpu("host")),
    reason="this CPU has no AMX, or Linux does not let programs use it",
)


def random_integers(shape: Sequence[int], dtype: str, seed: int) -> Array:
    """All values of a type, its ends more often than by chance."""
    generator = np.random.default_rng(seed)
    info = np.iinfo(dtype)
    drawn = generator.integers(info.min, info.max + 1, shape)
    ends = generator.integers(0, 8, shape)
    drawn = np.where(ends == 0, info.min, np.where(ends == 1, info.max, drawn))
    return drawn.astype(dtype)


def make_model(
    operator: str, x: Array, constants: Sequence[Array | None], domain: str, **attributes: Any
) -> onnx.ModelProto:
    """One node whose inputs after the first are constants."""
    names = [f"c{i}" if array is not None else "" for i, array in enumerate(constants)]
    node = helper.make_node(operator, ["x", *names], ["y"], domain=domain, **attributes)
    kind = helper.np_dtype_to_tensor_dtype(x.dtype)
    graph = helper.make_graph(
        [node],
        "one",
        [helper.make_tensor_value_info("x", kind, x.shape)],
        [onnx.ValueInfoProto(name="y")],
        [
            numpy_helper.from_array(a, n)
            for a, n in zip(constants, names, strict=True)
            if a is not None
        ],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8)


def kernels(model: onnx.ModelProto, cpu: Cpu) -> tuple[tvm.IRModule, list[Array]]:
    """The module's fused kernels as the llvm target makes them, and its weights."""
    graph = ir.serde.deserialize_model(model).graph
    inputs = [value for value in graph.inputs if value.name not in graph.initializers]
    section = Section(list(graph), inputs, list(graph.outputs), dict(graph.opset_imports))
    lowered = lower(section, default_table())
    with cpu.target:
        module, weights = pack_integer_products(lowered.module, lowered.weights, cpu)
        return fuse(legalize(module, cpu), cpu), list(weights.values())


def scheduled(model: onnx.ModelProto, cpu: Cpu) -> tuple[tvm.IRModule, list[Array]]:
    """The module as the llvm target builds it, and its weights."""
    module, weights = kernels(model, cpu)
    with cpu.target:
        return schedule_module(module, cpu), weights


def run(model: onnx.ModelProto, cpu: Cpu, x: Array, instruction: str = "") -> Array:
    """What the llvm target's code gives; the code must have an instruction in it."""
    module, weights = scheduled(model, cpu)
    if instruction:
        assert instruction in assembly_of(module, cpu)
    machine = relax.VirtualMachine(relax.build(module, cpu.target), tvm.cpu())
    parameters = tvm_ffi.Array([tvm.runtime.tensor(array) for array in weights])
    return machine["main"](tvm.runtime.tensor(x), parameters)[0].numpy()


def quantized(sums: Array, scale: Array, zero: Array) -> Array:
    """Exact sums scaled in float32, rounded half to even and saturated."""
    info = np.iinfo(zero.dtype)
    rounded = np.rint(sums.astype(np.float32) * scale).astype(np.int64) + int(zero)
    return np.clip(rounded, info.min, info.max).astype(zero.dtype)


def convolve(x: Array, w: Array, pads: Sequence[int], stride: int, dilation: int, groups: int):
    """Exact int64 convolution of ``(N, H, W, C)`` with ``(M, C / groups, i, j)``."""
    padded = np.pad(x, [(0, 0), (pads[0], pads[2]), (pads[1], pads[3]), (0, 0)])
    rows = (padded.shape[1] - (w.shape[2] - 1) * dilation - 1) // stride + 1
    columns = (padded.shape[2] - (w.shape[3] - 1) * dilation - 1) // stride + 1
    total = np.zeros((x.shape[0], rows, columns, w.shape[0]), np.int64)
    for i in range(w.shape[2]):
        for j in range(w.shape[3]):
            piece = padded[:, i * dilation :, j * dilation :][:, ::stride, ::stride]
            piece = piece[:, :rows, :columns]
            taps = w[:, :, i, j]
            if groups == 1:
                total += piece @ taps.T
            else:
                total += piece * taps[:, 0]
    return total


@st.composite
def convolutions(draw):
    depthwise = draw(st.booleans())
    channels = draw(st.integers(1, 40))
    filters = channels if depthwise else draw(st.integers(1, 70))
    kernel = (draw(st.integers(1, 3)), draw(st.integers(1, 3)))
    dilation = draw(st.integers(1, 2))
    size = [draw(st.integers((taps - 1) * dilation + 1, 11)) for taps in kernel]
    return {
        "x": (draw(st.integers(1, 2)), *size, channels),
        "w": (filters, 1 if depthwise else channels, *kernel),
        "pads": [draw(st.integers(0, 2)) for _ in range(4)],
        "stride": draw(st.integers(1, 3)),
        "dilation": dilation,
        "groups": channels if depthwise else 1,
        "types": draw(st.sampled_from([("uint8", "int8"), ("int8", "int8"), ("uint8", "uint8")])),
        "zeros": (draw(st.integers(0, 127)), draw(st.sampled_from([0, 0, 5]))),
    }


SMALL = settings(
    max_examples=12, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)

EXAMPLE = {
    "x": (1, 9, 7, 34), "w": (72, 34, 3, 3), "pads": [1, 1, 1, 1], "stride": 1, "dilation": 1,
    "groups": 1, "types": ("uint8", "int8"), "zeros": (113, 0),
}  # fmt: skip


@pytest.mark.parametrize("cpu", CPUS)
@SMALL
@given(convolutions())
@example(EXAMPLE)
@example(EXAMPLE | {"w": (16, 34, 1, 1), "types": ("int8", "int8"), "pads": [0, 0, 0, 0]})
@example(EXAMPLE | {"x": (2, 9, 7, 24), "w": (24, 1, 3, 3), "groups": 24, "stride": 2})
@example(EXAMPLE | {"x": (1, 6, 5, 40), "w": (40, 1, 5, 5), "groups": 40, "zeros": (255, 0)})
@example(EXAMPLE | {"x": (2, 1, 9, 17), "w": (17, 1, 1, 4), "groups": 17, "dilation": 2})
@example(EXAMPLE | {"x": (1, 9, 9, 16), "w": (16, 1, 1, 1), "groups": 16})
def test_convolutions(cpu, case):
    check_convolution(cpu, case)


def convolution_of(case: dict[str, Any], x: Array, constants: Sequence[Array]) -> onnx.ModelProto:
    """A model of one convolution with the channels last."""
    return make_model(
        "QLinearConv", x, constants, "com.microsoft", channels_last=1, group=case["groups"],
        pads=case["pads"], strides=[case["stride"]] * 2, dilations=[case["dilation"]] * 2,
    )  # fmt: skip


def sums_of(case: dict[str, Any], x: Array, w: Array) -> Array:
    """Its exact sums, of integers less their zero points."""
    wide = (array.astype(np.int64) for array in (x, w))
    return convolve(*wide, case["pads"], case["stride"], case["dilation"], case["groups"])


def wide_weight(shape: Sequence[int], seed: int) -> Array:
    """int16 weights of which a filter's sums with any int16 data just fit in int32."""
    weight = random_integers(shape, "int16", seed).astype(np.int64)
    sums = np.abs(weight).sum(axis=tuple(range(1, weight.ndim)), keepdims=True)
    return (weight * np.minimum(1, 65535 / np.maximum(sums, 1))).astype(np.int16)


@pytest.mark.parametrize("cpu", CPUS)
@SMALL
@given(convolutions())
@example(EXAMPLE)
@example(EXAMPLE | {"w": (16, 34, 1, 1), "pads": [0, 0, 0, 0]})
@example(EXAMPLE | {"x": (2, 9, 7, 24), "w": (24, 1, 3, 3), "groups": 24, "stride": 2})
@example(EXAMPLE | {"x": (1, 30, 30, 32), "w": (64, 32, 3, 3)})
def test_convolutions_of_int16(cpu, case):
    """Data over the whole range of int16, also where 8 bits would go by Winograd's algorithm."""
    x, w = random_integers(case["x"], "int16", 1), wide_weight(case["w"], 2)
    filters, zero = w.shape[0], np.array(0, np.int16)
    scale = np.random.default_rng(3).uniform(1e-6, 2e-5, filters).astype(np.float32)
    one = np.asarray(np.float32(1))
    constants = [one, zero, w, scale, np.zeros(filters, np.int16), one, zero]
    model = convolution_of(case, x, constants)
    sums = sums_of(case, x, w)
    assert np.abs(sums).max(initial=0) < 2**31
    np.testing.assert_array_equal(run(model, parse_cpu(cpu), x), quantized(sums, scale, zero))


@pytest.mark.parametrize("cpu", CPUS)
@SMALL
@given(st.integers(1, 40), st.integers(1, 300), st.integers(1, 90), st.booleans())
@example(17, 64, 128, False)
def test_matrix_products_of_int16(cpu, rows, inner, columns, is_narrow):
    """With weights of 16 and of 8 bits."""
    x = random_integers((rows, inner), "int16", 1)
    w = wide_weight((columns, inner), 2).T.copy()
    if is_narrow:
        w = np.clip(w, -128, 127).astype(np.int8)
    model = make_model("MatMulInteger", x, [w], "")
    expected = x.astype(np.int64) @ w.astype(np.int64)
    np.testing.assert_array_equal(run(model, parse_cpu(cpu), x), expected.astype(np.int32))


SHIFT = "\tvpsrad\t$2,"
"""What only a convolution by Winograd's algorithm does."""


@pytest.mark.skipif("x86-64-v3" not in CPUS, reason="this CPU has no AVX2")
@settings(SMALL, max_examples=20)
@given(convolutions(), st.integers(2, 70), st.integers(2, 9), st.integers(2, 9), st.integers(8, 70))
@example(EXAMPLE, 34, 9, 7, 72)
@example(EXAMPLE, 1, 2, 2, 8)
@example(EXAMPLE | {"x": (2, 0, 0, 0), "zeros": (0, 0)}, 18, 14, 15, 24)
@example(EXAMPLE | {"types": ("uint8", "uint8"), "zeros": (127, 5)}, 300, 3, 4, 9)
def test_convolutions_by_winograd(case, channels, rows, columns, filters):
    """Winograd's algorithm wherever it can be used, also where a direct kernel would be faster."""
    pads = case["pads"]
    size = max(rows + 2 - pads[0] - pads[2], 1), max(columns + 2 - pads[1] - pads[3], 1)
    dense = {
        "x": (case["x"][0], *size, channels),
        "w": (filters, channels, 3, 3),
        "groups": 1,
        "stride": 1,
        "dilation": 1,
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(integer_winograd, "MARGIN", 0)
        check_convolution("x86-64-v3", case | dense, SHIFT)


@pytest.mark.parametrize(("channels", "fits"), [(460, True), (461, False)])
def test_winograd_is_used_where_its_sums_fit(channels, fits):
    """Sums of 36 * 127 * 4 * 255 for each channel stay below 2 ** 31."""
    cpu = parse_cpu("x86-64-v3")
    x, w = np.zeros((1, 14, 14, channels), np.uint8), np.full((64, channels, 3, 3), -127, np.int8)
    module, _ = scheduled(make_convolution(x, w, pads=[1, 1, 1, 1]), cpu)
    assert (SHIFT in assembly_of(module, cpu)) == fits


POINTWISE = {"pads": [0, 0, 0, 0], "stride": 1, "dilation": 1}


@TILES
@settings(SMALL, max_examples=10)
@given(convolutions(), st.integers(16, 80), st.integers(1, 150))
@example(EXAMPLE, 48, 34)
@example(EXAMPLE | {"x": (2, 7, 7, 0)}, 32, 64)
@example(EXAMPLE | {"x": (2, 30, 18, 0), "types": ("int8", "int8"), "stride": 2}, 64, 66)
@example(EXAMPLE | {"x": (2, 9, 9, 0), "dilation": 2}, 17, 130)
@example(EXAMPLE | {"x": (3, 11, 5, 0), "w": (0, 0, 1, 1)} | POINTWISE, 40, 67)
def test_convolutions_with_tiles(case, filters, channels):
    """Tiles wherever the CPU can, also where vectors would be faster."""
    tiled = {
        "x": (*case["x"][:3], channels),
        "w": (filters, channels, *case["w"][2:]),
        "groups": 1,
        "types": (case["types"][0], "int8"),
        "zeros": (case["zeros"][0], 0),
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(amx_tiles, "vector_cycles", lambda _: float("inf"))
        check_convolution("host", case | tiled, "\ttdpb")


def check_convolution(cpu: str, case: dict[str, Any], instruction: str = "") -> None:
    """A convolution is exact, and has an instruction in its assembly."""
    x = random_integers(case["x"], case["types"][0], 1)
    w = random_integers(case["w"], case["types"][1], 2)
    zeros = [np.array(z, d) for z, d in zip(case["zeros"], case["types"], strict=True)]
    filters = w.shape[0]
    scale = np.random.default_rng(3).uniform(1e-4, 2e-3, filters).astype(np.float32)
    bias = random_integers((filters,), "int16", 4).astype(np.int32)
    zero = np.array(7, "uint8")
    constants = [
        np.float32(1), zeros[0], w, scale, np.full(filters, zeros[1], w.dtype), np.float32(1), zero,
        bias,
    ]  # fmt: skip
    constants = [np.asarray(array) for array in constants]
    model = convolution_of(case, x, constants)
    centered = (a.astype(np.int64) - z for a, z in zip((x, w), case["zeros"], strict=True))
    sums = sums_of(case, *centered)
    expected = quantized(sums + bias, scale, zero)
    np.testing.assert_array_equal(run(model, parse_cpu(cpu), x, instruction), expected)


@pytest.mark.parametrize("cpu", CPUS)
@SMALL
@given(
    st.lists(st.integers(1, 12), min_size=1, max_size=3),
    st.integers(1, 300),
    st.integers(1, 90),
    st.sampled_from([("uint8", 200), ("int8", -128), ("uint8", 0), ("int8", 0)]),
    st.sampled_from([("int8", 0), ("uint8", 128), ("uint8", 3)]),
)
@example([5, 3], 4096, 64, ("uint8", 255), ("int8", 0))
@example([17], 64, 128, ("int8", 0), ("int8", 0))
def test_matrix_products(cpu, rows, inner, columns, left, right):
    check_matrix_product(cpu, rows, inner, columns, left, right)


@pytest.mark.parametrize("length", range(1, 70))
def test_tiles_cover_a_run(length):
    """Tiles of a run of positions reach all of them, and none beyond its ends."""
    one = [QUADS, 1, 1, length, 64, 64, 1, 1, 1, 1, 0, 0, 16, 4]
    walk = amx_tiles.walk_of(Geometry(*one), 1)
    first = [min(b * walk.block, walk.length - walk.block) for b in range(walk.blocks)]
    reached = {b + s + row for b in first for s in walk.starts for row in range(walk.rows)}
    assert reached == set(range(length))
    assert walk.rows <= amx_tiles.ROWS


@TILES
@settings(SMALL, max_examples=8)
@given(
    st.lists(st.integers(1, 12), min_size=1, max_size=3),
    st.integers(1, 300),
    st.integers(16, 90),
    st.sampled_from([("uint8", 200), ("int8", -128), ("uint8", 0), ("int8", 0)]),
    st.sampled_from([("int8", 0), ("uint8", 128)]),
)
@example([5, 13], 4096, 64, ("uint8", 255), ("int8", 0))
@example([17], 64, 128, ("int8", 0), ("int8", 0))
@example([40], 1600, 170, ("uint8", 3), ("int8", 0))
@example([40], 4096, 288, ("int8", 3), ("int8", 0))
def test_matrix_products_with_tiles(rows, inner, columns, left, right):
    """Tiles wherever the CPU can, also where vectors would be faster."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(amx_tiles, "vector_cycles", lambda _: float("inf"))
        check_matrix_product("host", rows, inner, columns, left, right, "\ttdpb")


def check_matrix_product(
    cpu: str,
    rows: list[int],
    inner: int,
    columns: int,
    left: tuple[str, int],
    right: tuple[str, int],
    instruction: str = "",
) -> None:
    """A product of matrices with zero points is exact, and has an instruction in its assembly."""
    x = random_integers((*rows, inner), left[0], 1)
    w = random_integers((inner, columns), right[0], 2)
    zeros = [np.array(left[1], left[0]), np.array(right[1], right[0])]
    model = make_model("MatMulInteger", x, [w, *zeros], "")
    expected = (x.astype(np.int64) - left[1]) @ (w.astype(np.int64) - right[1])
    found = run(model, parse_cpu(cpu), x, instruction)
    np.testing.assert_array_equal(found, expected.astype(np.int32))


@pytest.mark.parametrize(
    ("cpu", "expected"),
    [
        ("x86-64-v3", "vpmaddwd"),
        ("x86-64-v4", "vpmaddwd"),
        ("alderlake", "vpdpbusd"),
        ("cascadelake", "vpdpbusd"),
        ("sapphirerapids", "tdpbusd"),
        ("neoverse-n1", "sdot"),
        ("neoverse-v1", "usdot"),
    ],
)
def test_the_instructions(cpu, expected):
    """A convolution uses the widest exact instruction, and never vpmaddubsw, which saturates."""
    found = parse_cpu(cpu)
    x = random_integers((1, 12, 12, 32), "uint8", 1)
    w = random_integers((64, 32, 3, 3), "int8", 2)
    module, weights = scheduled(make_convolution(x, w), found)
    assert [a.dtype for a in weights if a.ndim == 5] == [np.int8]
    assembly = assembly_of(module, found)
    assert f"\t{expected}\t" in assembly
    assert "vpmaddubsw" not in assembly


def assembly_of(module: tvm.IRModule, cpu: Cpu) -> str:
    """Assembly of all kernels."""
    kernels = {v: f for v, f in module.functions.items() if isinstance(f, tvm.tirx.PrimFunc)}
    named = {v: f.with_attr("global_symbol", v.name_hint) for v, f in kernels.items()}
    return str(tvm.compile(tvm.IRModule(named), target=cpu.target).mod.inspect_source("asm"))


def make_convolution(x: Array, w: Array, **attributes: Any) -> onnx.ModelProto:
    """A convolution of images with the channels last."""
    one, zero = np.array(1, np.float32), np.array(3, np.uint8)
    constants = [one, zero, w, one, np.array(0, w.dtype), one, zero]
    return make_model("QLinearConv", x, constants, "com.microsoft", channels_last=1, **attributes)


def own_buffers(model: onnx.ModelProto, cpu: Cpu) -> tuple[dict[str, int], int]:
    """Bytes of what tasks have for their own by its name, and what is counted for a thread."""
    fused, _ = kernels(model, cpu)
    module, _ = scheduled(model, cpu)
    buffers = [
        node.buffer
        for function in module.functions.values()
        if isinstance(function, tvm.tirx.PrimFunc)
        for node in collect(function.body, tvm.tirx.AllocBuffer)
    ]
    sizes = {
        str(b.name): int(np.prod(list(map(int, b.shape)))) * np.dtype(str(b.dtype)).itemsize
        for b in buffers
    }
    return sizes, thread_bytes(fused, cpu)


def test_a_strip_is_counted_and_takes_one_address():
    """With AVX2, a convolution's data is copied so that constants tell its pixels apart."""
    cpu = parse_cpu("x86-64-v3")
    x = random_integers((1, 20, 20, 96), "uint8", 1)
    w = random_integers((24, 96, 3, 3), "int8", 2)
    model = make_convolution(x, w, strides=[2, 2])
    sizes, counted = own_buffers(model, cpu)
    assert counted == sizes["strip"]
    module, _ = scheduled(model, cpu)
    product = assembly_of(module, cpu).split("vpmaddwd")
    assert len(product) > 2
    assert not any("vpextr" in piece for piece in product[1:-1])


def test_what_winograd_keeps_is_counted():
    """Transformed inputs and weights, and products, belong to a task."""
    x = random_integers((1, 20, 20, 96), "uint8", 1)
    w = random_integers((24, 96, 3, 3), "int8", 2)
    sizes, counted = own_buffers(make_convolution(x, w), parse_cpu("x86-64-v3"))
    assert counted == sum(sizes[name] for name in ("inputs", "weights", "products"))


@pytest.mark.parametrize(
    ("filters", "pixels", "expected"), [(24, 100, 1), (64, 100, 2), (64, 6, 2), (8, 4, 1)]
)
def test_panels_waste_no_filters(filters, pixels, expected):
    """Three vectors of filters are no two panels of two."""
    sizes = [PAIRS, 1, 1, pixels, 64, filters, 1, 1, 1, 1, 1, 1, 8, 1]
    chosen = with_best_panel(Geometry(*sizes), parse_cpu("x86-64-v3"))
    assert chosen.vectors == expected


def test_depthwise_taps_are_multiplied_by_pairs():
    """With AVX2, no product of a depthwise convolution is one of int32."""
    cpu = parse_cpu("x86-64-v3")
    x = random_integers((1, 12, 12, 40), "uint8", 1)
    w = random_integers((40, 1, 5, 5), "int8", 2)
    module, _ = scheduled(make_convolution(x, w, group=40), cpu)
    assembly = assembly_of(module, cpu)
    assert "vpmaddwd" in assembly
    assert "vpmulld" not in assembly
