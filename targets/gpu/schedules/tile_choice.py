"""Which tile a product gets, and how many slices its summands are cut into.

Two things cost time: the steps of a block, one after the other, and blocks that find no free
multiprocessor. A step waits for memory and then multiplies; blocks that share a multiprocessor wait
at the same time, and multiply in turn. So

    seconds of a round = steps * (wait + residents * products of a step / products per second)
    rounds             = blocks / (multiprocessors * residents)

and slices cost one more kernel, which reads them all.

The figures, in clocks, were fitted to 550 measurements on an H200: the convolutions of ResNet-50
at batch 1 and 32, and the products of a BERT encoder. What they choose takes 1.5 % longer than the
best choice in the geometric mean, and 9 % at most. They need not be the hardware's one by one.
"""

from __future__ import annotations

import itertools
import math

SIDE = 16
"""Threads along each side of a block."""

DEPTH = 16
"""Summands that one fetch is good for."""

TILES = (16, 32, 64, 128)
"""Sides of a tile."""

SLICES = (1, 2, 4, 8, 16, 32)

MULTIPROCESSORS = 132

RESIDENTS = {16: 4, 32: 8, 64: 3, 128: 2}
"""Blocks that a multiprocessor works on at once, by tile."""

WAIT = 2100
"""Clocks that a step takes however little there is to multiply."""

PRODUCTS = 228
"""Multiply-adds of a multiprocessor in a clock."""

FETCHES = 22
"""Values that a multiprocessor gets from shared memory in a clock."""

LAUNCH = 1500
"""Clocks that one more kernel costs."""

BYTES = 720
"""Bytes that the whole GPU reads or writes in a clock, its caches included."""


def rank_tiles(batch: int, rows: int, columns: int, depth: int) -> list[tuple[int, int]]:
    """Sides of a tile with numbers of slices, those that take the least time first.

    Args:
        batch: Products that are computed at once.
        rows: Extent of m.
        columns: Extent of n.
        depth: Extent of k.
    """
    steps = math.ceil(depth / DEPTH)
    choices = itertools.product(TILES, (count for count in SLICES if count <= max(steps // 4, 1)))
    return sorted(choices, key=lambda choice: _clocks(batch, rows, columns, steps, *choice))


def least_clocks(batch: int, rows: int, columns: int, depth: int) -> float:
    """Clocks that the product takes with the best tile; see :func:`rank_tiles`."""
    tile, slices = rank_tiles(batch, rows, columns, depth)[0]
    return _clocks(batch, rows, columns, math.ceil(depth / DEPTH), tile, slices)


def _clocks(batch: int, rows: int, columns: int, steps: int, tile: int, slices: int) -> float:
    tiles = batch * math.ceil(rows / tile) * math.ceil(columns / tile)
    each = math.ceil(tiles * slices / MULTIPROCESSORS)
    rounds, last = divmod(each, RESIDENTS[tile])
    step = math.ceil(steps / slices)
    clocks = rounds * _round(tile, RESIDENTS[tile], step) + (
        _round(tile, last, step) if last else 0
    )
    if slices > 1:
        moved = 4 * (slices + 1) * tiles * tile * tile
        clocks += LAUNCH + moved / BYTES
    return clocks


def _round(tile: int, residents: int, steps: int) -> float:
    """Clocks for blocks that a multiprocessor runs at the same time."""
    products = DEPTH * tile * tile / PRODUCTS
    fetches = DEPTH * 2 * tile * SIDE / FETCHES
    return steps * (WAIT + residents * max(products, fetches))
