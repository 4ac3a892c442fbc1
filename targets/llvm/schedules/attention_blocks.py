"""Sizes of attention, and how a kernel cuts it: queries of a block, keys of a chunk.

The blocks of the tensor program are named here, for those who make it and those who schedule it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hybridc.targets.fitting import Misfit
from hybridc.targets.llvm.cpu import Cpu
from hybridc.targets.llvm.schedules.blocked_tiles import (
    FIRST_CACHE_BYTES,
    Geometry,
    Tiling,
    choose_tiling,
    panels_of,
    shared_cycles,
)

ATTENTION = "hybridc.attention"
"""Annotation of the block that ends attention: the fields of its Sizes, then which of the axes
batch, head, query and column each axis of the result is."""

SCORES, MASKED = "attention_scores", "attention_masked"
BLOCKS = (SCORES, MASKED, "attention_peak", "attention_exp", "attention_total", "attention_share")
"""Names of the blocks before the last one, whose loops are written with it."""

MIN_ROWS, MAX_ROWS = 32, 64
"""Queries of a block: so many that keys and values are read seldom, and their scores fit a cache.
"""


@dataclass(frozen=True)
class Sizes:
    """Sizes of ``(batch, heads, queries, depth) x (batch, heads, keys, depth or columns)``."""

    batch: int
    heads: int
    queries: int
    keys: int
    depth: int
    columns: int

    @property
    def work(self) -> int:
        """Multiply-adds."""
        return self.batch * self.heads * self.queries * self.keys * (self.depth + self.columns)


def sizes_and_order(annotation: Sequence[Any]) -> tuple[Sizes, list[int]]:
    """What an annotation holds."""
    numbers = list(map(int, annotation))
    return Sizes(*numbers[:-4]), numbers[-4:]


@dataclass(frozen=True)
class Plan:
    """How attention is cut.

    Attributes:
        sizes: What is cut.
        cpu: The processor.
        rows: Queries of a block.
        keys: Keys of a chunk.
        lanes: Queries of a vector.
        value_lanes: Columns of a vector.
    """

    sizes: Sizes
    cpu: Cpu
    rows: int
    keys: int
    lanes: int
    value_lanes: int

    @property
    def is_single(self) -> bool:
        """Whether one chunk has all keys."""
        return self.keys >= self.sizes.keys

    @property
    def thread_bytes(self) -> int:
        """What a task keeps: queries, scores, the softmax's state, and sums of several chunks."""
        width = self.sizes.depth + self.keys + 2
        if not self.is_single:
            width += self.sizes.columns + 1
        return self.rows * width * 4

    def score_product(self, keys: int) -> tuple[Geometry, Tiling]:
        """How the scores of some keys are computed."""
        return _product(keys, self.sizes.depth, self.rows, self.lanes, self.cpu)

    def value_product(self, keys: int) -> tuple[Geometry, Tiling]:
        """How the values of some keys are weighted and summed."""
        return _product(self.rows, keys, self.sizes.columns, self.value_lanes, self.cpu)


def plan_attention(sizes: Sizes, cpu: Cpu) -> Plan:
    """The best cut.

    Raises:
        Misfit: Values do not fill vectors, or queries are so long that few of them fit the
            first-level cache: then copies of keys and values would pay, which are not made here.
    """
    lanes = cpu.vector_bytes // 4
    value_lanes = math.gcd(sizes.columns, lanes)
    if value_lanes * 8 < cpu.vector_bytes:
        raise Misfit("too few columns for a vector")
    if MIN_ROWS * max(sizes.depth, sizes.columns) * 4 > FIRST_CACHE_BYTES // 2:
        raise Misfit("too long queries")
    rows = _rows(sizes.queries, lanes)
    chunks = -(-sizes.keys // max(FIRST_CACHE_BYTES // (4 * rows), 1))
    return Plan(sizes, cpu, rows, -(-sizes.keys // chunks), lanes, value_lanes)


def _rows(queries: int, lanes: int) -> int:
    """Queries of a block: whole vectors, and as few as can be behind the last query."""
    most = -(-queries // lanes) * lanes
    choices = range(min(MIN_ROWS, most), min(MAX_ROWS, most) + 1, lanes)
    return min(choices, key=lambda rows: (-(-queries // rows) * rows, rows))


def _product(rows: int, depth: int, columns: int, lanes: int, cpu: Cpu) -> tuple[Geometry, Tiling]:
    """A product of ``rows x depth`` scalars with ``depth x columns`` in vectors."""
    plain = Geometry(
        batch=1, groups=1, channels=depth, blocks=columns // lanes, lanes=lanes, vectors=1,
        source_lanes=1, depthwise=0, height=1, width=rows, rows=1, columns=rows, kernel_rows=1,
        kernel_columns=1, row_step=1, column_step=1, row_reach=1, column_reach=1, top=0, left=0,
    )  # fmt: skip
    cuts = [
        (geometry, choose_tiling(geometry, cpu.untuned, False))
        for geometry in panels_of(plain)
        if plain.blocks % geometry.vectors == 0
    ]
    return min(cuts, key=lambda cut: shared_cycles(*cut))
