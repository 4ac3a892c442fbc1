"""How a register tile of a blocked convolution is finished before it leaves the registers.

The block that alone reads the convolution (bias, activation, sum with another tensor) is evaluated
on one vector of accumulators at a time and stores where that block stores.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tvm
import tvm_ffi
from hybridc.targets.llvm.schedules.blocks import (
    axes_of,
    collect,
    loads_of,
    same_size,
    store_of,
)
from hybridc.targets.llvm.schedules.layouts import IN_BLOCKS, LAST, is_move
from hybridc.targets.llvm.schedules.tails import substitute
from tvm import tirx

Finish = Callable[[Sequence[Any], Any, int], Any]
"""``(indices without the lane, accumulator, lanes)`` to the statement that stores a vector."""


Place = Callable[[Sequence[Any], Any], Sequence[Any]]
"""``(indices without the lane, lane)`` to the indices of a result."""


Vectors = tuple[str, int]
"""Layout of an anchor's result, and how many channels its vectors hold, which are neighbors."""


def lane_last(indices: Sequence[Any], lane: Any) -> Sequence[Any]:
    """The place of a result in a blocked tensor."""
    return [*indices, lane]


def finish_of(store: Any, final: Any | None, place: Place = lane_last) -> Finish:
    """How a vector of results is finished.

    Args:
        store: The store of the anchor's block.
        final: The block that alone reads the result, or ``None``.
        place: Where a result is.
    """
    if final is None:

        def copy(indices: Sequence[Any], accumulator: Any, lanes: int) -> Any:
            lane = tirx.Var("lane", "int64")
            value = tirx.BufferLoad(accumulator, [lane])
            body = tirx.BufferStore(store.buffer, value, place(indices, lane))
            return _vectorized(lane, lanes, body)

        return copy
    axes = axes_of(final)
    target: Any = store_of(final)

    def finish(indices: Sequence[Any], accumulator: Any, lanes: int) -> Any:
        lane = tirx.Var("lane", "int64")
        at = place(indices, lane)
        mapping = dict(zip(axes, at, strict=True))

        def replace(load: Any) -> Any:
            if load.source.same_as(store.buffer):
                return tirx.BufferLoad(accumulator, [lane])
            return load

        value = tvm_ffi.structural_map(target.value, [(tvm.ir.TensorLoad, replace)])
        value = substitute(value, mapping)
        body = tirx.BufferStore(target.buffer, value, at)
        return _vectorized(lane, lanes, body)

    return finish


def _vectorized(lane: Any, lanes: int, body: Any) -> Any:
    first, count = (tirx.IntImm("int64", value) for value in (0, lanes))
    return tirx.For(lane, first, count, tirx.ForKind.VECTORIZED, body)


def moved_place(final: Any | None, store: Any, before: Vectors) -> Place | None:
    """Where a block that finishes an anchor has a result, if that is in another layout.

    Args:
        final: The block, or ``None``.
        store: The store of the anchor's block.
        before: Layout of the anchor's result, and the channels of its vectors.
    """
    if final is None or not reads_moved(final, store, before):
        return None
    layout, lanes = before
    if layout == LAST:

        def in_blocks(indices: Sequence[Any], lane: Any) -> Sequence[Any]:
            image, row, column, first = indices
            return [image, tirx.floordiv(first, lanes), row, column, lane]

        return in_blocks

    def last(indices: Sequence[Any], lane: Any) -> Sequence[Any]:
        image, block, row, column = indices
        return [image, row, column, block * lanes + lane]

    return last


def reads_moved(final: Any, store: Any, before: Vectors) -> bool:
    """Whether a block reads an anchor's result in the other of the layouts LAST and IN_BLOCKS."""
    loads = [load for load in loads_of(final) if load.source.same_as(store.buffer)]
    layout, lanes = before
    after = IN_BLOCKS if layout == LAST else LAST
    return bool(loads) and is_move(loads, final.iter_vars, layout, after, lanes)


def blocks_of_result(store: Any) -> Vectors:
    """The vectors of a result whose channels are in blocks."""
    return IN_BLOCKS, int(store.buffer.shape[-1])


def may_fold(final: Any | None, store: Any) -> bool:
    """Whether pixels of an anchor's result may be counted in one row.

    All loads of the final block must use both spatial axes as the output does, or neither.
    """
    if final is None:
        return True
    if reads_moved(final, store, blocks_of_result(store)):
        return _reads_only_channels(final, store)
    _, _, *spatial, _ = axes_of(final)
    plane = list(store.buffer.shape[2:-1])
    for load in loads_of(final):
        if not any(_among(index, spatial) for index in load.indices):
            continue
        between = list(load.indices[2:-1])
        sizes = list(load.source.shape[2:-1])
        if len(sizes) != len(plane) or not all(map(same_size, sizes, plane)):
            return False
        if not all(index.same_as(axis) for index, axis in zip(between, spatial, strict=True)):
            return False
    body: Any = store_of(final)
    uses = [v for v in collect(body.value, tirx.Var) if _among(v, spatial)]
    inside = [v for load in loads_of(final) for i in load.indices for v in collect(i, tirx.Var)]
    return len(uses) <= len([v for v in inside if _among(v, spatial)])


def _reads_only_channels(final: Any, store: Any) -> bool:
    """Whether what a block with the channels last reads beside the anchor has no spatial axes."""
    _, *spatial, _ = axes_of(final)
    others = [load for load in loads_of(final) if not load.source.same_as(store.buffer)]
    return not any(
        _among(v, spatial) for load in others for i in load.indices for v in collect(i, tirx.Var)
    )


def _among(variable: Any, others: Sequence[Any]) -> bool:
    return any(variable.same_as(other) for other in others)
