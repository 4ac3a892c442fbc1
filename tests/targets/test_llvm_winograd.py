"""Winograd's convolutions against direct ones in float64, and where they are chosen."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

tvm = pytest.importorskip("tvm")

from hybridc.targets import relax_pipeline  # noqa: E402
from hybridc.targets.llvm import scratch  # noqa: E402
from hybridc.targets.llvm.build import fuse, legalize, make_kernels  # noqa: E402
from hybridc.targets.llvm.cpu import Cpu, parse_cpu  # noqa: E402
from hybridc.targets.llvm.layout import block_layouts  # noqa: E402
from hybridc.targets.llvm.layout.convolutions import blocked_cycles  # noqa: E402
from hybridc.targets.llvm.layout.winograd import (  # noqa: E402
    pack_winograd,
    winograd_convolution,
    winograd_weight_shape,
)
from hybridc.targets.llvm.schedules import (  # noqa: E402
    apply_rule,
    schedule_function,
    schedule_module,
    winograd,
)
from hybridc.targets.llvm.schedules.blocked_tiles import Geometry, choose_vectors  # noqa: E402
from hybridc.targets.llvm.schedules.blocks import collect  # noqa: E402
from hybridc.targets.llvm.schedules.winograd import schedule_winograd  # noqa: E402
from hybridc.targets.llvm.schedules.winograd_tiles import (  # noqa: E402
    MARGIN,
    SCRATCH_BYTES,
    choose_chunking,
    chunking_of,
    fastest,
    input_bytes,
    tiles_of,
)
from hybridc.targets.llvm.schedules.winograd_transforms import (  # noqa: E402
    SIZES,
    input_matrix,
    output_matrix,
    transform_weight,
    weight_matrix,
)
from hybridc.targets.llvm.scratch import plan_scratch, thread_bytes  # noqa: E402
from hybridc.targets.llvm.sizes import with_ranges  # noqa: E402
from hybridc.targets.memory import planned_bytes  # noqa: E402
from tvm import relax, te, tirx  # noqa: E402

from tests.targets.properties import kernel_examples  # noqa: E402
from tests.targets.test_llvm_layouts import block, geometry, network, run, unblock  # noqa: E402
from tests.targets.test_llvm_schedules import convolve, draw  # noqa: E402

Array = np.ndarray[Any, Any]


@pytest.mark.parametrize("size", SIZES)
def test_transforms(size: int) -> None:
    inputs, taps = np.random.default_rng(size).standard_normal((2, 50, size + 2))
    matrices = input_matrix(size), weight_matrix(size), output_matrix(size)
    b, g, a = matrices
    outputs = a @ ((b @ inputs.T) * (g @ taps[:, :3].T))
    expected = [np.correlate(x, w[:3]) for x, w in zip(inputs, taps, strict=True)]
    np.testing.assert_allclose(outputs.T, expected, atol=1e-12)
    for matrix in (a, b):
        assert np.array_equal(matrix, matrix.astype("float32"))
    kernel = taps[0, :3, None] * taps[1, :3]
    np.testing.assert_allclose(transform_weight(kernel, size), g @ kernel @ g.T)


def wanted(
    shape: tuple[int, ...], filters: int, pads: tuple[int, int, int, int], lanes: int, **sizes: int
) -> Geometry:
    """The geometry of a convolution padded by ``pads``: top, left, bottom, right."""
    top, left, bottom, right = pads
    return dataclasses.replace(
        geometry(shape, filters, (3, 3), lanes, sizes["vectors"]),
        rows=shape[2] + top + bottom - 2,
        columns=shape[3] + left + right - 2,
        top=top,
        left=left,
        winograd=sizes["size"],
    )


def kernel_of(found: Geometry) -> tuple[Any, list[tuple[int, ...]]]:
    """A convolution with bias, sum with another tensor and relu, and its operands' shapes."""
    g = found
    result = (g.batch, g.blocks, g.rows, g.columns, g.lanes)
    data = (g.batch, -(-g.channels // g.lanes), g.height, g.width, g.lanes)
    shapes = [data, winograd_weight_shape(g), (1, g.blocks, 1, 1, g.lanes), result]
    sizes = [[tirx.IntImm("int64", dim) for dim in shape] for shape in shapes]
    tensors = [te.placeholder(size, "float32", f"p{i}") for i, size in enumerate(sizes)]
    product = winograd_convolution(g, tensors[0], tensors[1])

    def finish(n: Any, b: Any, y: Any, x: Any, lane: Any) -> Any:
        total = product(n, b, y, x, lane) + tensors[2](0, b, 0, 0, lane)
        return tirx.max(total + tensors[3](n, b, y, x, lane), tirx.const(0, "float32"))

    outputs = te.compute(product.shape, finish, name="finish")
    return te.create_prim_func([*tensors, outputs]), shapes


def check(function: Any, shapes: list[tuple[int, ...]], found: Geometry, cpu: Cpu) -> None:
    """A function of :func:`kernel_of` against float64; lanes without a channel hold NaN."""
    g = found
    plain = (g.batch, g.channels, g.height, g.width)
    result = (g.batch, g.filters, g.rows, g.columns)
    x, weight, bias, other = draw(
        [plain, (g.filters, g.channels, 3, 3), (1, g.filters, 1, 1), result]
    )
    packed = pack_winograd(weight, g)
    arrays = [block(x, g.lanes), packed, *(block(array, g.lanes) for array in (bias, other))]
    assert [array.shape for array in arrays] == shapes
    output = tvm.runtime.tensor(np.full(shapes[3], np.nan, "float32"))
    library = tvm.compile(tvm.IRModule({"main": function}), target=cpu.target)
    library["main"](*(tvm.runtime.tensor(array) for array in arrays), output)
    below, right = g.rows + 2 - g.top - g.height, g.columns + 2 - g.left - g.width
    padded = np.pad(x.astype("float64"), [(0, 0), (0, 0), (g.top, below), (g.left, right)])
    expected = convolve(padded, weight.astype("float64"), 1, 0, 1, 1) + bias + other
    got = unblock(output.numpy(), g.filters)
    scale = np.abs(expected).max()
    np.testing.assert_allclose(got / scale, np.maximum(expected, 0) / scale, rtol=0, atol=1e-5)


@kernel_examples(8)
@given(
    size=st.sampled_from(SIZES),
    plane=st.tuples(st.integers(1, 15), st.integers(1, 15)),
    pads=st.tuples(*[st.integers(0, 2)] * 4),
    batch=st.integers(1, 3),
    channels=st.integers(1, 40),
    filters=st.integers(1, 70),
    vectors=st.integers(1, 3),
    share=st.tuples(st.integers(1, 20), st.integers(1, 3), st.booleans()),
)
def test_any_kernel(
    cpu: Cpu,
    size: int,
    plane: tuple[int, int],
    pads: tuple[int, int, int, int],
    batch: int,
    channels: int,
    filters: int,
    vectors: int,
    share: tuple[int, int, bool],
) -> None:
    height, width = (
        max(extent, 3 - first - last)
        for extent, first, last in zip(plane, pads[:2], pads[2:], strict=True)
    )
    shape, lanes = (batch, channels, height, width), cpu.vector_bytes // 4
    vectors = min(vectors, -(-filters // lanes))
    found = wanted(shape, filters, pads, lanes, size=size, vectors=vectors)
    tiles, panels, is_shared = share
    tiles, panels = min(tiles, tiles_of(found)[0]), min(panels, found.panels)
    function, shapes = kernel_of(found)
    with pytest.MonkeyPatch.context() as patch:
        chunking = chunking_of(found, cpu, (tiles, panels), is_shared)
        patch.setattr(winograd, "choose_chunking", lambda *_: chunking)
        scheduled = apply_rule(schedule_winograd, function, cpu)
    assert scheduled is not None
    check(scheduled, shapes, found, cpu)


@pytest.mark.parametrize("size", SIZES)
def test_chosen_chunks(cpu: Cpu, size: int) -> None:
    lanes = cpu.vector_bytes // 4
    found = wanted((1, 96, 31, 30), 96, (1, 1, 1, 1), lanes, size=size, vectors=2)
    chunking = choose_chunking(found, cpu)
    assert chunking.chunks * chunking.groups > 1
    function, shapes = kernel_of(found)
    check(schedule_function(function, cpu), shapes, found, cpu)


def test_unscheduled() -> None:
    """What a kernel means does not depend on the rule that schedules it."""
    cpu = parse_cpu("")
    found = wanted((1, 5, 6, 7), 9, (1, 0, 2, 1), cpu.vector_bytes // 4, size=4, vectors=1)
    check(*kernel_of(found), found, cpu)


@pytest.mark.parametrize("target", ["x86-64-v2", "x86-64-v3", "x86-64-v4", "aarch64"])
def test_code_for_each_instruction_set(target: str) -> None:
    cpu = parse_cpu(target)
    found = wanted((1, 32, 14, 14), 32, (1, 1, 1, 1), cpu.vector_bytes // 4, size=4, vectors=1)
    function, _ = kernel_of(found)
    scheduled = apply_rule(schedule_winograd, function, cpu)
    assert scheduled is not None
    library = tvm.compile(tvm.IRModule({"main": scheduled}), target=cpu.target)
    register = {64: "%zmm", 32: "%ymm", 16: "fmla" if target == "aarch64" else "%xmm"}
    assert register[cpu.vector_bytes] in library.mod.inspect_source("s")


LARGE = [((1, 64, 56, 56), 64), ((1, 128, 28, 28), 128), ((1, 64, 224, 224), 64)]


def direct(shape: tuple[int, ...], filters: int, taps: int, cpu: Cpu, **options: Any) -> Geometry:
    whole = geometry(shape, filters, (taps, taps), cpu.vector_bytes // 4, pad=taps // 2, **options)
    return choose_vectors(whole, cpu)


@pytest.mark.parametrize("target", ["x86-64-v3", "x86-64-v4", "aarch64"])
@pytest.mark.parametrize(("shape", "filters"), LARGE)
def test_large_layers_are_transformed(target: str, shape: tuple[int, ...], filters: int) -> None:
    cpu = parse_cpu(target)
    before = direct(shape, filters, 3, cpu)
    after = fastest(before, cpu)
    assert after.winograd in SIZES
    assert blocked_cycles(after, cpu) * MARGIN < blocked_cycles(before, cpu)
    chunking = choose_chunking(after, cpu)
    assert chunking.chunks * chunking.groups >= 8


@pytest.mark.parametrize("channels", [64, 512, 3000])
@pytest.mark.parametrize("size", SIZES)
def test_scratch_is_limited(cpu: Cpu, channels: int, size: int) -> None:
    lanes, shape = cpu.vector_bytes // 4, (4, channels, 64, 64)
    found = wanted(shape, 64, (1, 1, 1, 1), lanes, size=size, vectors=1)
    chunking = choose_chunking(found, cpu)
    kept = chunking.chunks if chunking.is_shared else 1
    assert kept * input_bytes(found, cpu, chunking.tiles) <= SCRATCH_BYTES


def test_other_layers_stay_direct(cpu: Cpu) -> None:
    shape = (1, 64, 56, 56)
    others = [
        direct(shape, 64, 1, cpu),
        direct(shape, 64, 5, cpu),
        direct(shape, 64, 3, cpu, stride=2),
        direct(shape, 64, 3, cpu, dilation=2),
        direct(shape, 64, 3, cpu, groups=2),
        direct(shape, 64, 3, cpu, groups=64),
        direct(shape, 64, 3, cpu, plain=True),
        # So few pixels that reading the weights takes most of the time.
        direct((1, 512, 2, 2), 512, 3, cpu),
    ]
    assert [fastest(found, cpu) for found in others] == others


def convolutions(builder: relax.BlockBuilder, x: Any, weight: Any) -> Any:
    """Two convolutions with relu."""
    for array in draw([(64, 64, 3, 3), (48, 64, 3, 3)]):
        result = relax.op.nn.conv2d(x, weight(array / 24), padding=1)
        x = builder.emit(relax.op.nn.relu(builder.emit(result)))
    return x


def test_strict_math_keeps_direct_convolution(cpu: Cpu) -> None:
    shape = (1, 64, 28, 28)
    (x,) = draw([shape])
    module, weights = network(shape, convolutions)
    results = []
    for strict in (True, False):
        chosen = dataclasses.replace(cpu, strict_math=strict)
        with cpu.target:
            _, packed = block_layouts(legalize(module, cpu), weights, chosen)
        assert ["winograd" in name for name in packed] == [not strict] * 2
        results.append(run(module, weights, x, chosen, True))
    np.testing.assert_allclose(*results, rtol=0, atol=1e-5 * np.abs(results[0]).max())


def test_what_tasks_share_is_planned(cpu: Cpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """It becomes an output of its kernel; results are the same to the bit."""

    def shared(found: Geometry, *_: Any) -> Any:
        return chunking_of(found, cpu, (10, 2), True)

    for place in (winograd, scratch):
        monkeypatch.setattr(place, "choose_chunking", shared)
    shape = (1, 64, 28, 28)
    (x,) = draw([shape])
    module, weights = network(shape, convolutions)
    with cpu.target:
        blocked, packed = block_layouts(legalize(module, cpu), weights, cpu)
        fused = fuse(blocked, cpu)
    results, owned, planned = [], [], []
    for kernels in (fused, plan_scratch(fused, cpu)):
        scheduled = schedule_module(kernels, cpu)
        functions = [f for f in scheduled.functions.values() if isinstance(f, tirx.PrimFunc)]
        buffers = [found.buffer for f in functions for found in collect(f.body, tirx.AllocBuffer)]
        owned.append(sum(buffer.name == "inputs" for buffer in buffers))
        with cpu.target:
            planned.append(planned_bytes(relax_pipeline.finalize(kernels)))
        machine = relax.VirtualMachine(relax.build(scheduled, cpu.target), tvm.cpu())
        arguments = tuple(tvm.runtime.tensor(array) for array in packed.values())
        results.append(machine["main"](tvm.runtime.tensor(x), arguments)[0].numpy())
    assert owned == [2, 0]
    assert planned[0] < planned[1]
    assert np.array_equal(*results)


@pytest.mark.parametrize("is_shared", [False, True])
def test_what_a_thread_takes_is_counted(
    cpu: Cpu, monkeypatch: pytest.MonkeyPatch, is_shared: bool
) -> None:
    """It is what the kernel that needs most allocates in its tasks."""

    def chunked(found: Geometry, *_: Any) -> Any:
        return chunking_of(found, cpu, (10, 2), is_shared)

    for place in (winograd, scratch):
        monkeypatch.setattr(place, "choose_chunking", chunked)
    module, weights = network((1, 64, 28, 28), convolutions)
    with cpu.target:
        kernels, _ = make_kernels(module, weights, cpu)
        counted = thread_bytes(kernels, cpu)
        scheduled = schedule_module(plan_scratch(kernels, cpu), cpu)
    functions = [f for f in scheduled.functions.values() if isinstance(f, tirx.PrimFunc)]
    own = [
        sum(
            int(np.prod([int(dim) for dim in found.buffer.shape])) * 4
            for found in collect(function.body, tirx.AllocBuffer)
            if found.buffer.name in ("inputs", "products")
        )
        for function in functions
    ]
    assert counted == max(own) > 0


@pytest.mark.parametrize("is_shared", [False, True])
def test_any_number_of_images(cpu: Cpu, monkeypatch: pytest.MonkeyPatch, is_shared: bool) -> None:
    """One image after the other, with memory for one; results are those of a known number."""

    def chunked(found: Geometry, *_: Any) -> Any:
        return chunking_of(found, cpu, (10, 2), is_shared)

    for place in (winograd, scratch):
        monkeypatch.setattr(place, "choose_chunking", chunked)
    batch = tirx.Var("n", "int64")
    module, weights = network((batch, 64, 18, 18), convolutions)
    module.update_func(module.get_global_var("main"), with_ranges(module["main"], {"n": (1, 8)}))
    with cpu.target:
        kernels, packed = make_kernels(module, weights, cpu)
        scheduled = schedule_module(plan_scratch(kernels, cpu), cpu)
        machine = relax.VirtualMachine(relax.build(scheduled, cpu.target), tvm.cpu())
    assert sum("winograd" in name for name in packed) == 2
    arguments = tuple(tvm.runtime.tensor(array) for array in packed.values())
    for images in (1, 2, 5):
        (x,) = draw([(images, 64, 18, 18)])
        known, own = network(x.shape, convolutions)
        expected = run(known, own, x, cpu, False)
        result = machine["main"](tvm.runtime.tensor(x), arguments)[0].numpy()
        np.testing.assert_allclose(result, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


def test_activations_are_part_of_the_kernel(cpu: Cpu) -> None:
    """There is a kernel for each convolution, and one at each end for the layout."""
    module, weights = network((1, 64, 28, 28), convolutions)
    with cpu.target:
        blocked, _ = block_layouts(legalize(module, cpu), weights, cpu)
        functions = fuse(blocked, cpu).functions.values()
        kernels = [function for function in functions if isinstance(function, tirx.PrimFunc)]
    assert len(kernels) == 4


def test_strict_math_keeps_infinities_where_they_belong(cpu: Cpu) -> None:
    shape = (1, 64, 28, 28)
    (x,) = draw([shape])
    x[0, 0, 10, 13] = np.inf
    module, weights = network(shape, _single)
    result = run(module, weights, x, dataclasses.replace(cpu, strict_math=True), True)
    rows, columns = np.nonzero(~np.isfinite(result).all((0, 1)))
    assert {*rows} == {9, 10, 11}
    assert {*columns} == {12, 13, 14}


def _single(builder: relax.BlockBuilder, x: Any, weight: Any) -> Any:
    (array,) = draw([(64, 64, 3, 3)])
    return builder.emit(relax.op.nn.conv2d(x, weight(array), padding=1))
