"""Blocked convolutions whose panels straddle groups or are cut, and those over one axis."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

tvm = pytest.importorskip("tvm")

from hybridc.targets.llvm.build import legalize  # noqa: E402
from hybridc.targets.llvm.cpu import Cpu  # noqa: E402
from hybridc.targets.llvm.layout import block_layouts  # noqa: E402
from hybridc.targets.llvm.schedules.emitter import loop_order  # noqa: E402
from tvm import relax  # noqa: E402

from tests.targets.properties import kernel_examples  # noqa: E402
from tests.targets.test_llvm_layouts import (  # noqa: E402
    Net,
    calls,
    check_kernel,
    geometry,
    network,
    randoms,
    run,
)
from tests.targets.test_llvm_schedules import draw  # noqa: E402

op = relax.op
Array = np.ndarray[Any, Any]


@kernel_examples(12)
@given(
    size=st.tuples(st.integers(3, 12), st.integers(3, 18)),
    groups=st.integers(1, 5),
    channels=st.integers(1, 20),
    filters=st.integers(1, 20),
    kernel=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    stride=st.integers(1, 2),
    pad=st.integers(0, 2),
    vectors=st.integers(1, 5),
    plain=st.booleans(),
)
def test_any_groups(
    cpu: Cpu,
    size: tuple[int, int],
    groups: int,
    channels: int,
    filters: int,
    kernel: tuple[int, int],
    stride: int,
    pad: int,
    vectors: int,
    plain: bool,
) -> None:
    shape, lanes = (1, channels * groups, *size), cpu.vector_bytes // 4
    filters *= groups
    vectors = min(vectors, -(-filters // lanes))
    found = geometry(shape, filters, kernel, lanes, vectors, plain, stride, pad, 1, groups)
    if found.depthwise or (groups > 1 and not found.mixes_groups):
        found = geometry(shape, filters, kernel, lanes, 1, False, stride, pad, 1, groups)
    check_kernel(found, shape, filters, cpu)


@pytest.mark.parametrize(("channels", "groups"), [(136, 4), (24, 3), (272, 4)])
def test_panels_cover_every_group_once(cpu: Cpu, channels: int, groups: int) -> None:
    found = geometry((1, channels, 7, 7), channels, (1, 1), cpu.vector_bytes // 4, 2, groups=groups)
    width = found.lanes * found.vectors
    for filter_ in range(channels):
        low, high = found.span(filter_ // width)
        first = filter_ // found.group_filters * found.channels
        assert low <= first
        assert first + found.channels <= high <= channels


def sequence_net(builder: relax.BlockBuilder, x: Any, weight: Callable[[Array], Any]) -> Any:
    """Convolutions over one axis: strided, grouped, depthwise and pointwise, with a residual."""
    first, inner, deep, last = randoms((40, 6, 7), (40, 20, 3), (40, 1, 5), (24, 40, 1))
    (bias,) = randoms((1, 40, 1))

    def conv(data: Any, array: Array, **options: Any) -> Any:
        return builder.emit(op.nn.conv1d(data, weight(array), **options))

    y = builder.emit(op.nn.relu(builder.emit(op.add(conv(x, first, strides=2), weight(bias)))))
    z = builder.emit(op.add(y, conv(y, inner, padding=1, groups=2)))
    d = conv(z, deep, padding=4, groups=40, dilation=2)
    return conv(builder.emit(op.nn.relu(d)), last)


def test_convolutions_over_one_axis_are_blocked(cpu: Cpu) -> None:
    module, weights = network((2, 6, 83), sequence_net)
    with cpu.target:
        blocked, _ = block_layouts(legalize(module, cpu), weights, cpu)
    assert calls(blocked, "convolution_blocked") == 4
    (x,) = draw([(2, 6, 83)])
    results = [run(module, weights, x, cpu, choice) for choice in (False, True)]
    assert results[0].shape == (2, 24, 39)
    np.testing.assert_allclose(results[1], results[0], rtol=1e-4, atol=1e-5)


@kernel_examples(8)
@given(
    parts=st.integers(2, 5),
    each=st.integers(1, 5),
    groups=st.integers(2, 4),
    filters=st.integers(1, 20),
    kernel=st.integers(1, 3),
    vectors=st.integers(1, 3),
    plain=st.booleans(),
)
def test_any_shuffle_is_taken_in(
    cpu: Cpu,
    parts: int,
    each: int,
    groups: int,
    filters: int,
    kernel: int,
    vectors: int,
    plain: bool,
) -> None:
    shape, lanes = (2, parts * each * groups, 5, 7), cpu.vector_bytes // 4
    filters *= groups
    vectors = min(vectors, -(-filters // lanes))
    found = geometry(shape, filters, (kernel, kernel), lanes, vectors, plain, groups=groups)
    if not found.depthwise:
        check_kernel(replace(found, shuffled=parts), shape, filters, cpu)


SHUFFLED = (2, 96, 9, 10)


def shuffled_net(behind: bool, order: Sequence[int] = (0, 2, 1, 3, 4)) -> Net:
    """A unit of ShuffleNet, shuffled in front of its depthwise convolution or behind it."""

    def net(builder: relax.BlockBuilder, x: Any, weight: Callable[[Array], Any]) -> Any:
        first, deep, last = randoms((96, 32, 1, 1), (96, 1, 3, 3), (96, 32, 1, 1))

        def shuffle(y: Any) -> Any:
            y = builder.emit(op.reshape(y, (2, 3, 32, 9, 10)))
            return builder.emit(op.reshape(builder.emit(op.permute_dims(y, order)), SHUFFLED))

        y = builder.emit(op.nn.relu(builder.emit(op.nn.conv2d(x, weight(first), groups=3))))
        y = y if behind else shuffle(y)
        y = builder.emit(op.nn.conv2d(y, weight(deep), padding=1, groups=96))
        y = shuffle(y) if behind else y
        return builder.emit(op.add(builder.emit(op.nn.conv2d(y, weight(last), groups=3)), x))

    return net


@pytest.mark.parametrize("behind", [False, True])
def test_channels_are_shuffled_between_groups(cpu: Cpu, behind: bool) -> None:
    module, weights = network(SHUFFLED, shuffled_net(behind))
    (x,) = draw([SHUFFLED])
    results = [run(module, weights, x, cpu, choice) for choice in (False, True)]
    np.testing.assert_allclose(results[1], results[0], rtol=1e-4, atol=1e-5)


def test_no_kernel_is_left_of_a_shuffle_that_is_taken_in(cpu: Cpu) -> None:
    counts = []
    for net in (shuffled_net(True), shuffled_net(False), shuffled_net(True, (0, 2, 1, 4, 3))):
        module, weights = network(SHUFFLED, net)
        with cpu.target:
            blocked, _ = block_layouts(legalize(module, cpu), weights, cpu)
        counts.append(calls(blocked, "reshape") + calls(blocked, "transpose"))
    assert counts == [0, 3, 3]


def test_a_shuffle_that_another_reads_stays(cpu: Cpu) -> None:
    def net(builder: relax.BlockBuilder, x: Any, weight: Callable[[Array], Any]) -> Any:
        (last,) = randoms((96, 32, 1, 1))
        y = builder.emit(op.permute_dims(op.reshape(x, (2, 3, 32, 9, 10)), (0, 2, 1, 3, 4)))
        y = builder.emit(op.reshape(y, SHUFFLED))
        return builder.emit(op.add(builder.emit(op.nn.conv2d(y, weight(last), groups=3)), y))

    module, weights = network(SHUFFLED, net)
    (x,) = draw([SHUFFLED])
    results = [run(module, weights, x, cpu, choice) for choice in (False, True)]
    np.testing.assert_allclose(results[1], results[0], rtol=1e-4, atol=1e-5)


def test_a_panel_of_missing_blocks_is_cut(cpu: Cpu) -> None:
    lanes = cpu.vector_bytes // 4
    shape = (1, 9, 10, 11)
    for vectors in (2, 3, 4):
        found = geometry(shape, 5 * lanes, (3, 3), lanes, vectors, pad=1)
        assert found.blocks % vectors
        check_kernel(found, shape, 5 * lanes, cpu)


def test_images_share_a_panel_that_is_large(cpu: Cpu) -> None:
    lanes = cpu.vector_bytes // 4
    large, small = (
        geometry((3, channels, 5, 4), 128, (3, 3), lanes, 2, pad=1) for channels in (128, 8)
    )
    assert loop_order(large, 4) == ["panel", "image", "row"]
    assert loop_order(small, 4) == ["image", "panel", "row"]
    check_kernel(large, (3, 128, 5, 4), 128, cpu)


def test_a_kernel_without_operands_stays(cpu: Cpu) -> None:
    def net(builder: relax.BlockBuilder, x: Any, weight: Callable[[Array], Any]) -> Any:
        ones = builder.emit(op.ones((1, 4, 5, 5), "float32"))
        return builder.emit(op.add(x, ones))

    module, weights = network((1, 4, 5, 5), net)
    (x,) = draw([(1, 4, 5, 5)])
    np.testing.assert_array_equal(run(module, weights, x, cpu, True), x + 1)


def test_scalars_are_no_shuffles(cpu: Cpu) -> None:
    def net(builder: relax.BlockBuilder, x: Any, weight: Callable[[Array], Any]) -> Any:
        y = builder.emit(op.reshape(builder.emit(op.negative(x)), ()))
        return builder.emit(op.reshape(builder.emit(op.negative(y)), (1, 1)))

    module, weights = network((1,), net)
    (x,) = draw([(1,)])
    np.testing.assert_array_equal(run(module, weights, x, cpu, True), x.reshape(1, 1))
