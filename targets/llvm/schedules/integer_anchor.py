"""What schedules of integer products share: they find the anchor, its operands and its finish."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from hybridc.targets.fitting import Misfit
from hybridc.targets.llvm.cpu import Cpu
from hybridc.targets.llvm.schedules.blocks import loads_of, store_of
from hybridc.targets.llvm.schedules.finishing import Finish, finish_of, moved_place
from hybridc.targets.llvm.schedules.integer_steps import ramp
from hybridc.targets.llvm.schedules.integer_tiles import Geometry
from hybridc.targets.llvm.schedules.layouts import LAST
from hybridc.targets.llvm.schedules.statements import int64, sequence
from hybridc.targets.llvm.schedules.written import annotated_anchor, schedule_around
from tvm import tirx
from tvm.s_tir import Schedule

Nest: TypeAlias = Callable[[Geometry, Any, Any, Any, Finish], Any]
"""Writes the loops of a kernel, given the buffers of data, packed weights and output."""


def schedule_integer(schedule: Schedule, cpu: Cpu, attribute: str, nest: Nest) -> Schedule:
    """Schedule a function around one integer product.

    Args:
        schedule: Of the function.
        cpu: The processor.
        attribute: Of the product's block; holds a :class:`Geometry`.
        nest: Writes the product's loops.

    Raises:
        Misfit: The function is not of this kind.
    """
    anchor, sizes = annotated_anchor(schedule, attribute)
    geometry = Geometry(*sizes)
    vectors = LAST, geometry.lanes

    def write(final: Any | None) -> Any:
        store: Any = store_of(anchor)
        data, weight = _operands(anchor, store)
        moved = moved_place(final, store, vectors)
        finish = finish_of(store, final, moved or _at_lane)
        if moved is not None:
            finish = _one_by_one(finish, geometry.lanes)
        return nest(geometry, data, weight, store.buffer, finish)

    return schedule_around(schedule, cpu, anchor, write, repeats=True, moves=vectors)


def _operands(anchor: Any, store: Any) -> tuple[Any, Any]:
    """The buffers of data and packed weights."""
    sources = [load.source for load in loads_of(anchor) if not load.source.same_as(store.buffer)]
    weights = [source for source in sources if len(source.shape) == 5]
    others = [source for source in sources if len(source.shape) != 5]
    if len(sources) != 2 or len(weights) != 1:
        raise Misfit("not data and packed weights")
    return others[0], weights[0]


def _one_by_one(finish: Finish, lanes: int) -> Finish:
    """Finish several vectors one after the other."""

    def each(indices: Sequence[Any], accumulator: Any, width: int) -> Any:
        *front, first = indices
        statements: list[Any] = []
        for offset in range(0, width, lanes):
            part = tirx.decl_buffer((lanes,), str(accumulator.dtype), "part")
            value = tirx.BufferLoad(accumulator, [ramp(int64(offset), lanes)])
            statements.append(tirx.AllocBuffer(part))
            statements.append(tirx.BufferStore(part, value, [ramp(int64(0), lanes)]))
            statements.append(finish([*front, first + offset], part, lanes))
        return sequence(statements)

    return each


def _at_lane(indices: Sequence[Any], lane: Any) -> Sequence[Any]:
    """The place of a result in a tensor whose last axis holds all filters."""
    *front, first = indices
    return [*front, first + lane]
