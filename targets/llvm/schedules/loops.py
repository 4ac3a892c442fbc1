"""Loop transformations that several rules share: vectors, parallel outer loops, tiles."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tvm
from hybridc.targets.fitting import Misfit
from hybridc.targets.llvm.cpu import Cpu
from hybridc.targets.llvm.schedules.blocks import (
    collect,
    cost_of,
    loads_of,
    realize_of,
    strides_of,
)
from hybridc.targets.llvm.schedules.tails import mark_tile, substitute
from hybridc.targets.llvm.sizes import ranges_of, typical_size
from tvm.s_tir import Schedule

PARALLEL_WORK = 20_000
"""Scalar operations below which a parallel launch costs more than it saves."""

PARALLEL_TASKS = 64
"""Iterations that a parallel loop should have, so that few or many threads share it evenly."""


def extent(schedule: Schedule, loop: Any) -> int:
    """Constant extent of a loop.

    Raises:
        Misfit: The extent is symbolic.
    """
    value = schedule.get(loop).extent
    if not isinstance(value, tvm.tirx.IntImm):
        raise Misfit("symbolic extent")
    return int(value)


def typical_extent(schedule: Schedule, loop: Any) -> int:
    """Extent of a loop, for typical sizes where it is not known."""
    value = schedule.get(loop).extent
    if isinstance(value, tvm.tirx.IntImm):
        return int(value)
    return typical_size(value, ranges_of(schedule.mod["main"]))


def known_extent(schedule: Schedule, loop: Any) -> int | None:
    """Constant extent of a loop, or ``None``."""
    value = schedule.get(loop).extent
    return int(value) if isinstance(value, tvm.tirx.IntImm) else None


def lanes_of(schedule: Schedule, block: Any, cpu: Cpu) -> int:
    """Elements of the block's widest type that one vector register holds."""
    node = schedule.get(block)
    stores = collect(node.body, tvm.tirx.BufferStore)
    buffers = [load.source for load in loads_of(node)] + [store.buffer for store in stores]
    widest = max(max(tvm.DataType(str(buffer.dtype)).bits, 8) for buffer in buffers)
    return max(cpu.vector_bytes * 8 // int(widest), 1)


def power_of_two_below(number: int) -> int:
    """The largest power of two that is at most ``number`` (at least 1)."""
    return 1 << (max(number, 1).bit_length() - 1)


def loop_strides(schedule: Schedule, block: Any, loops: Sequence[Any]) -> list[list[int] | None]:
    """Strides along ``loops`` of the block's stores, then of its loads; see ``strides_of``."""
    node, realize = schedule.get(block), realize_of(schedule, block)
    binding = {
        axis.var: value for axis, value in zip(node.iter_vars, realize.iter_values, strict=True)
    }
    variables = [schedule.get(loop).loop_var for loop in loops]
    accesses = [(s.buffer, s.indices) for s in collect(node.body, tvm.tirx.BufferStore)]
    accesses += [(load.source, load.indices) for load in loads_of(node)]
    return [
        strides_of(buffer, [substitute(index, binding) for index in indices], variables, True)
        for buffer, indices in accesses
    ]


def fuse_parallel(schedule: Schedule, loops: Sequence[Any], operations: float) -> Any | None:
    """Run the product of the outer ``loops`` on all threads, if there is enough to do.

    Fuses as few of the loops as give every thread a fair share, because an index of fused loops
    is taken apart by divisions in every iteration.

    Returns:
        The parallel loop, or ``None`` if everything stays serial.
    """
    if operations < PARALLEL_WORK or not loops:
        return None
    chosen, tasks = [], 1
    for loop in loops:
        if tasks >= PARALLEL_TASKS:
            break
        chosen.append(loop)
        tasks *= typical_extent(schedule, loop)
    if tasks == 1:
        return None
    fused = schedule.fuse(*chosen) if len(chosen) > 1 else chosen[0]
    schedule.parallel(fused)
    return fused


@dataclass(frozen=True)
class VectorTile:
    """A loop cut into tiles of a few vectors.

    Attributes:
        outer: The loop over tiles.
        inside: Loops over the vectors of a tile (unrolled) and their lanes (vectorized).
    """

    outer: Any
    inside: tuple[Any, ...]


def tile_vectors(
    schedule: Schedule, loop: Any, lanes: int, max_vectors: int = 1, may_be_cut: bool = True
) -> VectorTile | None:
    """Cut a loop into tiles of at most ``max_vectors`` vectors, vectorized and unrolled.

    Args:
        schedule: Changed in place.
        loop: The loop.
        lanes: Elements of a vector, at most.
        max_vectors: Vectors of a tile, at most.
        may_be_cut: Whether the tiles need not divide the axis; see ``blocks.may_repeat``.

    Returns:
        The loops, or ``None`` if the loop is too short for a vector; then nothing was changed.
    """
    if known_extent(schedule, loop) is None:
        return _tile_open(schedule, loop, lanes) if may_be_cut else None
    size = extent(schedule, loop)
    lanes = min(lanes, power_of_two_below(size))
    if not may_be_cut:
        lanes, max_vectors = math.gcd(lanes, size), 1
    if lanes < 2:
        return None
    fitting = range(1, min(max_vectors, size // lanes) + 1)
    vectors = min(fitting, key=lambda n: (-(-size // (n * lanes)) * n, -n))
    inside = (vectors, lanes) if vectors > 1 else (lanes,)
    outer, *loops = schedule.split(loop, [None, *inside])
    finish_tile(schedule, loops, is_cut=size % (vectors * lanes) != 0)
    return VectorTile(outer, tuple(loops))


def _tile_open(schedule: Schedule, loop: Any, lanes: int) -> VectorTile | None:
    """Cut a loop whose extent is not known into vectors."""
    if typical_extent(schedule, loop) < 2 * lanes or lanes < 2:
        return None
    outer, inner = schedule.split(loop, [None, lanes])
    finish_tile(schedule, [inner])
    return VectorTile(outer, (inner,))


def finish_tile(schedule: Schedule, inside: Sequence[Any], is_cut: bool = True) -> None:
    """Vectorize the innermost of a tile's loops and unroll the others.

    They are marked as the inside of a tile if the tile may be cut by the end of its axis.
    """
    if is_cut:
        mark_tile(schedule, *inside)
    schedule.vectorize(inside[-1])
    for loop in inside[:-1]:
        schedule.unroll(loop)


def operations_of(schedule: Schedule, block: Any) -> int:
    """Rough number of scalar operations of all iterations of the block."""
    loops = schedule.get_loops(block)
    return math.prod(typical_extent(schedule, loop) for loop in loops) * cost_of(
        schedule.get(block)
    )
