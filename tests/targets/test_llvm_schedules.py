"""Scheduled functions against numpy, on shapes that do and do not divide into tiles."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.lib.stride_tricks import sliding_window_view

tvm = pytest.importorskip("tvm")

from hybridc.targets.llvm.cpu import Cpu, parse_cpu  # noqa: E402
from hybridc.targets.llvm.schedules import apply_rule, schedule_module  # noqa: E402
from hybridc.targets.llvm.schedules.conv2d import schedule_convolution  # noqa: E402
from hybridc.targets.llvm.schedules.registers import cycles_of, tiles_of  # noqa: E402
from tvm import relax, te, tirx  # noqa: E402

from tests.targets.properties import kernel_examples  # noqa: E402

op = relax.op
Array = np.ndarray[Any, Any]
Build = Callable[..., Any]


def fused(shapes: Sequence[Sequence[int]], build: Build, dtype: str = "float32") -> Any:
    """A module with fused functions; ``build(builder, *parameters)`` makes the result."""
    builder = relax.BlockBuilder()
    parameters = [
        relax.Var(f"p{i}", relax.TensorType(shape, dtype)) for i, shape in enumerate(shapes)
    ]
    with builder.function("main", parameters):
        with builder.dataflow():
            output = builder.emit_output(build(builder, *parameters))
        builder.emit_func_output(output)
    passes = relax.transform
    steps = [
        passes.LegalizeOps(),
        passes.AnnotateTIROpPattern(),
        passes.FoldConstant(),
        passes.FuseOps(),
        passes.FuseTIR(),
    ]
    return tvm.transform.Sequential(steps)(builder.finalize())


def run(module: Any, cpu: Cpu, arrays: Sequence[Array]) -> Array:
    """Result of the scheduled module's ``main``."""
    scheduled = schedule_module(module, cpu)
    machine = relax.VirtualMachine(relax.build(scheduled, cpu.target), tvm.cpu())
    return machine["main"](*(tvm.runtime.tensor(array) for array in arrays)).numpy()


def draw(shapes: Sequence[Sequence[int]], seed: int = 0) -> list[Array]:
    generator = np.random.default_rng(seed)
    return [generator.standard_normal(shape).astype("float32") for shape in shapes]


def check(
    cpu: Cpu,
    shapes: Sequence[Sequence[int]],
    build: Build,
    expected: Callable[..., Array],
    tolerance: float = 1e-5,
) -> None:
    arrays = draw(shapes)
    wide = expected(*(array.astype("float64") for array in arrays))
    result = run(fused(shapes, build), cpu, arrays)
    scale = max(1.0, float(np.abs(wide).max()))
    np.testing.assert_allclose(result / scale, wide / scale, rtol=0, atol=tolerance)


def emit(function: Callable[..., Any]) -> Build:
    return lambda builder, *parameters: builder.emit(function(*parameters))


@pytest.mark.parametrize("shape", [(3,), (1, 64, 20, 28), (1, 7, 13, 11), (5, 1, 1), (2, 3, 4097)])
def test_elementwise(cpu: Cpu, shape: tuple[int, ...]) -> None:
    check(cpu, [shape], emit(op.nn.relu), lambda x: np.maximum(x, 0))


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ((1, 32, 30, 30), (32, 1, 1)),
        ((3, 37, 7, 5), (37, 1, 1)),
        ((65, 385), (385,)),
        ((129, 130), (129, 1)),
        ((1, 1), (7, 9)),
    ],
)
def test_broadcast_chain(cpu: Cpu, left: tuple[int, ...], right: tuple[int, ...]) -> None:
    def build(builder: Any, x: Any, y: Any) -> Any:
        total = builder.emit(op.add(x, y))
        return builder.emit(op.multiply(total, builder.emit(op.nn.relu(total))))

    check(cpu, [left, right], build, lambda x, y: (x + y) * np.maximum(x + y, 0))


