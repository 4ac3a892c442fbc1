"""Blocked convolutions and changes of layout as tensor expressions, and weights packed for them.

A blocked tensor ``(batch, blocks, height, width, c)`` holds channel k at
``[:, k // c, :, :, k % c]``; lanes beyond the last channel hold anything, and nobody reads them.
Tensors with one spatial axis have no height.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from hybridc.targets.llvm.schedules.blocked_tiles import BLOCKED, Geometry
from hybridc.targets.llvm.schedules.extents import number
from hybridc.targets.llvm.schedules.statements import index, int64
from tvm import te, tirx

from hybridc.bundle.tensors import Array


def weight_shape(geometry: Geometry) -> tuple[int, ...]:
    """Shape of the packed weights; see :func:`pack_weight`."""
    g = geometry
    if g.depthwise:
        return (g.blocks, g.kernel_rows, g.kernel_columns, g.lanes)
    inside = _inside(g)
    panels, width = g.panels, g.vectors * g.lanes
    if g.mixes_groups:
        spans = (g.span(panel) for panel in range(panels))
        most = max(high - low for low, high in spans)
        return (panels, most, g.kernel_rows, g.kernel_columns, 1, width)
    return (panels, -(-g.channels // inside), g.kernel_rows, g.kernel_columns, inside, width)


def _inside(geometry: Geometry) -> int:
    """Input channels of one block of packed weights."""
    if geometry.source_lanes == 1:
        return geometry.channels
    return min(geometry.source_lanes, geometry.channels)


def pack_weight(weight: Array, geometry: Geometry) -> Array:
    """Weights ``(filters, channels, [rows,] columns)`` in the order in which a kernel reads them.

    That is ``(panels, input blocks, rows, columns, channels of a block, filters of a panel)``, or
    for a depthwise convolution ``(blocks, rows, columns, lanes)``; missing channels are zero.
    """
    g = geometry
    shape = weight_shape(g)
    weight = weight.reshape(*weight.shape[:2], g.kernel_rows, g.kernel_columns)
    if g.mixes_groups:
        return _pack_mixed(weight, g)
    padded = np.zeros(
        (g.panels * g.vectors * g.lanes, *_padded_channels(g), *weight.shape[2:]), weight.dtype
    )
    padded[: weight.shape[0], : weight.shape[1]] = weight
    if g.depthwise:
        split = padded.reshape(g.blocks, g.lanes, g.kernel_rows, g.kernel_columns)
        return np.ascontiguousarray(split.transpose(0, 2, 3, 1))
    panels, blocks, rows, columns, inside, width = shape
    split = padded.reshape(panels, width, blocks, inside, rows, columns)
    return np.ascontiguousarray(split.transpose(0, 2, 4, 5, 3, 1))


def _pack_mixed(weight: Array, geometry: Geometry) -> Array:
    """Packed weights whose panels hold the input channels of several groups."""
    g = geometry
    packed = np.zeros(weight_shape(g), weight.dtype)
    for place, taps in enumerate(weight):
        panel, position = divmod(place, g.vectors * g.lanes)
        first = place // g.group_filters * g.channels - g.span(panel)[0]
        packed[panel, first : first + g.channels, :, :, 0, position] = taps
    return packed


def _padded_channels(geometry: Geometry) -> tuple[int]:
    if geometry.depthwise:
        return (1,)
    inside = _inside(geometry)
    return (-(-geometry.channels // inside) * inside,)


def blocked_convolution(
    geometry: Geometry, data: te.Tensor, weight: te.Tensor, shape: Sequence[Any] = ()
) -> te.Tensor:
    """The convolution of a plain or blocked input with packed weights, without bias.

    Args:
        geometry: The convolution.
        data: The input; its sizes may be unknown.
        weight: The packed weights.
        shape: Of the result, where sizes are not those of the geometry.
    """
    g = geometry
    is_flat = len(data.shape) == (3 if g.source_lanes == 1 else 4)
    channels = 1 if g.depthwise else g.channels
    height, width = ([1, *data.shape[2:]] if is_flat else list(data.shape[2:]))[:2]
    axes = [
        te.reduce_axis((int64(0), int64(extent)), name)
        for extent, name in ((channels, "c"), (g.kernel_rows, "i"), (g.kernel_columns, "j"))
    ]

    def element(n: Any, block: Any, *place: Any) -> Any:
        y, x, lane = (int64(0), *place) if is_flat else place
        channel, i, j = axes
        row = y * g.row_step + i * g.row_reach - g.top
        column = x * g.column_step + j * g.column_reach - g.left
        inside = tirx.all(row >= 0, row < height, column >= 0, column < width)
        source = _source(g, n, block, channel, row, column, lane)
        value = data(*source[:2], *source[3:]) if is_flat else data(*source)
        value = tirx.if_then_else(inside, value, tirx.const(0, str(data.dtype)))
        return te.sum(value * weight(*_factor(g, block, channel, i, j, lane)), axis=axes)

    shape = shape or (g.batch, g.blocks, *([] if is_flat else [g.rows]), g.columns, g.lanes)
    attributes = {BLOCKED: g.encode()}
    return te.compute(
        tuple(map(index, shape)), element, name="blocked_convolution", attrs=attributes
    )


def _source(
    g: Geometry, n: Any, block: Any, channel: Any, row: Any, column: Any, lane: Any
) -> tuple[Any, ...]:
    """Where an input element is."""
    if g.depthwise:
        return n, block, row, column, lane
    if g.groups > 1:
        channel = g.source_channel(_group(g, block, lane) * g.channels + channel)
    if g.source_lanes == 1:
        return n, channel, row, column
    lanes = g.source_lanes
    return n, tirx.floordiv(channel, lanes), row, column, tirx.floormod(channel, lanes)


def _group(g: Geometry, block: Any, lane: Any) -> Any:
    """Group of an output channel; lanes beyond the last channel count to the last group."""
    group = tirx.floordiv(block * g.lanes + lane, g.group_filters)
    return tirx.min(group, int64(g.groups - 1))


def _factor(g: Geometry, block: Any, channel: Any, i: Any, j: Any, lane: Any) -> tuple[Any, ...]:
    """Where a packed weight is."""
    if g.depthwise:
        return block, i, j, lane
    inside = _inside(g)
    panel = tirx.floordiv(block, g.vectors)
    position = tirx.floormod(block, g.vectors) * g.lanes + lane
    if g.mixes_groups:
        last = int64(g.groups - 1)
        first = tirx.min(tirx.floordiv(panel * (g.vectors * g.lanes), g.group_filters), last)
        offset = (_group(g, block, lane) - first) * g.channels
        return panel, offset + channel, i, j, int64(0), position
    return (
        panel,
        tirx.floordiv(channel, inside),
        i,
        j,
        tirx.floormod(channel, inside),
        position,
    )


def block_channels(data: te.Tensor, lanes: int) -> te.Tensor:
    """A plain tensor blocked; lanes beyond the last channel are zero."""
    batch, channels, *plane = map(number, data.shape)
    shape = (batch, -(-channels // lanes), *plane, lanes)

    def element(n: Any, block: Any, *place: Any) -> Any:
        *at, lane = place
        channel = block * lanes + lane
        if channels % lanes == 0:
            return data(n, channel, *at)
        zero = tirx.const(0, str(data.dtype))
        return tirx.if_then_else(channel < channels, data(n, channel, *at), zero)

    return te.compute(tuple(map(index, shape)), element, name="block_channels")


def unblock_channels(data: te.Tensor, channels: int) -> te.Tensor:
    """A blocked tensor plain again."""
    batch, _, *plane, lanes = map(number, data.shape)

    def element(n: Any, channel: Any, *at: Any) -> Any:
        return data(n, tirx.floordiv(channel, lanes), *at, tirx.floormod(channel, lanes))

    shape = (batch, channels, *plane)
    return te.compute(tuple(map(index, shape)), element, name="unblock_channels")
