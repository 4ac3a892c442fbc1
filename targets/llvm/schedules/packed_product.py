"""Matrix products with known weights, which were packed at compile time.

A product of ``rows x K`` data is a pointwise convolution of ``rows`` pixels whose channels are
neighbors in memory, in the data as in the result. It is written by the emitter of blocked
convolutions: a register tile of some rows times the vectors of one panel of columns, panels packed
as ``(panel, K, columns)``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hybridc.targets.llvm.cpu import Cpu
from hybridc.targets.llvm.schedules.blocked_convolution import operands_of
from hybridc.targets.llvm.schedules.blocked_tiles import Geometry, choose_tiling
from hybridc.targets.llvm.schedules.blocks import store_of
from hybridc.targets.llvm.schedules.emitter import Emitter
from hybridc.targets.llvm.schedules.finishing import finish_of
from hybridc.targets.llvm.schedules.statements import int64
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
    outer = [int64(0)] * (len(store.buffer.shape) - 2)

    def place(indices: Sequence[Any], lane: Any) -> Sequence[Any]:
        _, block, *_, row = indices
        return [*outer, row, block * g.lanes + lane]

    whole = finish_of(store, final, place)

    def finish(indices: Sequence[Any], accumulator: Any, lanes: int) -> Any:
        last, rest = divmod(g.filters, lanes)
        vector = whole(indices, accumulator, lanes)
        if not rest:
            return vector
        return tirx.IfThenElse(indices[1] < last, vector, whole(indices, accumulator, rest))

    tiling = choose_tiling(g, cpu, True)
    return _Rows(g, tiling, data, weight, finish, str(store.buffer.dtype)).nest()


@dataclass(frozen=True)
class _Rows(Emitter):
    """Reads data whose last axis holds the channels of one row."""

    def place(self, first: Any, second: Any, row: Any, column: Any, *rest: Any) -> list[Any]:
        """Indices of the element ``(column, second)`` of the matrix; all other axes have size 1."""
        return [int64(0)] * (len(self.data.shape) - 2) + [column, second]