@pytest.mark.parametrize(
    ("shape", "axes"),
    [((197, 131), (1, 0)), ((3, 64, 33), (0, 2, 1)), ((2, 17, 5, 24), (0, 2, 1, 3)),
     ((1, 3, 19, 21), (0, 2, 3, 1)), ((16, 16), (1, 0))],
)  # fmt: skip
def test_transpose(cpu: Cpu, shape: tuple[int, ...], axes: tuple[int, ...]) -> None:
    check(cpu, [shape], emit(lambda x: op.permute_dims(x, axes)), lambda x: x.transpose(axes))


@pytest.mark.parametrize("axis", [1, 2])
def test_concatenation(cpu: Cpu, axis: int) -> None:
    shapes = [(2, 5, 33), (2, 7, 33) if axis == 1 else (2, 5, 15)]
    build = emit(lambda x, y: op.concat([x, y], axis))
    check(cpu, shapes, build, lambda x, y: np.concatenate([x, y], axis))


def test_padding(cpu: Cpu) -> None:
    build = emit(lambda x: op.nn.pad(x, [0, 0, 1, 0, 2, 3, 1, 2]))
    width = [(0, 0), (1, 0), (2, 3), (1, 2)]
    check(cpu, [(2, 3, 21, 35)], build, lambda x: np.pad(x, width))


@pytest.mark.parametrize("dtype", ["int64", "int8", "bool", "float64"])
def test_other_types(cpu: Cpu, dtype: str) -> None:
    values = np.random.default_rng(0).integers(0, 2, (3, 5, 37)).astype(dtype)
    function = op.logical_not if dtype == "bool" else op.negative
    expected = np.logical_not(values) if dtype == "bool" else -values
    result = run(fused([values.shape], emit(function), dtype), cpu, [values])
    np.testing.assert_array_equal(result, expected)


REDUCTIONS = [
    ((64, 130), (1,)),
    ((64, 197), (1,)),
    ((5, 384), (1,)),
    ((40, 33), (0,)),
    ((6, 50, 70), (1,)),
    ((1, 65, 7, 7), (2, 3)),
    ((2, 3, 13, 13), (2, 3)),
    ((3, 37), (0, 1)),
    ((4, 1), (1,)),
    ((1, 1009), (1,)),
]


@pytest.mark.parametrize(("shape", "axes"), REDUCTIONS)
@pytest.mark.parametrize("name", ["mean", "max", "prod"])
def test_reduction(name: str, shape: tuple[int, ...], axes: tuple[int, ...]) -> None:
    expected = getattr(np, name)
    build = emit(lambda x: getattr(op, name)(x, list(axes)))
    check(parse_cpu(""), [shape], build, lambda x: expected(x, axis=axes))


@pytest.mark.parametrize(
    ("shape", "axis"),
    [((128, 384), -1), ((3, 65, 197), -1), ((2, 19, 6, 33), 1), ((1, 1000), -1), ((4, 1), -1),
     ((3, 5), 0)],
)  # fmt: skip
def test_softmax(cpu: Cpu, shape: tuple[int, ...], axis: int) -> None:
    def expected(x: Array) -> Array:
        powers = np.exp(x - x.max(axis, keepdims=True))
        return powers / powers.sum(axis, keepdims=True)

    check(cpu, [shape], emit(lambda x: op.nn.softmax(x, axis)), expected, 1e-6)


@pytest.mark.parametrize("shape", [(16, 384), (3, 5, 37), (1, 197, 64), (7, 3)])
def test_layer_norm(cpu: Cpu, shape: tuple[int, ...]) -> None:
    def expected(x: Array, scale: Array, bias: Array) -> Array:
        centered = x - x.mean(-1, keepdims=True)
        return centered / np.sqrt(x.var(-1, keepdims=True) + 1e-5) * scale + bias

    shapes = [shape, shape[-1:], shape[-1:]]
    check(cpu, shapes, emit(lambda x, s, b: op.nn.layer_norm(x, s, b, [-1])), expected)


def windows(x: Array, size: tuple[int, int], stride: int) -> Array:
    return sliding_window_view(x, size, (2, 3))[:, :, ::stride, ::stride]


