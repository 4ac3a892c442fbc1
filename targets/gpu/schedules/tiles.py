"""The rule for products: matrix products and convolutions in tiles, through shared memory.

A sum of products is brought into the form

    C[b, m, n] = sum over k of A[b, m, k] * B[b, n, k]

where b are the axes that both factors have, m those of the left one, n those of the right one, each
fused to one axis, and n is the side of the output's last axis. So a convolution becomes a matrix
product whose right factor is gathered from the image while it is fetched. The axes are padded to
whole tiles: the fetch fills up with zeros, and only results that exist are written.

A block of 16 x 16 threads computes one tile of C. Step by step along k it fetches tiles of A and B
to shared memory, and each thread adds to its results in registers. Results of neighboring threads
are neighbors in memory. What follows the product is computed on the registers.

    barrier, fetch A and B, barrier, multiply        no thread leaves the loop before the others
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hybridc.targets.gpu.limits import Limits
from hybridc.targets.llvm.schedules.blocks import (
    axes_of,
    blocks_of,
    extents_of,
    is_reduction,
    is_spatial,
    loads_of,
    store_of,
    strides_of,
)
from hybridc.targets.llvm.schedules.loops import Misfit
from tvm import tirx
from tvm.s_tir import Schedule

SIDE = 16
"""Threads along each side of a block."""

DEPTH = 16
"""Products that one fetch is good for."""

TILES = (128, 64, 32, 16)
"""Sides of a tile; the first that gives every multiprocessor work is taken."""

ENOUGH_BLOCKS = 128

MIN_EXTENT = 8
"""Products with a shorter side are left to other rules."""


@dataclass(frozen=True)
class _Axes:
    """The block's axes by what they belong to, each a position among its axes."""

    extents: tuple[int, ...]
    both: tuple[int, ...]
    left: tuple[int, ...]
    right: tuple[int, ...]
    reduced: tuple[int, ...]

    def size(self, axes: Sequence[int]) -> int:
        return math.prod(self.extents[axis] for axis in axes)

    def fused(self, values: dict[int, Any], axes: Sequence[int]) -> Any:
        """One index out of those of several axes; axes that have no value are of extent 1."""
        index: Any = tirx.IntImm("int64", 0)
        for axis in axes:
            if axis in values:
                index = index * self.extents[axis] + values[axis]
        return index


def schedule_tiles(schedule: Schedule, limits: Limits) -> Schedule:
    """Schedule a function around one product; changes and returns the schedule.

    Raises:
        Misfit: There is no product in it, another reduction, or too little to share.
    """
    main = _only_product(schedule)
    _check_limits(limits)
    transposed = _right_along_depth(schedule, main)
    left, right = _normalize(schedule, main, transposed)
    tile = _tile(schedule, main)
    schedule.pad_einsum(main, [1, tile, tile, DEPTH])
    if tile > SIDE:
        _by_thread(schedule, main, tile)
    step, thread = _bind(schedule, main, tile)
    result = schedule.cache_write(main, 0, "local")
    schedule.reverse_compute_at(result, thread, preserve_unit_loops=True)
    for operand, padded in ((left, True), (right, transposed)):
        _fetch(schedule, main, operand, step, padded)
    _inline_readers(schedule, result)
    schedule.decompose_reduction(main, step)
    _check_complete(schedule)
    return schedule


def _check_limits(limits: Limits) -> None:
    shared = 2 * TILES[0] * (DEPTH + 1) * 4
    if limits.threads < SIDE * SIDE or limits.shared_bytes < shared:
        raise Misfit("a block of threads is too large")


def _only_product(schedule: Schedule) -> Any:
    """The only reduction, if it sums products of two tensors."""
    found = [block for block in blocks_of(schedule) if is_reduction(schedule.get(block))]
    if len(found) != 1:
        raise Misfit("not one reduction")
    node = schedule.get(found[0])
    store = store_of(node)
    if store is None or extents_of(node) is None or len(node.reads) != 2:
        raise Misfit("not a static reduction of two tensors")
    if not isinstance(store.value, tirx.Add) or not isinstance(store.value.b, tirx.Mul):
        raise Misfit("not a sum of products")
    if str(store.value.ty.dtype) not in ("float32", "int32"):
        raise Misfit("a type that is not tiled")
    return found[0]


def _right_along_depth(schedule: Schedule, main: Any) -> bool:
    """Whether neighbors in memory of the right factor lie along the summands."""
    node = schedule.get(main)
    operands = _operands(node)
    last = max(i for i, axis in enumerate(node.iter_vars) if axis.iter_type == tirx.IterVar.DataPar)
    for load in operands:
        strides = strides_of(load.source, load.indices, axes_of(node))
        if strides is None:
            return False
        if strides[last]:
            return strides[last] != 1
    return False


