"""Inline spatial blocks into their readers wherever recomputing costs no more than a buffer."""

from __future__ import annotations

from typing import Any

import tvm
import tvm_ffi
from hybridc.targets.llvm.schedules.blocks import (
    axes_of,
    blocks_of,
    changed,
    collect,
    cost_of,
    is_reduction,
    is_spatial,
    loads_of,
    same_variables,
    store_of,
    work_of,
)
from hybridc.targets.llvm.sizes import ranges_of
from tvm import tirx
from tvm.s_tir import SBlock, Schedule

MAX_COST = 200
"""No block grows beyond this cost; chains of diamonds would otherwise grow exponentially."""

CHEAP_COST = 4
"""A block of at most this cost is recomputed at every read rather than stored."""


def inline_spatial_blocks(schedule: Schedule, keep: tuple[str, ...] = ()) -> None:
    """Inline every spatial block that is not an output where that saves a buffer.

    Args:
        schedule: Changed in place.
        keep: Names of blocks to leave alone.
    """
    # Readers first: two of them that become one block then read an element together.
    for block in reversed(blocks_of(schedule)):
        if schedule.get(block).name_hint not in keep and _worth_inlining(schedule, block):
            try:
                schedule.compute_inline(block)
            except RuntimeError:
                continue


def simplify_indices(schedule: Schedule) -> Schedule:
    """The schedule with divisions in indices simplified by the ranges of the blocks' axes.

    A tensor that was reshaped, transposed and reshaped again is read at quotients of sums, which
    are mostly axes and sums of these; and only then are neighbors seen to be neighbors.
    """
    function = schedule.mod["main"]
    body = tvm_ffi.structural_map(function.body, (SBlock, _simplified))
    if body.same_as(function.body):
        return schedule
    return Schedule(tvm.IRModule({"main": function.with_body(body)}))


def _simplified(block: SBlock) -> SBlock:
    analyzer = tvm.sym.Analyzer()
    for axis in block.iter_vars:
        analyzer.bind(axis.var, axis.dom)

    def simplify(load: tvm.ir.TensorLoad) -> Any:
        if not any(collect(index, tirx.FloorDiv, tirx.FloorMod) for index in load.indices):
            return load
        return tirx.BufferLoad(load.source, [analyzer.simplify(i) for i in load.indices])

    body = tvm_ffi.structural_map(block.body, (tvm.ir.TensorLoad, simplify))
    if not block.iter_vars or body.same_as(block.body):
        return block
    return changed(block, body=body)


def _worth_inlining(schedule: Schedule, block: Any) -> bool:
    node = schedule.get(block)
    store = store_of(node)
    consumers = [schedule.get(consumer) for consumer in schedule.get_consumers(block)]
    if not is_spatial(node) or store is None or not consumers:
        return False
    cost, reads = cost_of(node), 0
    ranges = ranges_of(schedule.mod["main"])
    for consumer in consumers:
        if not (is_spatial(consumer) or is_reduction(consumer)):
            return False
        loads = [load for load in loads_of(consumer) if load.source.same_as(store.buffer)]
        if len(loads) * cost + cost_of(consumer) > MAX_COST:
            return False
        reads += _distinct(loads) * work_of(consumer, ranges)
    cheap = cost <= CHEAP_COST and all(map(is_spatial, consumers))
    return cheap or _is_copy(node) or reads <= work_of(node, ranges)


def _is_copy(node: Any) -> bool:
    """Whether a block copies a tensor as it is, such as padding by nothing."""
    store, axes = store_of(node), axes_of(node)
    if store is None or not isinstance(store.value, tvm.ir.TensorLoad):
        return False
    return all(same_variables(access.indices, axes) for access in (store, store.value))


def _distinct(loads: list[Any]) -> int:
    """Number of different elements that the loads read; LLVM computes equal ones once."""
    kept: list[Any] = []
    for load in loads:
        if not any(tvm_ffi.structural_equal(load.indices, other.indices) for other in kept):
            kept.append(load)
    return len(kept)