@pytest.mark.parametrize(
    ("shape", "size", "stride", "pad"),
    [((1, 8, 32, 40), 3, 2, 1), ((2, 5, 13, 17), 3, 1, 1), ((1, 3, 12, 12), 2, 2, 0)],
)
def test_pooling(cpu: Cpu, shape: tuple[int, ...], size: int, stride: int, pad: int) -> None:
    options = {"strides": (stride, stride), "padding": (pad, pad)}
    width = [(0, 0), (0, 0), (pad, pad), (pad, pad)]

    def maximum(x: Array) -> Array:
        padded = np.pad(x, width, constant_values=-np.inf)
        return windows(padded, (size, size), stride).max((4, 5))

    def average(x: Array) -> Array:
        return windows(np.pad(x, width), (size, size), stride).mean((4, 5))

    check(cpu, [shape], emit(lambda x: op.nn.max_pool2d(x, (size, size), **options)), maximum)
    options["count_include_pad"] = True
    check(cpu, [shape], emit(lambda x: op.nn.avg_pool2d(x, (size, size), **options)), average)


PRODUCTS = [
    ((64, 96), (96, 80)),
    ((197, 130), (130, 131)),
    ((1, 512), (512, 250)),
    ((7, 13), (13, 11)),
    ((3, 5), (5, 3)),
    ((64, 64), (64, 1)),
    ((1, 1), (1, 1)),
    ((2, 3, 17, 33), (2, 3, 33, 9)),
    ((4, 97, 33), (33, 70)),
    ((65, 300), (300, 257)),
]


@pytest.mark.parametrize(("left", "right"), PRODUCTS)
def test_matmul(cpu: Cpu, left: tuple[int, ...], right: tuple[int, ...]) -> None:
    def build(builder: Any, x: Any, y: Any, bias: Any) -> Any:
        product = builder.emit(op.matmul(x, y))
        return builder.emit(op.nn.relu(builder.emit(op.add(product, bias))))

    shapes = [left, right, right[-1:]]
    check(cpu, shapes, build, lambda x, y, b: np.maximum(x @ y + b, 0))


@pytest.mark.parametrize(
    ("left", "right"), [((65, 96), (80, 96)), ((1, 500), (99, 500)), ((31, 67), (19, 67))]
)
def test_matmul_with_transposed_weight(
    cpu: Cpu, left: tuple[int, int], right: tuple[int, int]
) -> None:
    def product(x: te.Tensor, y: te.Tensor) -> te.Tensor:
        k = te.reduce_axis((0, left[1]), "k")
        shape = (left[0], right[0])
        return te.compute(shape, lambda i, j: te.sum(x[i, k] * y[j, k], axis=k), name="product")

    build = lambda builder, x, y: builder.emit_te(product, x, y)  # noqa: E731
    check(cpu, [left, right], build, lambda x, y: x @ y.T)


def convolve(x: Array, weight: Array, stride: int, pad: int, dilation: int, groups: int) -> Array:
    """Convolution in numpy by the definition."""
    x = np.pad(x, [(0, 0), (0, 0), (pad, pad), (pad, pad)])
    height, width = ((size - 1) * dilation + 1 for size in weight.shape[2:])
    patches = windows(x, (height, width), stride)[..., ::dilation, ::dilation]
    per_group = [
        np.einsum("nchwyx,ocyx->nohw", data, kernel)
        for data, kernel in zip(np.split(patches, groups, 1), np.split(weight, groups), strict=True)
    ]
    return np.concatenate(per_group, 1)


