"""Matrix products with known weights, which were packed at compile time.

A product of ``rows x K`` data is a pointwise convolution of ``rows`` pixels whose channels are
neighbors in memory, in the data as in the result. It is written by the emitter of blocked
convolutions: a register tile of some rows times the vectors of one panel of columns, panels packed
as ``(panel, K, columns)``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hybridc.targets.llvm.cpu import Cpu
from hybridc.targets.llvm.schedules.blocked_convolution import operands_of
from hybridc.targets.llvm.schedules.blocked_tiles import Geometry, choose_tiling
from hybridc.targets.llvm.schedules.blocks import store_of
from hybridc.targets.llvm.schedules.emitter import Emitter
from hybridc.targets.llvm.schedules.extents import Extents, number
from hybridc.targets.llvm.schedules.finishing import finish_of
from hybridc.targets.llvm.schedules.statements import index
from hybridc.targets.llvm.schedules.written import annotated_anchor, schedule_around
from tvm import tirx
from tvm.s_tir import Schedule

PRODUCT = "hybridc.packed_product"
"""Annotation of a block that computes a product with packed weights: the fields of its Geometry."""


def schedule_packed_product(schedule: Schedule, cpu: Cpu) -> Schedule:
    """Schedule a function around one product with packed weights.

    Raises:
        Misfit: The function is not of this kind.
    """
    anchor, sizes = annotated_anchor(schedule, PRODUCT)
    geometry = Geometry(*sizes)
    return schedule_around(schedule, cpu, anchor, lambda final: _nest(geometry, cpu, anchor, final))


def _nest(geometry: Geometry, cpu: Cpu, anchor: Any, final: Any | None) -> Any:
    g = geometry
    store: Any = store_of(anchor)
    data, weight = operands_of(anchor)
    outer, rows = list(map(number, store.buffer.shape[:-2])), number(store.buffer.shape[-2])

    def place(indices: Sequence[Any], lane: Any) -> Sequence[Any]:
        image, block, *_, row = indices
        return [*matrix_of(outer, image), row, block * g.lanes + lane]

    whole = finish_of(store, final, place)

    def finish(indices: Sequence[Any], accumulator: Any, lanes: int) -> Any:
        last, rest = divmod(g.filters, lanes)
        vector = whole(indices, accumulator, lanes)
        if not rest:
            return vector
        return tirx.IfThenElse(indices[1] < last, vector, whole(indices, accumulator, rest))

    extents = Extents(math.prod(outer), 1, rows, 1, rows)
    tiling = choose_tiling(g, cpu, extents.is_fixed, extents.is_fixed)
    dtype = str(store.buffer.dtype)
    return _Rows(g, tiling, data, weight, finish, dtype, extents=extents).nest()


def matrix_of(outer: Sequence[Any], image: Any) -> list[Any]:
    """Indices of matrix number ``image`` among those along the outer axes of these sizes."""
    found = []
    for size in reversed(outer):
        found.append(tirx.floormod(image, index(size)))
        image = tirx.floordiv(image, index(size))
    return found[::-1]


@dataclass(frozen=True)
class _Rows(Emitter):
    """Reads data whose last axis holds the channels of one row."""

    def place(self, first: Any, second: Any, row: Any, column: Any, *rest: Any) -> list[Any]:
        """Indices of the element ``(column, second)`` of matrix number ``first``."""
        return [*matrix_of(list(map(number, self.data.shape[:-2])), first), column, second]
