"""Convolutions whose output is blocked: ``(batch, channels / c, height, width, c)``.

With c the lanes of a vector register, one vector holds c channels of one pixel. A register tile
holds some pixels times the vectors of one panel of filters. For every input channel and kernel
position it loads the panel's weights as contiguous vectors, which were packed at compile time in
the order in which they are used, and multiplies each with the input's scalars, broadcast from
memory. Strides cost nothing, padding is left out rather than read, and the tile is finished (bias,
activation, sum with another tensor) before it leaves the registers.

A depthwise convolution is the same with vectors of the input instead of broadcast scalars.

The loops are written out as statements, not made by schedule primitives: the tiles at the borders
are code of their own, which no primitive expresses.
"""

from __future__ import annotations

from typing import Any

from hybridc.targets.fitting import Misfit
from hybridc.targets.llvm.cpu import Cpu
from hybridc.targets.llvm.schedules.blocked_tiles import (
    BLOCKED,
    Geometry,
    choose_tiling,
)
from hybridc.targets.llvm.schedules.blocks import loads_of, store_of
from hybridc.targets.llvm.schedules.emitter import Emitter
from hybridc.targets.llvm.schedules.extents import blocked_extents
from hybridc.targets.llvm.schedules.finishing import (
    blocks_of_result,
    finish_of,
    lane_last,
    may_fold,
    moved_place,
)
from hybridc.targets.llvm.schedules.written import annotated_anchor, schedule_around
from tvm import tirx
from tvm.s_tir import Schedule


def schedule_blocked_convolution(schedule: Schedule, cpu: Cpu) -> Schedule:
    """Schedule a function around one blocked convolution.

    Raises:
        Misfit: The function is not of this kind.
    """
    anchor, sizes = annotated_anchor(schedule, BLOCKED)
    geometry = Geometry(*sizes)
    moves = blocks_of_result(store_of(anchor))
    return schedule_around(
        schedule, cpu, anchor, lambda final: _nest(geometry, cpu, anchor, final), moves=moves
    )


def _nest(geometry: Geometry, cpu: Cpu, anchor: Any, final: Any | None) -> Any:
    store: Any = store_of(anchor)
    data, weight = operands_of(anchor)
    plain = geometry.source_lanes == 1
    extents = blocked_extents(
        [data.shape[0], *(data.shape[2:] if plain else data.shape[2:-1])],
        [store.buffer.shape[0], *store.buffer.shape[2:-1]],
    )
    folds = extents.is_fixed or extents.keeps_plane
    tiling = choose_tiling(geometry, cpu, folds and may_fold(final, store), extents.is_fixed)
    place = moved_place(final, store, blocks_of_result(store)) or lane_last
    finish, dtype = finish_of(store, final, place), str(store.buffer.dtype)
    return Emitter(geometry, tiling, data, weight, finish, dtype, extents=extents).nest()


def operands_of(anchor: Any) -> tuple[Any, Any]:
    """The buffers of data and packed weights.

    Raises:
        Misfit: The block does not sum products.
    """
    store: Any = store_of(anchor)
    product = store.value.b
    sources = [load.source for load in loads_of(anchor) if not load.source.same_as(store.buffer)]
    if len(sources) != 2 or not isinstance(product, tirx.Mul):
        raise Misfit("not a sum of products")
    weight = product.b.source
    (data,) = (source for source in sources if not source.same_as(weight))
    return data, weight