def convolution(
    shape: Sequence[int], filters: int, kernel: tuple[int, int], **options: int
) -> tuple[list[Sequence[int]], Build, Callable[..., Array]]:
    """Shapes, module and reference of convolution, bias and relu."""
    stride, pad, dilation, groups = (
        options.get(name, default)
        for name, default in (("stride", 1), ("pad", 0), ("dilation", 1), ("groups", 1))
    )

    def build(builder: Any, x: Any, weight: Any, bias: Any) -> Any:
        result = op.nn.conv2d(x, weight, (stride, stride), (pad, pad), (dilation, dilation), groups)
        return builder.emit(op.nn.relu(builder.emit(op.add(builder.emit(result), bias))))

    def expected(x: Array, weight: Array, bias: Array) -> Array:
        return np.maximum(convolve(x, weight, stride, pad, dilation, groups) + bias, 0)

    shapes = [shape, (filters, shape[1] // groups, *kernel), (1, filters, 1, 1)]
    return shapes, build, expected


CONVOLUTIONS = [
    ((1, 16, 14, 14), 24, (3, 3), {"pad": 1}),
    ((1, 12, 7, 7), 13, (3, 3), {"pad": 1}),
    ((1, 32, 28, 28), 16, (1, 1), {}),
    ((1, 17, 13, 11), 19, (1, 1), {}),
    ((1, 3, 35, 37), 8, (7, 7), {"stride": 2, "pad": 3}),
    ((1, 8, 15, 15), 9, (1, 1), {"stride": 2}),
    ((1, 18, 20, 20), 18, (3, 3), {"pad": 1, "groups": 18}),
    ((1, 6, 21, 21), 12, (3, 3), {"pad": 1, "groups": 6, "stride": 2}),
    ((1, 8, 9, 9), 6, (3, 3), {"groups": 2}),
    ((1, 4, 16, 16), 5, (3, 3), {"dilation": 2, "pad": 2}),
]


@pytest.mark.parametrize(("shape", "filters", "kernel", "options"), CONVOLUTIONS)
def test_convolution(
    cpu: Cpu, shape: tuple[int, ...], filters: int, kernel: tuple[int, int], options: dict[str, int]
) -> None:
    shapes, build, expected = convolution(shape, filters, kernel, **options)
    functions = fused(shapes, build).functions.values()
    (function,) = (f for f in functions if isinstance(f, tirx.PrimFunc))
    assert apply_rule(schedule_convolution, function, cpu) is not None
    check(cpu, shapes, build, expected)


def test_padding_by_nothing_is_not_copied(cpu: Cpu) -> None:
    """A pointwise convolution of many filters reads each input often, and still where it is."""
    shapes, build, _ = convolution((1, 24, 16, 16), 96, (1, 1))
    functions = fused(shapes, build).functions.values()
    (function,) = (f for f in functions if isinstance(f, tirx.PrimFunc))
    assert "pad_temp" in function.script()
    scheduled = apply_rule(schedule_convolution, function, cpu)
    assert scheduled is not None
    assert "pad_temp" not in scheduled.script()


@pytest.mark.parametrize("kernel", [(1, 1), (5, 3)])
def test_convolution_before_a_chain(cpu: Cpu, kernel: tuple[int, int]) -> None:
    """What follows is too long for one block, so that its buffers may share memory in place."""
    shapes, first, reference = convolution((1, 1, 9, 30), 1, kernel, stride=2, dilation=2)

    def build(builder: Any, *parameters: Any) -> Any:
        x = first(builder, *parameters)
        for _ in range(16):
            x = builder.emit(op.add(x, builder.emit(op.tanh(x))))
        return x

    def expected(*arrays: Array) -> Array:
        x = reference(*arrays)
        for _ in range(16):
            x = x + np.tanh(x)
        return x

    check(cpu, shapes, build, expected)


@kernel_examples(15)
@given(
    size=st.tuples(st.integers(1, 18), st.integers(1, 18)),
    batch=st.integers(1, 2),
    channels=st.integers(1, 5),
    filters=st.integers(1, 9),
    kernel=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    stride=st.integers(1, 3),
    pad=st.integers(0, 2),
    dilation=st.integers(1, 2),
    groups=st.integers(1, 2),
)
def test_any_convolution(
    size: tuple[int, int],
    batch: int,
    channels: int,
    filters: int,
    kernel: tuple[int, int],
    stride: int,
    pad: int,
    dilation: int,
    groups: int,
) -> None:
    reach = [(extent - 1) * dilation + 1 for extent in kernel]
    size = tuple(max(s, r - 2 * pad, 1) for s, r in zip(size, reach, strict=True))
    shape = (batch, channels * groups, *size)
    shapes, build, expected = convolution(
        shape, filters * groups, kernel, stride=stride, pad=pad, dilation=dilation, groups=groups
    )
    check(parse_cpu(""), shapes, build, expected)


FUNCTIONS = {
    "exp": math.exp,
    "tanh": math.tanh,
    "erf": math.erf,
    "sigmoid": lambda x: 1 / (1 + math.exp(-x)),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_vector_math_is_accurate(cpu: Cpu, name: str) -> None:
    values = np.concatenate(
        [np.linspace(-80, 80, 4001), np.linspace(-5, 5, 4001), np.logspace(-30, 0, 301)]
    ).astype("float32")
    exact = np.array([FUNCTIONS[name](float(value)) for value in values])
    result = run(fused([values.shape], emit(getattr(op, name))), cpu, [values])
    normal = np.abs(exact) >= np.finfo("float32").tiny
    units = np.abs(result - exact)[normal] / np.spacing(np.abs(exact[normal]).astype("float32"))
    assert units.max() < 3


def test_vector_math_at_the_limits(cpu: Cpu) -> None:
    values = np.array([np.inf, -np.inf, np.nan, 89, -200, 88.7, 0, -0.0], "float32")
    results = {
        name: run(fused([values.shape], emit(getattr(op, name))), cpu, [values])
        for name in FUNCTIONS
    }
    with np.errstate(over="ignore"):
        np.testing.assert_allclose(results["exp"], np.exp(values), rtol=1e-6)
    for name, low in (("tanh", -1), ("erf", -1), ("sigmoid", 0)):
        np.testing.assert_array_equal(results[name][:3], [1, low, np.nan])
        assert results[name][6] == (0.5 if name == "sigmoid" else 0)


@pytest.mark.parametrize("target", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_vector_math_of_bfloat16(cpu: Cpu, name: str, target: str) -> None:
    """Conversions from and to bfloat16 are fused with the function."""
    values = np.linspace(-9, 9, 37).astype(ml_dtypes.bfloat16)

    def build(builder: Any, x: Any) -> Any:
        wide = builder.emit(op.astype(x, "float32"))
        result = builder.emit(getattr(op, name)(wide))
        return result if target == "float32" else builder.emit(op.astype(result, target))

    result = run(fused([values.shape], build, "bfloat16"), cpu, [values])
    exact = np.array([FUNCTIONS[name](float(value)) for value in values])
    tolerance = 1e-6 if target == "float32" else 2.0**-8
    np.testing.assert_allclose(result.astype("float64"), exact, rtol=tolerance)


def test_nested_math_compiles_quickly(cpu: Cpu) -> None:
    """Expansions inside expansions would take minutes; the result is right at any depth."""

    def build(builder: Any, x: Any, y: Any) -> Any:
        result = builder.emit(op.matmul(x, y))
        for _ in range(5):
            result = builder.emit(op.tanh(result))
        return result

    def expected(x: Array, y: Array) -> Array:
        result = x @ y
        for _ in range(5):
            result = np.tanh(result)
        return result

    check(cpu, [(20, 30), (30, 40)], build, expected)


def test_chain_of_diamonds(cpu: Cpu) -> None:
    """Inlined without end, it would grow exponentially; its buffers share memory in place."""

    def build(builder: Any, x: Any) -> Any:
        for _ in range(24):
            x = builder.emit(op.add(x, builder.emit(op.nn.relu(x))))
        return x

    def expected(x: Array) -> Array:
        for _ in range(24):
            x = x + np.maximum(x, 0)
        return x

    check(cpu, [(7, 33)], build, expected)


def test_symbolic_shapes(cpu: Cpu) -> None:
    rows = tirx.Var("rows", "int64")
    shapes = [(rows, 40), (40, 24)]
    build = emit(lambda x, y: op.nn.relu(op.matmul(x, y)))
    x, y = draw([(5, 40), (40, 24)])
    result = run(fused(shapes, build), cpu, [x, y])
    np.testing.assert_allclose(result, np.maximum(x @ y, 0), rtol=1e-4, atol=1e-5)


def test_tiles_fit_registers_and_output(cpu: Cpu) -> None:
    for rows in (1, 2, 5, 64, 197):
        for columns in (1, 3, 8, 49, 61, 1000):
            for tile in tiles_of(rows, columns, 4, cpu):
                assert tile.rows <= rows
                assert tile.columns <= columns
                assert tile.rows * tile.vectors + tile.vectors < cpu.vector_registers
                assert cycles_of(tile, rows, columns) > 0