def _operands(node: Any) -> list[Any]:
    store = store_of(node)
    assert store is not None
    return [load for load in loads_of(node) if not load.source.same_as(store.buffer)]


def _normalize(schedule: Schedule, main: Any, transposed: bool) -> tuple[str, str]:
    """Bring the product into its form; returns the names of the factors' new buffers' blocks."""
    names = []
    for index in range(2):
        names.append(schedule.get(schedule.reindex(main, ("read", index))).name_hint)
    result = schedule.reindex(main, ("write", 0))
    node = schedule.get(main)
    positions = [_positions(node, region.source) for region in node.reads]
    axes = _classify(node, positions)
    if not _has(axes, positions[1], axes.right):
        names.reverse()
        positions.reverse()
    forms = ((axes.left, False), (axes.right, not transposed))
    for name, place, (own, depth_first) in zip(names, positions, forms, strict=True):
        _lay_out(schedule, name, axes, place, own, depth_first)
    written = _positions(node, node.writes[0].source)
    schedule.transform_layout(
        result, ("read", 0), _map(axes, written, (axes.both, axes.left, axes.right))
    )
    everything = list(range(len(axes.extents)))
    groups = (axes.both, axes.left, axes.right, axes.reduced)
    schedule.transform_block_layout(main, _map(axes, everything, groups))
    return names[0], names[1]


def _lay_out(
    schedule: Schedule, name: str, axes: _Axes, place: list[int], own: Any, depth_first: bool
) -> None:
    inner = (axes.reduced, own) if depth_first else (own, axes.reduced)
    block = schedule.get_sblock(name)
    schedule.transform_layout(block, ("write", 0), _map(axes, place, (axes.both, *inner)))


def _map(axes: _Axes, place: Sequence[int], groups: Sequence[Sequence[int]]) -> Any:
    """An index map from the axes at ``place`` to one index for each group."""

    def function(*indices: Any) -> list[Any]:
        values = dict(zip(place, indices, strict=True))
        return [axes.fused(values, group) for group in groups]

    return tirx.IndexMap.from_func(function, ndim=len(place), index_dtype="int64")


def _positions(node: Any, buffer: Any) -> list[int]:
    """Which axis each index of a reindexed buffer is."""
    accesses = [load.indices for load in loads_of(node) if load.source.same_as(buffer)]
    variables = axes_of(node)
    found = []
    for index in accesses[0]:
        same = [i for i, variable in enumerate(variables) if index.same_as(variable)]
        if len(same) != 1:
            raise Misfit("a factor is read by no plain index")
        found.append(same[0])
    return found


def _has(axes: _Axes, place: Sequence[int], wanted: Sequence[int]) -> bool:
    return all(axis in place or axes.extents[axis] == 1 for axis in wanted)


def _classify(node: Any, positions: Sequence[Sequence[int]]) -> _Axes:
    """Sort the axes; the right factor is the one that has the last axis of the results."""
    extents = tuple(extents_of(node) or ())
    kinds = [axis.iter_type for axis in node.iter_vars]
    groups: dict[tuple[bool, bool], list[int]] = {}
    reduced = []
    for axis, kind in enumerate(kinds):
        owners = (axis in positions[0], axis in positions[1])
        if kind == tirx.IterVar.CommReduce:
            if extents[axis] > 1 and not all(owners):
                raise Misfit("a summand's axis that one factor lacks")
            reduced.append(axis)
        elif extents[axis] > 1 and not any(owners):
            raise Misfit("an axis that no factor has")
        else:
            groups.setdefault(owners if extents[axis] > 1 else (True, True), []).append(axis)
    sides = [tuple(groups.get(key, ())) for key in ((True, False), (False, True))]
    left, right = sorted(sides, key=lambda side: max(side, default=-1))
    axes = _Axes(extents, tuple(groups.get((True, True), ())), left, right, tuple(reduced))
    if min(axes.size(axes.left), axes.size(axes.right), axes.size(axes.reduced)) < MIN_EXTENT:
        raise Misfit("too little to share")
    return axes


def _tile(schedule: Schedule, main: Any) -> int:
    batch, rows, columns, _ = extents_of(schedule.get(main)) or (1, 1, 1, 1)
    for side in TILES[:-1]:
        if batch * math.ceil(rows / side) * math.ceil(columns / side) >= ENOUGH_BLOCKS:
            return side
    return TILES[-1]


