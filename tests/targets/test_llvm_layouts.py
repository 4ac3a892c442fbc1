"""Blocked layouts: kernels against numpy, and the pass on small networks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

tvm = pytest.importorskip("tvm")

from hybridc.targets.fitting import Misfit  # noqa: E402
from hybridc.targets.llvm.build import build, fuse, legalize  # noqa: E402
from hybridc.targets.llvm.cpu import Cpu  # noqa: E402
from hybridc.targets.llvm.layout import block_layouts  # noqa: E402
from hybridc.targets.llvm.layout.channelwise import block_kernel  # noqa: E402
from hybridc.targets.llvm.layout.cut import SINK, SOURCE, Network  # noqa: E402
from hybridc.targets.llvm.layout.kernels import (  # noqa: E402
    blocked_convolution,
    pack_weight,
    weight_shape,
)
from hybridc.targets.llvm.schedules import apply_rule, schedule_module  # noqa: E402
from hybridc.targets.llvm.schedules.blocked_convolution import (  # noqa: E402
    schedule_blocked_convolution,
)
from hybridc.targets.llvm.schedules.blocked_tiles import (  # noqa: E402
    Geometry,
    choose_tiling,
    runs,
)
from tvm import relax, te, tirx  # noqa: E402

from tests.targets.properties import kernel_examples  # noqa: E402
from tests.targets.test_llvm_schedules import convolve, draw  # noqa: E402

op = relax.op
Array = np.ndarray[Any, Any]


def block(x: Array, lanes: int) -> Array:
    """A plain array blocked; missing lanes are NaN, which nobody may read."""
    batch, channels, height, width = x.shape
    padded = np.full((batch, -(-channels // lanes) * lanes, height, width), np.nan, "float32")
    padded[:, :channels] = x
    split = padded.reshape(batch, -1, lanes, height, width)
    return np.ascontiguousarray(split.transpose(0, 1, 3, 4, 2))


def unblock(x: Array, channels: int) -> Array:
    plain = x.transpose(0, 1, 4, 2, 3)
    return plain.reshape(x.shape[0], -1, *x.shape[2:4])[:, :channels]


def geometry(
    shape: Sequence[int],
    filters: int,
    kernel: tuple[int, int],
    lanes: int,
    vectors: int = 1,
    plain: bool = False,
    stride: int = 1,
    pad: int = 0,
    dilation: int = 1,
    groups: int = 1,
) -> Geometry:
    depthwise = groups > 1 and shape[1] == groups == filters
    height, width = (
        (size + 2 * pad - (taps - 1) * dilation - 1) // stride + 1
        for size, taps in zip(shape[2:], kernel, strict=True)
    )
    return Geometry(
        batch=shape[0],
        groups=groups,
        channels=shape[1] // groups,
        blocks=-(-filters // lanes),
        lanes=lanes,
        vectors=vectors,
        source_lanes=1 if plain else lanes,
        depthwise=int(depthwise),
        height=shape[2],
        width=shape[3],
        rows=height,
        columns=width,
        kernel_rows=kernel[0],
        kernel_columns=kernel[1],
        row_step=stride,
        column_step=stride,
        row_reach=dilation,
        column_reach=dilation,
        top=pad,
        left=pad,
        filters=filters,
    )


def shuffled(x: Array, parts: int) -> Array:
    """The first channel of each part, the second, and so on."""
    split = x.reshape(x.shape[0], parts, -1, *x.shape[2:])
    return split.swapaxes(1, 2).reshape(x.shape)


def check_kernel(found: Geometry, shape: Sequence[int], filters: int, cpu: Cpu) -> None:
    """A blocked convolution with bias and relu against numpy."""
    per_group = 1 if found.depthwise else found.channels
    kernel = (found.kernel_rows, found.kernel_columns)
    x, weight, bias = draw([shape, (filters, per_group, *kernel), (1, filters, 1, 1)])
    read = shuffled(x, found.shuffled)
    data = x if found.source_lanes == 1 else block(x, found.lanes)
    arrays = [data, pack_weight(weight, found), np.nan_to_num(block(bias, found.lanes))]
    assert arrays[1].shape == weight_shape(found)
    sizes = [[tirx.IntImm("int64", dim) for dim in array.shape] for array in arrays]
    tensors = [te.placeholder(size, "float32", f"p{i}") for i, size in enumerate(sizes)]
    product = blocked_convolution(found, tensors[0], tensors[1])

    def finish(n: Any, b: Any, y: Any, x: Any, lane: Any) -> Any:
        total = product(n, b, y, x, lane) + tensors[2](0, b, 0, 0, lane)
        return tirx.max(total, tirx.const(0, "float32"))

    result = te.compute(product.shape, finish, name="finish")
    function = apply_rule(
        schedule_blocked_convolution, te.create_prim_func([*tensors, result]), cpu
    )
    assert function is not None
    library = tvm.compile(tvm.IRModule({"main": function}), target=cpu.target)
    output = tvm.runtime.tensor(np.zeros([int(dim) for dim in result.shape], "float32"))
    library["main"](*(tvm.runtime.tensor(array) for array in arrays), output)
    options = (found.row_step, found.top, found.row_reach, found.groups)
    expected = np.maximum(
        convolve(*(a.astype("float64") for a in (read, weight)), *options) + bias, 0
    )
    scale = max(1.0, float(np.abs(expected).max()))
    got = unblock(output.numpy(), filters)
    np.testing.assert_allclose(got / scale, expected / scale, rtol=0, atol=1e-5)


CONVOLUTIONS = [
    ((1, 32, 14, 14), 64, (3, 3), {"pad": 1}),
    ((1, 64, 7, 7), 64, (3, 3), {"pad": 1}),
    ((2, 48, 9, 9), 32, (1, 1), {}),
    ((1, 24, 13, 11), 40, (1, 1), {}),
    ((1, 24, 12, 31), 24, (5, 5), {"pad": 2, "stride": 2}),
    ((1, 3, 35, 37), 32, (7, 7), {"stride": 2, "pad": 3, "plain": True}),
    ((1, 16, 28, 28), 16, (1, 1), {"stride": 2}),
    ((1, 20, 19, 19), 20, (3, 3), {"pad": 1, "groups": 20}),
    ((1, 32, 21, 21), 32, (3, 3), {"pad": 1, "groups": 32, "stride": 2}),
    ((1, 64, 9, 9), 64, (3, 3), {"groups": 2, "pad": 1}),
    ((1, 16, 16, 16), 16, (3, 3), {"dilation": 3, "pad": 3}),
]


@pytest.mark.parametrize("vectors", [1, 2])
@pytest.mark.parametrize(("shape", "filters", "kernel", "options"), CONVOLUTIONS)
def test_kernel(
    cpu: Cpu,
    shape: tuple[int, ...],
    filters: int,
    kernel: tuple[int, int],
    options: dict[str, int],
    vectors: int,
) -> None:
    found = geometry(shape, filters, kernel, cpu.vector_bytes // 4, vectors=vectors, **options)
    if found.depthwise or (found.groups > 1 and not found.mixes_groups):
        found = dataclasses.replace(found, vectors=1)
    check_kernel(found, shape, filters, cpu)


@kernel_examples(25)
@given(
    size=st.tuples(st.integers(1, 20), st.integers(1, 20)),
    batch=st.integers(1, 2),
    channels=st.integers(1, 40),
    filters=st.integers(1, 40),
    kernel=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    stride=st.integers(1, 3),
    pad=st.integers(0, 3),
    dilation=st.integers(1, 3),
    plain=st.booleans(),
    depthwise=st.booleans(),
)
def test_any_kernel(
    cpu: Cpu,
    size: tuple[int, int],
    batch: int,
    channels: int,
    filters: int,
    kernel: tuple[int, int],
    stride: int,
    pad: int,
    dilation: int,
    plain: bool,
    depthwise: bool,
) -> None:
    reach = [(extent - 1) * dilation + 1 for extent in kernel]
    height, width = (max(s, r - 2 * pad, 1) for s, r in zip(size, reach, strict=True))
    depthwise = depthwise and channels > 1
    groups, filters = (channels, channels) if depthwise else (1, filters)
    shape = (batch, channels, height, width)
    lanes = cpu.vector_bytes // 4
    found = geometry(
        shape, filters, kernel, lanes, 1, plain and not depthwise, stride, pad, dilation, groups
    )
    check_kernel(found, shape, filters, cpu)


@given(
    columns=st.integers(1, 70), taps=st.integers(1, 5), step=st.integers(1, 3),
    before=st.integers(0, 3), largest=st.integers(1, 30),
)  # fmt: skip
def test_runs_cover_an_axis_once(
    columns: int, taps: int, step: int, before: int, largest: int
) -> None:
    found = geometry((1, 1, 1, columns), 1, (1, taps), 16, stride=step)
    axis = dataclasses.replace(found.horizontal, before=before, outputs=columns)
    covered = [
        run.start + tile * run.size + i
        for run in runs(axis, largest)
        for tile in range(run.count)
        for i in range(run.size)
    ]
    assert covered == list(range(columns))
    for run in runs(axis, largest):
        assert run.size <= largest
        for tile in range(run.count):
            start = run.start + tile * run.size
            for tap, reads in enumerate(run.pattern):
                assert reads == tuple(axis.reads(start + i, tap) for i in range(run.size))


def test_tiles_fit_registers(cpu: Cpu) -> None:
    for vectors in (1, 2, 4, 8):
        for size in (1, 7, 13, 56):
            lanes = cpu.vector_bytes // 4
            shape = (1, 64, size, size)
            found = geometry(shape, lanes * vectors, (3, 3), lanes, vectors, pad=1)
            tiling = choose_tiling(found, cpu, True)
            accumulators = tiling.tile_rows * tiling.tile_columns * vectors
            assert accumulators + vectors + 1 <= max(cpu.vector_registers, 2 * vectors + 1)


Net = Callable[[relax.BlockBuilder, Any, Callable[[Array], Any]], Any]


def network(shape: Sequence[int], net: Net) -> tuple[Any, dict[str, Array]]:
    """A module as lowering gives it; ``net(builder, input, weight)`` makes the result."""
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType(shape, "float32"))
    weights: dict[str, Array] = {}
    variables: list[Any] = []

    def weight(array: Array) -> Any:
        variables.append(relax.Var(f"w{len(weights)}", relax.TensorType(array.shape, "float32")))
        weights[f"w{len(weights)}"] = array.astype("float32")
        return variables[-1]

    attributes = {"num_input": 1, "global_symbol": "main"}
    with builder.function("main", attrs=attributes):
        output = net(builder, x, weight)
        builder.emit_func_output(relax.Tuple([output]), [x, *variables])
    module = relax.transform.ConvertToDataflow(1)(builder.finalize())
    return relax.transform.BundleModelParams()(module), weights


def run(module: Any, weights: dict[str, Array], x: Array, cpu: Cpu, blocked: bool) -> Array:
    with cpu.target:
        module = legalize(module, cpu)
        if blocked:
            module, weights = block_layouts(module, weights, cpu)
        module = schedule_module(fuse(module, cpu), cpu)
    machine = relax.VirtualMachine(relax.build(module, cpu.target), tvm.cpu())
    arguments = tuple(tvm.runtime.tensor(array) for array in weights.values())
    return machine["main"](tvm.runtime.tensor(x), arguments)[0].numpy()


def randoms(*shapes: tuple[int, ...]) -> list[Array]:
    return [array / np.sqrt(np.prod(array.shape[1:])) for array in draw(shapes, 3)]


def residual_net(channels: int) -> Net:
    """First layer, residual block, depthwise layer, pools, concatenation, global pooling."""

    def net(builder: relax.BlockBuilder, x: Any, weight: Callable[[Array], Any]) -> Any:
        c = channels
        first, inner, deep, last = randoms(
            (c, 3, 3, 3), (c, c, 3, 3), (c, 1, 3, 3), (c, 2 * c, 1, 1)
        )
        (bias,) = randoms((1, c, 1, 1))

        def conv(data: Any, array: Array, **options: Any) -> Any:
            result = builder.emit(op.nn.conv2d(data, weight(array), **options))
            return builder.emit(op.nn.relu(builder.emit(op.add(result, weight(bias)))))

        y = conv(x, first, strides=2, padding=1)
        z = builder.emit(op.add(y, conv(y, inner, padding=1)))
        z = builder.emit(op.multiply(z, builder.emit(op.sigmoid(z))))
        d = conv(z, deep, padding=1, groups=c)
        p = builder.emit(op.nn.max_pool2d(d, (3, 3), padding=1))
        joined = builder.emit(op.concat([p, z], 1))
        pooled = builder.emit(op.nn.avg_pool2d(conv(joined, last), (2, 2), (2, 2)))
        return builder.emit(op.mean(pooled, [2, 3], keepdims=True))

    return net


@pytest.mark.parametrize("channels", [16, 32, 24, 20, 5])
def test_network(cpu: Cpu, channels: int) -> None:
    module, weights = network((2, 3, 37, 41), residual_net(channels))
    (x,) = draw([(2, 3, 37, 41)])
    plain, blocked = (run(module, weights, x, cpu, choice) for choice in (False, True))
    np.testing.assert_allclose(blocked, plain, rtol=1e-4, atol=1e-5)


def calls(module: Any, name: str) -> int:
    """Number of calls of kernels whose name begins so."""
    found: list[str] = []

    def visit(node: Any) -> None:
        if isinstance(node, tvm.ir.Call) and getattr(node.op, "name", "") == "relax.call_tir":
            found.append(node.args[0].name_hint)

    relax.analysis.post_order_visit(module["main"], visit)
    return sum(kernel.startswith(name) for kernel in found)


def test_layouts_change_at_the_borders_only(cpu: Cpu) -> None:
    module, weights = network((1, 3, 64, 64), residual_net(64))
    with cpu.target:
        module, packed = block_layouts(legalize(module, cpu), weights, cpu)
    assert calls(module, "convolution_blocked") == 4
    assert calls(module, "block_blocked") == 0
    assert calls(module, "unblock_blocked") == 1
    assert not set(weights) & set(packed)


def test_a_convolution_of_unknown_weights_stays_plain(cpu: Cpu) -> None:
    def net(builder: relax.BlockBuilder, x: Any, weight: Callable[[Array], Any]) -> Any:
        kernel = builder.emit(op.multiply(weight(np.ones((64, 64, 3, 3))), op.mean(x)))
        return builder.emit(op.nn.conv2d(x, kernel))

    module, weights = network((1, 64, 20, 20), net)
    with cpu.target:
        legal = legalize(module, cpu)
        same, packed = block_layouts(legal, weights, cpu)
    assert calls(same, "convolution_blocked") == 0
    assert list(packed) == list(weights)


def test_artifact_takes_packed_weights(cpu: Cpu) -> None:
    module, weights = network((1, 3, 32, 32), residual_net(32))
    artifact = build(module, weights, cpu)
    assert artifact.library[:4] == b"\x7fELF"
    assert any(".packed_" in name for name in artifact.weights)


def kernel_of(build_kernel: Callable[..., Any], *shapes: Sequence[int]) -> Any:
    sizes = [[tirx.IntImm("int64", dim) for dim in shape] for shape in shapes]
    tensors = [te.placeholder(size, "float32", f"p{i}") for i, size in enumerate(sizes)]
    return te.create_prim_func([*tensors, build_kernel(*tensors)])


def test_channels_moved_by_a_part_of_a_block_are_refused() -> None:
    def shifted(x: te.Tensor) -> te.Tensor:
        return te.compute((1, 16, 4, 4), lambda n, c, y, w: x(n, c + 4, y, w), name="shifted")

    with pytest.raises(Misfit):
        block_kernel(kernel_of(shifted, (1, 32, 4, 4)), 16)
    assert block_kernel(kernel_of(shifted, (1, 32, 4, 4)), 4).axes == (1, 1)


@pytest.mark.parametrize("depth", [16, 24, 12])
def test_channels_laid_out_as_pixels(depth: int) -> None:
    """DepthToSpace moves whole blocks of channels where they divide its depth."""

    def spread(x: te.Tensor) -> te.Tensor:
        def read(n: Any, c: Any, y: Any, w: Any) -> Any:
            cell = tirx.floormod(y, 2) * 2 + tirx.floormod(w, 2)
            return x(n, cell * depth + c, tirx.floordiv(y, 2), tirx.floordiv(w, 2))

        return te.compute((2, depth, 6, 10), read, name="spread")

    function = kernel_of(spread, (2, 4 * depth, 3, 5))
    if depth % 8:
        with pytest.raises(Misfit):
            block_kernel(function, 8)
        return
    blocked = block_kernel(function, 8)
    assert blocked.axes == (1, 1)
    (x,) = draw([(2, 4 * depth, 3, 5)])
    kernel = tvm.compile(blocked.function, "llvm")
    result = tvm.runtime.tensor(np.empty((2, depth // 8, 6, 10, 8), "float32"))
    kernel(tvm.runtime.tensor(block(x, 8)), result)
    cells = x.reshape(2, 2, 2, depth, 3, 5)
    expected = cells.transpose(0, 3, 4, 1, 5, 2).reshape(2, depth, 6, 10)
    np.testing.assert_array_equal(unblock(result.numpy(), depth), expected)


def test_a_value_made_from_the_channel_number_is_refused() -> None:
    def numbered(x: te.Tensor) -> te.Tensor:
        return te.compute(x.shape, lambda n, c, y, w: x(n, c, y, w) + c.astype("float32"))

    with pytest.raises(Misfit):
        block_kernel(kernel_of(numbered, (1, 32, 4, 4)), 16)


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4), st.integers(0, 9)), max_size=14))
def test_cut_is_minimal(edges: list[tuple[int, int, int]]) -> None:
    """Against all choices of sides, on random networks of five nodes."""
    names: list[Any] = [SOURCE, 1, 2, 3, SINK]
    network = Network()
    for tail, head, capacity in edges:
        network.add(names[tail], names[head], capacity)
    assume(SOURCE in network.capacities)

    def price(side: set[Any]) -> int:
        return sum(c for t, h, c in edges if names[t] in side and names[h] not in side)

    choices = [
        {SOURCE, *(n for bit, n in enumerate((1, 2, 3)) if mask >> bit & 1)} for mask in range(8)
    ]
    assert price(network.source_side()) == min(map(price, choices))
