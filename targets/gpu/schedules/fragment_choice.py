"""How a product on tensor cores is cut into tiles and slices.

As in :mod:`.tile_choice`, blocks that share a multiprocessor wait for memory at the same time, and
then move and multiply in turn:

    clocks of a round = start + steps * (wait + residents * work of a step)
    work of a step    = max(words to move / fetch, words of products / multiply)

and slices cost one more kernel, which reads them all.

The figures were fitted to some 500 and 700 measurements on an H200: convolutions of ResNet-50,
SqueezeNet and MobileNet at batch 1 and 32, the first time pointwise ones, and the products of a
BERT encoder, in fp16. What they choose takes 2.6 % and 3.6 % longer than the best choice in the
geometric mean. The largest loss is 14 %, and 30 % of three microseconds.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

WARP_COLUMNS = 32
"""Columns of a warp."""

MOST = 64
"""Most rows and most columns of a warp."""

SHARED = 96 * 1024
"""Bytes of shared memory that a block may have on every GPU with asynchronous copies."""

SLICES = (1, 2, 4, 8, 16)

MIN_STEPS = 2
"""Steps of a slice."""

MULTIPROCESSORS = 132

LAUNCH = 2030
"""Clocks that one more kernel costs."""

BYTES = 442
"""Bytes that the whole GPU reads or writes in a clock, its caches included."""


@dataclass(frozen=True)
class Figures:
    """What kernels of one kind take.

    Attributes:
        sides: Sides of a tile.
        warps: Warps that a multiprocessor works on at once.
        start: Clocks that a round takes apart from its steps.
        wait: Clocks that a step takes however little there is to do.
        fetch: Words that a multiprocessor moves in a clock.
        multiply: Words of products, a row's times a column's, that a multiprocessor adds up in a
            clock.
    """

    sides: tuple[int, ...]
    warps: int
    start: float
    wait: float
    fetch: float
    multiply: float


MOVED = Figures((32, 64, 128), warps=5, start=3570, wait=838, fetch=20.7, multiply=201)
"""Factors that get to shared memory through registers."""

COPIED = Figures((32, 64, 128, 256), warps=15, start=1210, wait=845, fetch=40.5, multiply=649)
"""Factors that get there by themselves."""

MOST_SIDES = 384
"""Most rows and columns of a tile together."""


@dataclass(frozen=True)
class Cut:
    """How a product is cut.

    Attributes:
        rows: Rows of a tile.
        columns: Columns of a tile.
        slices: Slices of the summands.
        copied: Whether factors get to shared memory by themselves, not through registers.
    """

    rows: int
    columns: int
    slices: int
    copied: bool = False

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.rows // self.warp_rows * (self.columns // self.warp_columns) * 32

    @property
    def warp_rows(self) -> int:
        """Rows of a warp: one of two rows of warps, or one of four warps and more."""
        if not self.copied:
            return self.rows // 2
        return min(max(self.rows * self.columns // self.warp_columns // 4, 16), MOST)

    @property
    def warp_columns(self) -> int:
        """Columns of a warp."""
        if not self.copied:
            return WARP_COLUMNS
        return min(max(self.columns // 2, WARP_COLUMNS), MOST)

    @property
    def words(self) -> int:
        """Depth of a step in words: less for large tiles, of which some must fit shared memory."""
        if self.copied:
            return 32 if 3 * 4 * 32 * (self.rows + self.columns) <= SHARED else 16
        return 32 if self.rows + self.columns <= 128 else 16

    @property
    def stages(self) -> int:
        """Steps for which shared memory has room."""
        if not self.copied:
            return 2
        return min(SHARED // (4 * self.words * (self.rows + self.columns)), 4)


def rank_cuts(shape: tuple[int, int, int, int], packed: int, copied: bool = False) -> list[Cut]:
    """Ways to cut a product, those that take the least time first.

    Args:
        shape: Extents of b, m, n and k.
        packed: Elements in a word.
        copied: Whether factors can get to shared memory by themselves.
    """
    sides = (COPIED if copied else MOVED).sides
    cuts = [
        cut
        for rows, columns, slices in itertools.product(sides, sides, SLICES)
        if rows + columns <= MOST_SIDES
        and _fits(cut := Cut(rows, columns, slices, copied), shape, packed)
    ]
    return sorted(cuts, key=lambda cut: _clocks(shape, cut, packed))


def _fits(cut: Cut, shape: tuple[int, int, int, int], packed: int) -> bool:
    return cut.slices == 1 or _steps(shape, cut, packed) >= MIN_STEPS * cut.slices


def _steps(shape: tuple[int, int, int, int], cut: Cut, packed: int) -> int:
    return math.ceil(shape[3] / (cut.words * packed))


def _clocks(shape: tuple[int, int, int, int], cut: Cut, packed: int) -> float:
    batch, rows, columns, _ = shape
    figures = COPIED if cut.copied else MOVED
    tiles = batch * math.ceil(rows / cut.rows) * math.ceil(columns / cut.columns)
    steps = math.ceil(_steps(shape, cut, packed) / cut.slices)
    residents = max(1, figures.warps * 32 // cut.threads)
    each = math.ceil(tiles * cut.slices / MULTIPROCESSORS)
    rounds, last = divmod(each, residents)
    clocks = rounds * _round(cut, figures, residents, steps)
    clocks += _round(cut, figures, last, steps) if last else 0
    if cut.slices > 1:
        clocks += LAUNCH + 4 * (cut.slices + 1) * batch * rows * columns / BYTES
    return clocks


def _round(cut: Cut, figures: Figures, residents: int, steps: int) -> float:
    """Clocks for blocks that a multiprocessor runs at the same time."""
    moved = (cut.rows + cut.columns) * cut.words / figures.fetch
    multiplied = cut.rows * cut.columns * cut.words / figures.multiply
    return figures.start + steps * (figures.wait + residents * max(moved, multiplied))
