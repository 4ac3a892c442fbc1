"""How a product on tensor cores is cut into tiles and slices.

As in :mod:`.tile_choice`, blocks that share a multiprocessor wait for memory at the same time, and
then move and multiply in turn:

    clocks of a round = START + steps * (WAIT + residents * work of a step)
    work of a step    = max(words to move / FETCH, words of products / MULTIPLY)

and slices cost one more kernel, which reads them all.

The figures were fitted to 500 measurements on an H200: pointwise convolutions of ResNet-50,
SqueezeNet and MobileNet at batch 1 and 32, and the products of a BERT encoder, in fp16. What they
choose takes 2.6 % longer than the best choice in the geometric mean, and 14 % at most.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

WARP_COLUMNS = 32
"""Columns of a warp."""

ROWS = COLUMNS = (32, 64, 128)
"""Sides of a tile."""

SLICES = (1, 2, 4, 8, 16)

MIN_STEPS = 2
"""Steps of a slice."""

MULTIPROCESSORS = 132

WARPS = 5
"""Warps that a multiprocessor works on at once."""

START = 3570
"""Clocks that a round takes apart from its steps."""

WAIT = 838
"""Clocks that a step takes however little there is to do."""

FETCH = 20.7
"""Words that a multiprocessor moves in a clock."""

MULTIPLY = 201
"""Words of products, a row's times a column's, that a multiprocessor adds up in a clock."""

LAUNCH = 2030
"""Clocks that one more kernel costs."""

BYTES = 442
"""Bytes that the whole GPU reads or writes in a clock, its caches included."""


@dataclass(frozen=True)
class Cut:
    """How a product is cut.

    Attributes:
        rows: Rows of a tile.
        columns: Columns of a tile.
        slices: Slices of the summands.
    """

    rows: int
    columns: int
    slices: int

    @property
    def threads(self) -> int:
        """Threads of a block: two rows of warps."""
        return 2 * self.columns // WARP_COLUMNS * 32

    @property
    def warp_rows(self) -> int:
        """Rows of a warp."""
        return self.rows // 2

    @property
    def words(self) -> int:
        """Depth of a step in words: less for large tiles, of which two must fit shared memory."""
        return 32 if self.rows + self.columns <= 128 else 16


def rank_cuts(shape: tuple[int, int, int, int], packed: int) -> list[Cut]:
    """Ways to cut a product, those that take the least time first.

    Args:
        shape: Extents of b, m, n and k.
        packed: Elements in a word.
    """
    cuts = [
        cut
        for cut in itertools.starmap(Cut, itertools.product(ROWS, COLUMNS, SLICES))
        if cut.slices == 1 or _steps(shape, cut, packed) >= MIN_STEPS * cut.slices
    ]
    return sorted(cuts, key=lambda cut: _clocks(shape, cut, packed))


def _steps(shape: tuple[int, int, int, int], cut: Cut, packed: int) -> int:
    return math.ceil(shape[3] / (cut.words * packed))


def _clocks(shape: tuple[int, int, int, int], cut: Cut, packed: int) -> float:
    batch, rows, columns, _ = shape
    tiles = batch * math.ceil(rows / cut.rows) * math.ceil(columns / cut.columns)
    steps = math.ceil(_steps(shape, cut, packed) / cut.slices)
    residents = max(1, WARPS * 32 // cut.threads)
    each = math.ceil(tiles * cut.slices / MULTIPROCESSORS)
    rounds, last = divmod(each, residents)
    clocks = rounds * _round(cut, residents, steps) + (_round(cut, last, steps) if last else 0)
    if cut.slices > 1:
        clocks += LAUNCH + 4 * (cut.slices + 1) * batch * rows * columns / BYTES
    return clocks


def _round(cut: Cut, residents: int, steps: int) -> float:
    """Clocks for blocks that a multiprocessor runs at the same time."""
    moved = (cut.rows + cut.columns) * cut.words / FETCH
    multiplied = cut.rows * cut.columns * cut.words / MULTIPLY
    return START + steps * (WAIT + residents * max(moved, multiplied))
