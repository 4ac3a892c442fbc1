"""Winograd's algorithm on GPUs: its kernels on the CPU, their source, and what they are for."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
from hybridc.targets.cuda.architectures import parse_gpu
from hybridc.targets.cuda.build import make_kernels
from hybridc.targets.cuda.nvcc import compile_source
from hybridc.targets.gpu.schedules.winograd_choice import (
    NONE,
    Geometry,
    winograd_choices,
    winograd_problem,
)
from hybridc.targets.gpu.tunable import Bench
from hybridc.targets.gpu.tunable_convolutions import Convolutions, convolution_alone
from hybridc.targets.gpu.winograd import geometry_of, pack, with_winograd
from hybridc.targets.llvm.layout.graph import bindings_of
from hybridc.targets.llvm.layout.main_writer import weight_names
from hybridc.targets.llvm.schedules.winograd_transforms import weight_matrix
from hybridc.targets.opencl.devices import parse_devices
from hybridc.targets.opencl.measure import tunable
from hybridc.targets.protocol import Device
from hybridc.targets.tuning import Tuning, figures
from hypothesis import given, settings
from hypothesis import strategies as st

import hybridc
from hybridc.errors import UsageError
from hybridc.lowering.lower import Lowered
from hybridc.runtime.tensors import HOST
from tests.gpu.emulation import cuda_source, divergent_barriers, lowered_model, run_serially
from tests.models import make_model, node, random, run_reference
from tests.support import assert_close, compile_to
from tests.targets.test_cuda import needs_nvcc
from tests.targets.test_opencl import needs_device

LIMITS = parse_gpu("sm_90").limits


def geometries(lowered: Lowered) -> list[Geometry]:
    """The convolutions that the algorithm can compute."""
    names = weight_names(lowered.module, lowered.weights)
    values = [getattr(binding, "value", None) for binding in bindings_of(lowered.module["main"])]
    found = [geometry_of(value, names) for value in values]
    return [geometry for geometry in found if geometry is not None]


def forced(size: int, **limits: Any) -> Callable[[Lowered], Lowered]:
    """Lets all convolutions have tiles of a size, as if measured."""

    def pack(lowered: Lowered) -> Lowered:
        problems = {winograd_problem(geometry) for geometry in geometries(lowered)}
        tuning = Tuning(tuple((problem, figures(size=size)) for problem in problems))
        wanted = dataclasses.replace(LIMITS, tuning=tuning, **limits)
        module, weights = with_winograd(lowered.module, lowered.weights, wanted)
        return dataclasses.replace(lowered, module=module, weights=dict(weights))

    return pack


def convolution(
    batch: int,
    channels: int,
    filters: int,
    size: tuple[int, int],
    pads: tuple[int, int, int, int] = (1, 1, 1, 1),
    epilogue: str = "",
    **attributes: Any,
) -> Any:
    """A convolution with a bias and perhaps what follows it."""
    top, left, bottom, right = pads
    shape = (batch, filters, size[0] + top + bottom - 2, size[1] + left + right - 2)
    nodes = [node("Conv", "x w b", "c", pads=list(pads), **attributes)]
    inputs: dict[str, Any] = {"x": (batch, channels, *size)}
    last = "c"
    if "sum" in epilogue:
        nodes.append(node("Add", f"{last} r", "s"))
        inputs["r"], last = shape, "s"
    if "relu" in epilogue:
        nodes.append(node("Relu", last, "y"))
        last = "y"
    weights = {"w": random(filters, channels, 3, 3, seed=1), "b": random(filters, seed=2)}
    return make_model(nodes, inputs, {last: shape}, weights)


def feeds_of(model: Any) -> dict[str, Any]:
    weights = {tensor.name for tensor in model.graph.initializer}
    feeds = {}
    for seed, value in enumerate(model.graph.input):
        if value.name not in weights:
            dims = [dim.dim_value for dim in value.type.tensor_type.shape.dim]
            feeds[value.name] = random(*dims, seed=seed + 3)
    return feeds


def check(model: Any, size: int, tolerance: float = 1e-5) -> None:
    """Compare with ONNX Runtime, in units of the largest result."""
    feeds = feeds_of(model)
    results = run_serially(model, feeds, pack=forced(size))
    for name, expected in run_reference(model, feeds).items():
        assert results[name].shape == expected.shape
        error = np.abs(results[name] - expected).max() / np.abs(expected).max()
        assert error <= tolerance, error


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("epilogue", ["", "relu", "sum", "sum relu"])
@pytest.mark.parametrize("image", [(8, 8), (7, 10)])
def test_results_are_those_of_onnx_runtime(
    size: int, epilogue: str, image: tuple[int, int]
) -> None:
    check(convolution(2, 9, 11, image, epilogue=epilogue), size)


side = st.integers(2, 13)
pad = st.integers(1, 2)


@settings(max_examples=10, deadline=None)
@given(
    st.sampled_from([2, 4]),
    st.integers(1, 3),
    st.tuples(st.integers(7, 20), st.integers(7, 20)),
    st.tuples(side, side),
    st.tuples(pad, pad, pad, pad),
)
def test_convolutions_of_any_size(
    size: int,
    batch: int,
    channels: tuple[int, int],
    image: tuple[int, int],
    pads: tuple[int, int, int, int],
) -> None:
    model = convolution(batch, *channels, image, pads)
    (geometry,) = geometries(lowered_model(model)[0])
    assert (geometry.top, geometry.left) == pads[:2]
    if figures(size=size) in winograd_choices(geometry):
        check(model, size)


@pytest.mark.parametrize("pads", [(0, 0, 0, 0), (0, 2, 1, 0), (3, 0, 0, 5)])
def test_padding_of_each_side_is_its_own(pads: tuple[int, int, int, int]) -> None:
    check(convolution(2, 8, 16, (10, 13), pads, "relu"), 4)


def with_reader(nodes: list[Any], inputs: dict[str, Any], outputs: dict[str, Any]) -> Any:
    """A convolution of 8 channels of 9 x 12, whose results ``c`` are read by some nodes."""
    first = node("Conv", "x w", "c", pads=[1, 1, 1, 1])
    weights = {"w": random(8, 8, 3, 3, seed=1)}
    return make_model([first, *nodes], {"x": (1, 8, 9, 12), **inputs}, outputs, weights)


SHAPE = (1, 8, 9, 12)

READERS = {
    "two": ([node("Relu", "c", "y"), node("Exp", "c", "z")], {}, {"y": SHAPE, "z": SHAPE}),
    "also an output": ([node("Relu", "c", "y")], {}, {"c": SHAPE, "y": SHAPE}),
    "repeats it": ([node("Add", "c r", "y")], {"r": (2, *SHAPE[1:])}, {"y": (2, *SHAPE[1:])}),
    "along columns": ([node("Mul", "c r", "y")], {"r": (12,)}, {"y": SHAPE}),
    "along rows": ([node("Mul", "r c", "y")], {"r": (9, 1)}, {"y": SHAPE}),
    "twice": ([node("Sigmoid", "c", "s"), node("Mul", "c s", "y")], {}, {"y": SHAPE}),
    "of another shape": (
        [node("Transpose", "c", "y", perm=[0, 2, 3, 1])],
        {},
        {"y": (1, 9, 12, 8)},
    ),
    "a maximum": ([node("GlobalMaxPool", "c", "y")], {}, {"y": (1, 8, 1, 1)}),
}


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", READERS)
def test_what_reads_the_results(name: str, size: int) -> None:
    check(with_reader(*READERS[name]), size)


def test_convolutions_behind_each_other_and_two_of_one_image() -> None:
    nodes = [
        node("Conv", "x w", "a", pads=[1, 1, 1, 1]),
        node("Relu", "a", "r"),
        node("Conv", "r v", "b", pads=[1, 1, 1, 1]),
        node("Conv", "r w", "d", pads=[1, 1, 1, 1]),
        node("Add", "b d", "y"),
    ]
    weights = {"w": random(8, 8, 3, 3, seed=1), "v": random(8, 8, 3, 3, seed=2)}
    check(make_model(nodes, {"x": (1, 8, 9, 9)}, {"y": (1, 8, 9, 9)}, weights), 4)


@pytest.mark.parametrize("size", [2, 4])
def test_transforms_are_written_out(size: int) -> None:
    """No thread sums over a tile, and none waits for another outside of the product."""
    source = cuda_source(convolution(2, 9, 12, (8, 8), epilogue="sum relu"), pack=forced(size))
    assert list(divergent_barriers(source)) == []
    kernels = source.split("__global__")[1:]
    transforms = [kernel for kernel in kernels if "winograd_products_kernel" not in kernel]
    assert [len(re.findall("for \\(|syncthreads", kernel)) for kernel in transforms] == [0] * len(
        transforms
    )
    assert len(transforms) >= 2
    assert any(f"*(float{size}*)" in kernel for kernel in transforms)


@needs_nvcc
def test_the_source_is_cuda() -> None:
    source = cuda_source(convolution(2, 9, 12, (7, 8), epilogue="sum relu"), pack=forced(4))
    assert compile_source(source, ("sm_90",))


def lowered_convolution(**changes: Any) -> Lowered:
    given = {"batch": 1, "channels": 16, "filters": 16, "size": (12, 12), **changes}
    return lowered_model(convolution(**given))[0]


@pytest.mark.parametrize(
    "node_",
    [
        node("Conv", "x w", "y", pads=[1, 1, 1, 1], strides=[2, 1]),
        node("Conv", "x w", "y", pads=[2, 2, 2, 2], dilations=[2, 2]),
        node("Conv", "x g", "y", pads=[1, 1, 1, 1], group=2),
        node("Conv", "x v", "y", pads=[2, 2, 2, 2]),
        node("Conv", "x u", "y", pads=[1, 1, 1, 1]),
    ],
    ids=["strides", "dilations", "groups", "5 x 5", "filters that are no weights"],
)
def test_convolutions_that_are_left_alone(node_: Any) -> None:
    weights = {"w": random(16, 16, 3, 3), "g": random(16, 8, 3, 3), "v": random(16, 16, 5, 5)}
    inputs = {"x": (1, 16, 12, 12), "u": (16, 16, 3, 3)}
    rows = 6 if node_.attribute[-1].name == "strides" else 12
    model = make_model([node_], inputs, {"y": (1, 16, rows, 12)}, weights)
    lowered = lowered_model(model)[0]
    assert "relax.nn.conv2d" in conv_names(lowered)
    assert geometries(lowered) == []


def conv_names(lowered: Lowered) -> set[str]:
    bindings = bindings_of(lowered.module["main"])
    values = (getattr(binding, "value", None) for binding in bindings)
    return {str(getattr(getattr(value, "op", None), "name", "")) for value in values}


def test_images_of_unknown_number_are_left_alone() -> None:
    nodes = [node("Conv", "x w", "y", pads=[1, 1, 1, 1])]
    weights = {"w": random(64, 64, 3, 3)}
    shape = ("n", 64, 56, 56)
    model = make_model(nodes, {"x": shape}, {"y": shape}, weights)
    lowered = lowered_model(model, "n=1..64")[0]
    assert with_winograd(lowered.module, lowered.weights, LIMITS)[0] is lowered.module


@pytest.mark.parametrize("limits", [{"strict_math": True}, {"matrix_types": {"float32"}}])
def test_neither_strict_math_nor_tensor_cores(limits: dict[str, Any]) -> None:
    lowered = lowered_convolution()
    assert forced(4)(lowered).module is not lowered.module
    assert forced(4, **limits)(lowered).module is lowered.module


def test_half_precision_is_left_to_tensor_cores() -> None:
    nodes = [node("Conv", "x w", "y", pads=[1, 1, 1, 1])]
    weights = {"w": random(16, 16, 3, 3).astype("float16")}
    shape = (1, 16, 12, 12)
    model = make_model(nodes, {"x": shape}, {"y": shape}, weights, dtype=np.float16)
    assert geometries(lowered_model(model)[0]) == []


def chosen(batch: int, channels: int, filters: int, edge: int) -> int:
    geometry = Geometry(batch, channels, filters, edge, edge, edge, edge, 1, 1)
    return next(iter(winograd_choices(geometry).values()))


@pytest.mark.parametrize(
    ("channels", "edge"), [(64, 56), (128, 28), (256, 14), (512, 7), (256, 56), (512, 28)]
)
def test_many_images_are_transformed(channels: int, edge: int) -> None:
    assert chosen(32, channels, channels, edge) in (2, 4)


@pytest.mark.parametrize(
    ("batch", "channels", "filters", "edge"), [(32, 3, 64, 224), (1, 512, 512, 7), (1, 64, 4, 300)]
)
def test_few_tiles_or_channels_are_not(batch: int, channels: int, filters: int, edge: int) -> None:
    assert chosen(batch, channels, filters, edge) == NONE


def test_memory_for_transformed_inputs_is_bounded() -> None:
    geometry = Geometry(256, 64, 64, 224, 224, 224, 224, 1, 1)
    assert list(winograd_choices(geometry).values()) == [NONE]


def test_a_choice_that_is_no_candidate_is_refused() -> None:
    with pytest.raises(UsageError, match="none of its candidates"):
        forced(3)(lowered_convolution())


def test_filters_are_transformed_in_double_precision_and_rounded_once() -> None:
    filters = random(5, 3, 3, 3)
    packed = pack(filters, 4)
    assert packed.shape == (36, 5, 3)
    matrix = weight_matrix(4)
    exact = np.einsum("ia,ocab,jb->ijoc", matrix, filters.astype(float), matrix)
    assert np.array_equal(packed, exact.reshape(36, 5, 3).astype(np.float32))


@needs_device
def test_a_bundle_on_the_device(tmp_path: Path) -> None:
    model = convolution(4, 32, 32, (28, 28), epilogue="sum relu")
    lowered = lowered_model(model)[0]
    limits = parse_devices("").limits
    assert with_winograd(lowered.module, lowered.weights, limits)[0] is not lowered.module
    compile_to(tmp_path / "bundle", model, targets=["opencl"])
    feeds = feeds_of(model)
    assert_close(hybridc.load(tmp_path / "bundle").run(feeds), run_reference(model, feeds), 1e-5)


@needs_device
@pytest.mark.parametrize("at_once", [1, 3])
def test_algorithms_are_measured_on_the_device(at_once: int) -> None:
    lowered = lowered_convolution(epilogue="relu")
    device = Device("opencl:0", "opencl")
    kernels = tunable(lowered.module, lowered.weights, device, at_once=at_once)
    (kernel,) = [kernel for kernel in kernels if kernel.problem.kind == "winograd"]
    assert {dict(choice)["size"] for choice in kernel.candidates} == {0, 2, 4}
    for choice in kernel.candidates:
        run = kernel.build(choice)
        assert run is not None
        run(2 * at_once)
    strict = tunable(lowered.module, lowered.weights, device, strict_math=True)
    assert "winograd" not in {kernel.problem.kind for kernel in strict}


@pytest.mark.parametrize("size", [0, 2, 4])
def test_a_convolution_alone_is_the_one_of_the_model(size: int) -> None:
    lowered = lowered_convolution(pads=(0, 2, 1, 3), size=(9, 14))
    (geometry,) = geometries(lowered)
    alone = convolution_alone(geometry)
    names = weight_names(alone, {"filters": np.zeros(())})
    again = [geometry_of(b.value, names) for b in bindings_of(alone["main"])]
    assert geometry in again
    gpu = parse_gpu("sm_90")
    graphs = []

    def build(module: tvm.IRModule, _tuning: Tuning) -> bytes:
        graphs.append(module)
        return b""

    def fuse(module: tvm.IRModule, weights: Any, tuning: Tuning) -> Any:
        return make_kernels(module, weights, dataclasses.replace(gpu, tuning=tuning))

    bench = Bench(build, gpu.target, gpu.limits, HOST, at_once=5)
    Convolutions(fuse, bench).code(geometry, figures(size=size))
    calls = graphs[0]["main"].script().count("call_tir(")
    assert calls == 5 * (1 if size == NONE else 3)
