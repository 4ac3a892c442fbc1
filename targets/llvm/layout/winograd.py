"""Winograd's convolutions as tensor expressions, and weights transformed and packed for them."""

from __future__ import annotations

from typing import Any

import numpy as np
from hybridc.targets.llvm.schedules.blocked_tiles import Geometry
from hybridc.targets.llvm.schedules.statements import index, int64
from hybridc.targets.llvm.schedules.winograd import INPUTS, PRODUCTS, WINOGRAD
from hybridc.targets.llvm.schedules.winograd_tiles import tiles_of
from hybridc.targets.llvm.schedules.winograd_transforms import (
    TAPS,
    input_matrix,
    output_matrix,
    transform_weight,
)
from tvm import te, tirx

from hybridc.bundle.tensors import Array


def winograd_weight_shape(geometry: Geometry) -> tuple[int, ...]:
    """Shape of the packed weights; see :func:`pack_winograd`."""
    g = geometry
    inside = min(g.source_lanes, g.channels)
    positions = (g.winograd + TAPS - 1) ** 2
    return (g.panels * positions, -(-g.channels // inside), 1, 1, inside, g.vectors * g.lanes)


def pack_winograd(weight: Array, geometry: Geometry) -> Array:
    """Weights ``(filters, channels, 3, 3)``, transformed, in the order in which they are read.

    That is ``(panels and positions, input blocks, 1, 1, channels of a block, filters of a
    panel)``; missing channels are zero.
    """
    g = geometry
    rows, blocks, _, _, inside, width = winograd_weight_shape(g)
    transformed = transform_weight(weight, g.winograd)
    transformed = transformed.reshape(*weight.shape[:2], -1)
    padded = np.zeros((g.panels * width, blocks * inside, rows // g.panels), weight.dtype)
    padded[: weight.shape[0], : weight.shape[1]] = transformed
    split = padded.reshape(g.panels, width, blocks, inside, -1)
    ordered = split.transpose(0, 4, 2, 3, 1)
    return np.ascontiguousarray(ordered).reshape(winograd_weight_shape(g))


def winograd_convolution(geometry: Geometry, data: te.Tensor, weight: te.Tensor) -> te.Tensor:
    """The convolution of a blocked input with packed weights, without bias.

    Where the number of images is not known, the geometry is that of one.
    """
    products = _products(geometry, _inputs(geometry, data), weight)
    return _outputs(geometry, products, data.shape[0])


def _inputs(g: Geometry, data: te.Tensor) -> te.Tensor:
    """Transformed tiles ``(position, block, tile, lane)`` of a blocked input."""
    size, edge = g.winograd, g.winograd + TAPS - 1
    _, down, across = tiles_of(g)
    matrix = input_matrix(size)
    first, second = _axes(edge, edge)

    def element(position: Any, block: Any, tile: Any, lane: Any) -> Any:
        image, rest = tirx.floordiv(tile, down * across), tirx.floormod(tile, down * across)
        row = tirx.floordiv(rest, across) * size + first - g.top
        column = tirx.floormod(rest, across) * size + second - g.left
        is_read = tirx.all(row >= 0, row < g.height, column >= 0, column < g.width)
        value = data(image, block, row, column, lane)
        value = tirx.if_then_else(is_read, value, tirx.const(0, str(data.dtype)))
        factor = entry(matrix, tirx.floordiv(position, edge), first, data.dtype)
        factor = factor * entry(matrix, tirx.floormod(position, edge), second, data.dtype)
        return te.sum(value * factor, axis=[first, second])

    tiles = data.shape[0] * down * across
    return te.compute(_shape(edge**2, data.shape[1], tiles, g.lanes), element, name=INPUTS)


def _products(g: Geometry, inputs: te.Tensor, weight: te.Tensor) -> te.Tensor:
    """Products ``(position, block, tile, lane)`` of transformed tiles and packed weights."""
    positions, inside = (g.winograd + TAPS - 1) ** 2, min(g.source_lanes, g.channels)
    (channel,) = _axes(g.channels)

    def element(position: Any, block: Any, tile: Any, lane: Any) -> Any:
        panel, vector = tirx.floordiv(block, g.vectors), tirx.floormod(block, g.vectors)
        channels = tirx.floordiv(channel, g.lanes), tirx.floormod(channel, g.lanes)
        rows = tirx.floordiv(channel, inside), tirx.floormod(channel, inside)
        panel, column = panel * positions + position, vector * g.lanes + lane
        factor = weight(panel, rows[0], int64(0), int64(0), rows[1], column)
        return te.sum(inputs(position, channels[0], tile, channels[1]) * factor, axis=channel)

    shape = _shape(positions, g.blocks, inputs.shape[2], g.lanes)
    return te.compute(shape, element, name=PRODUCTS)


def _outputs(g: Geometry, products: te.Tensor, images: Any) -> te.Tensor:
    """The blocked output of transformed products."""
    size, edge = g.winograd, g.winograd + TAPS - 1
    _, down, across = tiles_of(g)
    matrix = output_matrix(size)
    first, second = _axes(edge, edge)

    def element(image: Any, block: Any, row: Any, column: Any, lane: Any) -> Any:
        tile = image * down * across
        tile = tile + tirx.floordiv(row, size) * across + tirx.floordiv(column, size)
        factor = entry(matrix, tirx.floormod(row, size), first, products.dtype)
        factor = factor * entry(matrix, tirx.floormod(column, size), second, products.dtype)
        value = products(first * edge + second, block, tile, lane)
        return te.sum(value * factor, axis=[first, second])

    shape = _shape(images, g.blocks, g.rows, g.columns, g.lanes)
    return te.compute(shape, element, name="winograd_outputs", attrs={WINOGRAD: g.encode()})


def _shape(*extents: Any) -> tuple[Any, ...]:
    return tuple(map(index, extents))


def _axes(*extents: int) -> list[Any]:
    return [te.reduce_axis((int64(0), int64(extent)), "k") for extent in extents]


def entry(matrix: Array, row: Any, column: Any, dtype: Any) -> Any:
    """An element of a constant matrix, as a chain of choices."""
    value = tirx.const(0, str(dtype))
    for (i, j), number in np.ndenumerate(matrix):
        if number:
            chosen = tirx.all(row == i, column == j)
            value = tirx.Select(chosen, tirx.const(float(number), str(dtype)), value)
    return value
