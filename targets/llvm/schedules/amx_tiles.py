"""The form of integer kernels with Intel AMX: tiles, packed weights and estimates.

AMX has eight registers of 16 rows of 64 bytes. One instruction multiplies 16 x 64 elements of 8-bit
data with 64 x 16 of weights, and adds to 16 x 16 sums of int32. A block of the output is two tiles
of positions times two of filters: four registers of sums, two of data and two of weights.

A row of a data tile is the data that one position of the output reads from one row of the kernel:
its columns and channels, side by side in memory, are one span. Spans are cut into pieces of 64
elements; the last piece is moved back to end with the span, and has zeros for weights where the
one before it has been already. So nothing has to divide anything, and the data is read in place.

The rows of a tile are as far from one another as its positions are. Those of a convolution without
strides are counted through all rows of the padded data, and results beyond an output's row are
dropped: on small images a tile would be mostly empty otherwise. With strides, tiles are cut from
one row of the output at a time.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from hybridc.targets.llvm.cpu import Cpu
from hybridc.targets.llvm.schedules.integer_tiles import Geometry

from hybridc.bundle.tensors import Array

TILED = 64
"""Elements of a row of data, and the ``group`` of a geometry that is computed with tiles."""

ROWS = 16
"""Rows of a register, and int32 elements of one of its rows."""

WORD = 4
"""Channels that are side by side in a row of weights."""

LOAD_CYCLES = 8
"""Cycles in which a register is loaded from the first-level cache."""

ROW_CYCLES = 4
"""Cycles in which a row of sums goes through memory, to be finished."""

_FEATURES = {"amx-tile", "amx-int8", "avx512bw"}


def has_tiles(cpu: Cpu) -> bool:
    """Whether the CPU multiplies tiles of 8-bit integers."""
    return cpu.llvm_features >= _FEATURES


@dataclass(frozen=True)
class Span:
    """The elements that a position reads from one row of the kernel, and how they are cut.

    Attributes:
        taps: Columns of the kernel that are no neighbors in the data; each has a span of its own.
        starts: First element of each piece.
        depth: Elements of a piece, a multiple of four.
    """

    taps: int
    starts: tuple[int, ...]
    depth: int


def span_of(geometry: Geometry) -> Span:
    """The spans of a kernel."""
    g = geometry
    is_whole = g.kernel_columns == 1 or g.column_reach == 1
    length = g.channels * (g.kernel_columns if is_whole else 1)
    depth = min(length, TILED)
    pieces = -(-length // depth)
    starts = tuple(min(piece * depth, length - depth) for piece in range(pieces))
    return Span(1 if is_whole else g.kernel_columns, starts, depth)


@dataclass(frozen=True)
class Walk:
    """How tiles go over the positions of an output.

    Attributes:
        runs: Sequences of positions whose data is evenly spaced.
        length: Positions of a run.
        pitch: Positions from one row of the output to the next; 0 if a run is not cut into rows.
        tiles: Tiles of a block, 1 or 2.
        rows: Positions of a tile.
    """

    runs: int
    length: int
    pitch: int
    tiles: int
    rows: int

    @property
    def starts(self) -> tuple[int, ...]:
        """First position of each tile of a block; the second may overlap the first in a run."""
        return (0, min(self.rows, self.length - self.rows))[: self.tiles]

    @property
    def block(self) -> int:
        """Positions of a block."""
        return self.starts[-1] + self.rows

    @property
    def blocks(self) -> int:
        """Blocks of a run; the last is moved back to end with it."""
        return -(-self.length // self.block)


def walk_of(geometry: Geometry, width: int) -> Walk:
    """How to go over the output of data that is ``width`` elements wide."""
    g = geometry
    if g.kernel_rows == g.kernel_columns == g.row_step == g.column_step == 1 and (
        width == g.columns or not g.is_convolution
    ):
        return _walk(1, g.pixels, 0)
    if g.row_step == g.column_step == 1:
        return _walk(g.batch, (g.rows - 1) * width + g.columns, width)
    return _walk(g.batch * g.rows, g.columns, 0)


def _walk(runs: int, length: int, pitch: int) -> Walk:
    if length <= ROWS:
        return Walk(runs, length, pitch, 1, length)
    blocks = -(-length // (2 * ROWS))
    return Walk(runs, length, pitch, 2, -(-length // (2 * blocks)))


def tile_geometry(quads: Geometry, channels: int) -> Geometry:
    """The kernel with tiles that computes what one with quads does, for data of all channels.

    Where a span is short, words of the data's channels must be full, as for quads.
    """
    vectors = min(quads.filters // ROWS, 2)
    tiled = replace(quads, group=TILED, channels=channels, lanes=ROWS, vectors=vectors)
    return tiled if span_of(tiled).depth == TILED else replace(tiled, channels=quads.channels)


def is_tiled_faster(quads: Geometry, cpu: Cpu) -> bool:
    """Whether tiles are estimated to be faster than vectors for what a kernel computes."""
    if not has_tiles(cpu) or quads.filters < ROWS:
        return False
    tiled = tile_geometry(quads, quads.channels)
    return tiled_cycles(tiled) < vector_cycles(quads)


def vector_cycles(quads: Geometry) -> float:
    """Estimated cycles of a kernel with vectors: two instructions a cycle."""
    return quads.pixels * quads.panels * quads.vectors * quads.steps / 2


def tiled_cycles(tiled: Geometry) -> float:
    """Estimated cycles of a kernel with tiles; one instruction takes one for each row of data.

    What the next instructions need is loaded meanwhile.
    """
    g, span = tiled, span_of(tiled)
    walk = walk_of(g, (g.columns - 1) * g.column_step + (g.kernel_columns - 1) * g.column_reach + 1)
    pieces = g.kernel_rows * span.taps * len(span.starts)
    products = max(walk.tiles * g.vectors * walk.rows, LOAD_CYCLES * (walk.tiles + g.vectors))
    blocks = walk.runs * walk.blocks * g.panels
    return blocks * (pieces * products + walk.block * g.vectors * ROW_CYCLES)


def pack_tiles(weight: Array, geometry: Geometry) -> Array:
    """Weights of ``(filters, rows, columns, channels)`` in the order in which they are used.

    Returns:
        ``(panels, rows, taps, pieces, tiles of a panel * elements of a tile)``; a tile has the
        16 filters of a word side by side, then the next word.
    """
    g, span = geometry, span_of(geometry)
    missing = g.channels - weight.shape[3]
    whole = np.pad(weight, [(0, 0), (0, 0), (0, 0), (0, missing)])
    spans = whole.reshape(g.filters, g.kernel_rows, span.taps, -1)
    pieces = []
    done = 0
    for start in span.starts:
        piece = spans[..., start : start + span.depth].copy()
        piece[..., : done - start] = 0
        pieces.append(piece)
        done = start + span.depth
    cut = np.stack(pieces, axis=3)
    panels = np.stack([cut[start : start + g.panel] for start in g.starts])
    split = panels.reshape(g.panels, g.vectors, ROWS, *panels.shape[2:5], -1, WORD)
    moved = split.transpose(0, 3, 4, 5, 1, 6, 2, 7)
    return np.ascontiguousarray(moved).reshape(*moved.shape[:4], -1)
