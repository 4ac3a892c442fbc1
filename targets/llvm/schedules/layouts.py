"""Layouts of images, and where an element of one is in another.

last        (batch, rows, columns, channels)
first       (batch, channels, rows, columns)
in blocks   (batch, channels / lanes, rows, columns, lanes)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tvm
from tvm import tirx

LAST, FIRST, IN_BLOCKS = "last", "first", "in blocks"

_RANKS = {LAST: 4, FIRST: 4, IN_BLOCKS: 5}


def pixel_of(place: Sequence[Any], layout: str, lanes: int) -> tuple[Any, Any, Any, Any]:
    """Image, channel, row and column of a place."""
    if layout == LAST:
        image, row, column, channel = place
    elif layout == FIRST:
        image, channel, row, column = place
    else:
        image, block, row, column, lane = place
        channel = block * lanes + lane
    return image, channel, row, column


def place_of_pixel(pixel: Sequence[Any], layout: str, lanes: int) -> list[Any]:
    """Where the element of an image, channel, row and column is."""
    image, channel, row, column = pixel
    if layout == LAST:
        return [image, row, column, channel]
    if layout == FIRST:
        return [image, channel, row, column]
    block, lane = tirx.floordiv(channel, lanes), tirx.floormod(channel, lanes)
    return [image, block, row, column, lane]


def is_move(
    loads: Sequence[tvm.ir.TensorLoad],
    axes: Sequence[Any],
    before: str,
    after: str,
    lanes: int | None = None,
) -> bool:
    """Whether a block reads, for each element of its result, the same one in another layout.

    Args:
        loads: Those of the operand, at least one.
        axes: The block's, with the extents of its result.
        before: Layout of the operand.
        after: Layout of the result.
        lanes: Channels that a block must have; any number if it is not given.
    """
    source = list(loads[0].source.shape)
    result = [axis.dom.extent for axis in axes]
    if (len(source), len(result)) != (_RANKS[before], _RANKS[after]):
        return False
    if not all(isinstance(size, tirx.IntImm) for size in (*source, *result)):
        return False
    found = int(source[-1] if before == IN_BLOCKS else result[-1])
    if IN_BLOCKS in (before, after) and lanes not in (None, found):
        return False
    sizes = _sizes(source, before), _sizes(result, after)
    wanted = place_of_pixel(pixel_of([a.var for a in axes], after, found), before, found)
    analyzer = tvm.sym.Analyzer()
    for axis in axes:
        analyzer.bind(axis.var, axis.dom)
    return sizes[0] == sizes[1] and all(
        analyzer.can_prove_equal(index, expected)
        for load in loads
        for index, expected in zip(load.indices, wanted, strict=True)
    )


def _sizes(shape: Sequence[Any], layout: str) -> list[int]:
    """Images, channels, rows and columns."""
    sizes = list(map(int, shape))
    if layout == IN_BLOCKS:
        return [sizes[0], sizes[1] * sizes[4], *sizes[2:4]]
    return [int(size) for size in pixel_of(sizes, layout, 1)]
