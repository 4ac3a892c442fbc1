"""Blocked convolutions and changes of layout as tensor expressions, and weights packed for them.

A blocked tensor ``(batch, blocks, height, width, c)`` holds channel k at
``[:, k // c, :, :, k % c]``; lanes beyond the last channel hold anything, and nobody reads them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from hybridc.targets.llvm.schedules.blocked_tiles import BLOCKED, Geometry
from tvm import te, tirx

from hybridc.bundle.tensors import Array


def weight_shape(geometry: Geometry) -> tuple[int, ...]:
    """Shape of the packed weights; see :func:`pack_weight`."""
    g = geometry
    if g.depthwise:
        return (g.blocks, g.kernel_rows, g.kernel_columns, g.lanes)
    inside = _inside(g)
    panels, width = g.blocks // g.vectors, g.vectors * g.lanes
    return (panels, -(-g.channels // inside), g.kernel_rows, g.kernel_columns, inside, width)


def _inside(geometry: Geometry) -> int:
    """Input channels of one block of packed weights."""
    if geometry.source_lanes == 1:
        return geometry.channels
    return min(geometry.source_lanes, geometry.channels)


def pack_weight(weight: Array, geometry: Geometry) -> Array:
    """Weights ``(filters, channels, rows, columns)`` in the order in which a kernel reads them.

    That is ``(panels, input blocks, rows, columns, channels of a block, filters of a panel)``, or
    for a depthwise convolution ``(blocks, rows, columns, lanes)``; missing channels are zero.
    """
    g = geometry
    shape = weight_shape(g)
    padded = np.zeros((g.blocks * g.lanes, *_padded_channels(g), *weight.shape[2:]), weight.dtype)
    padded[: weight.shape[0], : weight.shape[1]] = weight
    if g.depthwise:
        split = padded.reshape(g.blocks, g.lanes, g.kernel_rows, g.kernel_columns)
        return np.ascontiguousarray(split.transpose(0, 2, 3, 1))
    panels, blocks, rows, columns, inside, width = shape
    split = padded.reshape(panels, width, blocks, inside, rows, columns)
    return np.ascontiguousarray(split.transpose(0, 2, 4, 5, 3, 1))


def _padded_channels(geometry: Geometry) -> tuple[int]:
    if geometry.depthwise:
        return (1,)
    inside = _inside(geometry)
    return (-(-geometry.channels // inside) * inside,)


def blocked_convolution(geometry: Geometry, data: te.Tensor, weight: te.Tensor) -> te.Tensor:
    """The convolution of a plain or blocked input with packed weights, without bias."""
    g = geometry
    channels = 1 if g.depthwise else g.channels
    axes = [
        te.reduce_axis((_int(0), _int(extent)), name)
        for extent, name in ((channels, "c"), (g.kernel_rows, "i"), (g.kernel_columns, "j"))
    ]

    def element(n: Any, block: Any, y: Any, x: Any, lane: Any) -> Any:
        channel, i, j = axes
        row = y * g.row_step + i * g.row_reach - g.top
        column = x * g.column_step + j * g.column_reach - g.left
        inside = tirx.all(row >= 0, row < g.height, column >= 0, column < g.width)
        value = data(*_source(g, n, block, channel, row, column, lane))
        value = tirx.if_then_else(inside, value, tirx.const(0, str(data.dtype)))
        return te.sum(value * weight(*_factor(g, block, channel, i, j, lane)), axis=axes)

    shape = (g.batch, g.blocks, g.rows, g.columns, g.lanes)
    attributes = {BLOCKED: g.encode()}
    return te.compute(
        tuple(map(_int, shape)), element, name="blocked_convolution", attrs=attributes
    )


def _source(
    g: Geometry, n: Any, block: Any, channel: Any, row: Any, column: Any, lane: Any
) -> tuple[Any, ...]:
    """Where an input element is."""
    if g.depthwise:
        return n, block, row, column, lane
    if g.groups > 1:
        group = tirx.floordiv(block, g.blocks // g.groups)
        channel = group * g.channels + channel
    if g.source_lanes == 1:
        return n, channel, row, column
    lanes = g.source_lanes
    return n, tirx.floordiv(channel, lanes), row, column, tirx.floormod(channel, lanes)


def _factor(g: Geometry, block: Any, channel: Any, i: Any, j: Any, lane: Any) -> tuple[Any, ...]:
    """Where a packed weight is."""
    if g.depthwise:
        return block, i, j, lane
    inside = _inside(g)
    position = tirx.floormod(block, g.vectors) * g.lanes + lane
    return (
        tirx.floordiv(block, g.vectors),
        tirx.floordiv(channel, inside),
        i,
        j,
        tirx.floormod(channel, inside),
        position,
    )


def block_channels(data: te.Tensor, lanes: int) -> te.Tensor:
    """A plain tensor blocked; lanes beyond the last channel are zero."""
    batch, channels, height, width = (int(dim) for dim in data.shape)
    shape = (batch, -(-channels // lanes), height, width, lanes)

    def element(n: Any, block: Any, y: Any, x: Any, lane: Any) -> Any:
        channel = block * lanes + lane
        if channels % lanes == 0:
            return data(n, channel, y, x)
        zero = tirx.const(0, str(data.dtype))
        return tirx.if_then_else(channel < channels, data(n, channel, y, x), zero)

    return te.compute(tuple(map(_int, shape)), element, name="block_channels")


def unblock_channels(data: te.Tensor, channels: int) -> te.Tensor:
    """A blocked tensor plain again."""
    batch, _, height, width, lanes = (int(dim) for dim in data.shape)
    return te.compute(
        tuple(map(_int, (batch, channels, height, width))),
        lambda n, c, y, x: data(n, tirx.floordiv(c, lanes), y, x, tirx.floormod(c, lanes)),
        name="unblock_channels",
    )


def _int(value: int) -> tirx.IntImm:
    return tirx.IntImm("int64", value)