def _by_thread(schedule: Schedule, main: Any, tile: int) -> None:
    """Split rows and columns into axes of their own: tile, number in the thread, thread.

    A thread's results lie apart. Only with an axis for the thread does TVM see which they are.
    """

    def split(index: Any) -> list[Any]:
        return [index // tile, index % tile // SIDE, index % SIDE]

    def block(batch: Any, row: Any, column: Any, depth: Any) -> list[Any]:
        return [batch, *split(row), *split(column), depth]

    def results(batch: Any, row: Any, column: Any) -> list[Any]:
        return [batch, *split(row), *split(column)]

    for_block = tirx.IndexMap.from_func(block, ndim=4, index_dtype="int64")
    schedule.transform_block_layout(main, for_block)
    for_results = tirx.IndexMap.from_func(results, ndim=3, index_dtype="int64")
    schedule.transform_layout(main, ("write", 0), for_results)


def _bind(schedule: Schedule, main: Any, tile: int) -> tuple[Any, Any]:
    """Split and bind the loops; returns the loop over fetches and the innermost of the threads."""
    loops = list(schedule.get_loops(main))
    if tile == SIDE:
        batch, rows, columns, depth = loops
        row_block, row, row_thread = schedule.split(rows, [None, 1, SIDE])
        column_block, column, column_thread = schedule.split(columns, [None, 1, SIDE])
    else:
        batch, row_block, row, row_thread, column_block, column, column_thread, depth = loops
    step, inner = schedule.split(depth, [None, DEPTH])
    grid = (batch, row_block, column_block)
    schedule.reorder(*grid, row_thread, column_thread, step, inner, row, column)
    schedule.bind(schedule.fuse(*grid), "blockIdx.x")
    schedule.bind(row_thread, "threadIdx.y")
    schedule.bind(column_thread, "threadIdx.x")
    schedule.annotate(column_thread, "pragma_auto_unroll_max_step", 1024)
    schedule.annotate(column_thread, "pragma_unroll_explicit", 0)
    for loop in (row, column):
        schedule.unroll(loop)
    return step, column_thread


def _fetch(schedule: Schedule, main: Any, name: str, step: Any, padded: bool) -> None:
    """Let all threads fetch one factor's tile; a padded one is read down its columns."""
    buffer = schedule.get(schedule.get_sblock(name)).writes[0].source
    reads = [region.source for region in schedule.get(main).reads]
    index = _read_index(schedule, reads, buffer, name)
    block = schedule.cache_read(main, index, "shared")
    count = len(schedule.get_loops(block))
    schedule.compute_at(block, step, preserve_unit_loops=True)
    fused = schedule.fuse(*schedule.get_loops(block)[-count:])
    _, row, column = schedule.split(fused, [None, SIDE, SIDE])
    schedule.bind(row, "threadIdx.y")
    schedule.bind(column, "threadIdx.x")
    if padded:
        schedule.storage_align(block, 0, axis=-2, factor=DEPTH, offset=1)
    _inline_writers(schedule, block)


def _read_index(schedule: Schedule, reads: Sequence[Any], buffer: Any, name: str) -> int:
    """Which of the product's operands a factor is, which may have been padded since."""
    for index, source in enumerate(reads):
        if source.same_as(buffer):
            return index
    for index, source in enumerate(reads):
        if str(source.name).startswith(str(buffer.name)):
            return index
    raise Misfit(f"the factor {name} is lost")


def _inline_writers(schedule: Schedule, block: Any) -> None:
    """Inline what computes a factor into its fetch."""
    while True:
        writers = [w for w in schedule.get_producers(block) if is_spatial(schedule.get(w))]
        if not writers:
            return
        for writer in writers:
            schedule.compute_inline(writer)


def _inline_readers(schedule: Schedule, block: Any) -> None:
    """Compute what reads the results, one after the other, where they are written."""
    while True:
        readers = list(schedule.get_consumers(block))
        if not readers:
            return
        if len(readers) > 1 or not is_spatial(schedule.get(readers[0])):
            raise Misfit("the results are read by more than one")
        schedule.reverse_compute_inline(readers[0])


def _check_complete(schedule: Schedule) -> None:
    """Refuse a schedule that left a block without threads."""
    for block in blocks_of(schedule):
        loops = [schedule.get(loop) for loop in schedule.get_loops(block)]
        if not any(loop.kind == tirx.ForKind.THREAD_BINDING for loop in loops):
            raise Misfit("a block is left over")
