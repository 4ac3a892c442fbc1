"""The rule for products: matrix products and convolutions in tiles, through shared memory.

The product is brought into its form (:mod:`.product`), and padded to whole tiles: the fetch fills
up with zeros, and only results that exist are written.

    C[b, m, n] = sum over k of A[b, m, k] * B[b, n, k]

A block of 16 x 16 threads computes one tile of C. Step by step along k it takes tiles of A and B
through shared memory, and each thread adds to its results in registers. While a step is multiplied,
what the next one needs is on its way to registers. No thread leaves the loop before the others:

    fetch A, B;  barrier;  store A, B
    each step:  fetch the next A, B;  barrier;  multiply;  barrier;  store the next A, B

Results of neighboring threads are neighbors in memory. What follows the product is computed on the
registers.

Where C has few tiles and k is long, k is cut into slices, which are one more axis b; a second
kernel adds up the slices, and computes what follows:

    P[s, b, m, n] = sum over the k of slice s        C[b, m, n] = sum over s of P[s, b, m, n]
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from hybridc.targets.fitting import Misfit, if_it_fits
from hybridc.targets.gpu.limits import Limits
from hybridc.targets.gpu.schedules.choices import in_order, product_problem
from hybridc.targets.gpu.schedules.product import (
    check_one_to_one,
    index_map,
    inline_readers,
    inline_writers,
    normalize,
    only_product,
    read_index,
    right_along_depth,
)
from hybridc.targets.gpu.schedules.stages import bind_elements
from hybridc.targets.gpu.schedules.tile_choice import DEPTH, SIDE, TILES, rank_tiles
from hybridc.targets.llvm.schedules.blocks import blocks_of, extents_of
from hybridc.targets.tuning import Figures, Problem, figures
from tvm import s_tir, tirx
from tvm.s_tir import Schedule

TRIES = 4
"""So many tiles are tried, best first: TVM cannot see of every one that it covers the results."""


def schedule_tiles(schedule: Schedule, limits: Limits) -> Schedule:
    """Schedule a function around one product; returns a schedule of its own.

    Raises:
        Misfit: There is no product in it, another reduction, or too little to share.
    """
    form, cuts = _find(schedule, limits)
    for cut in in_order(form.problem, cuts, limits.tuning)[:TRIES]:
        tiled = if_it_fits(partial(_in_tiles, schedule.copy(), form, cut, limits))
        if tiled is not None:
            return tiled
    raise Misfit("no tile fits")


def tile_choices(schedule: Schedule, limits: Limits) -> tuple[Problem, list[Figures]]:
    """What a function's tile is chosen for, and the choices, best first; changes the schedule.

    Raises:
        Misfit: There is no product in it, another reduction, or too little to share.
    """
    form, cuts = _find(schedule, limits)
    return form.problem, list(cuts)


@dataclass(frozen=True)
class _Form:
    """A product in its form.

    Attributes:
        name: Name of its block.
        factors: Names of the blocks of its factors.
        transposed: Whether the right factor's summands are its inner axis.
        problem: What a tile is chosen for.
    """

    name: str
    factors: tuple[str, str]
    transposed: bool
    problem: Problem


def _find(schedule: Schedule, limits: Limits) -> tuple[_Form, dict[Figures, _Cut]]:
    """Bring a function's product into its form, and list ways to cut it, best first."""
    main = only_product(schedule)
    _check_limits(limits)
    node = schedule.get(main)
    transposed = right_along_depth(schedule, main)
    factors = normalize(schedule, main, transposed)
    shape = extents_of(schedule.get(main)) or (1, 1, 1, 1)
    problem = product_problem("tiles", node, shape, transposed=transposed)
    cuts = {
        figures(tile=tile, slices=slices): _Cut(tile, slices) for tile, slices in rank_tiles(*shape)
    }
    return _Form(schedule.get(main).name_hint, factors, transposed, problem), cuts


@dataclass(frozen=True)
class _Cut:
    """How the axes of a product are cut.

    Attributes:
        tile: Rows and columns of a tile.
        slices: Slices of the summands.
    """

    tile: int
    slices: int

    def side(self, index: Any) -> list[Any]:
        """Rows or columns: number of the tile, number in the thread, thread."""
        inner = index % self.tile // SIDE if self.tile > SIDE else tirx.IntImm("int64", 0)
        return [index // self.tile, inner, index % SIDE]

    def depth(self, index: Any) -> list[Any]:
        """Summands: number of the step, number in the step."""
        return [index // DEPTH, index % DEPTH]


def _in_tiles(schedule: Schedule, form: _Form, cut: _Cut, limits: Limits) -> Schedule:
    """The schedule with one choice of tile."""
    main = schedule.get_sblock(form.name)
    schedule.pad_einsum(main, [1, cut.tile, cut.tile, DEPTH * cut.slices])
    if cut.slices > 1:
        main = _slice_depth(schedule, main, cut.slices, limits)
    _cut_axes(schedule, main, cut)
    stages = [
        _stage(schedule, main, factor, cut, rows_first)
        for factor, rows_first in zip(form.factors, (True, form.transposed), strict=True)
    ]
    name = schedule.get(main).name_hint
    # Only in simplified indices do the primitives below find one axis for each.
    schedule = Schedule(s_tir.transform.StmtSimplify()(schedule.mod))
    main = schedule.get_sblock(name)
    step, thread = _bind(schedule, main)
    result = schedule.cache_write(main, 0, "local")
    schedule.reverse_compute_at(result, thread, preserve_unit_loops=True)
    for stage, rows_first in zip(stages, (True, form.transposed), strict=True):
        _place(schedule, stage, step, rows_first)
    if cut.slices == 1:
        inline_readers(schedule, result)
        check_one_to_one(schedule, result)
    schedule.decompose_reduction(main, step)
    _overlap(schedule, step)
    _check_complete(schedule)
    return schedule


def _check_limits(limits: Limits) -> None:
    shared = 2 * max(TILES) * (DEPTH + 1) * 4
    if limits.threads < SIDE * SIDE or limits.shared_bytes < shared:
        raise Misfit("a block of threads is too large")


def _slice_depth(schedule: Schedule, main: Any, slices: int, limits: Limits) -> Any:
    """Cut the summands into slices, and add them up apart; returns the block of the slices."""
    batch, _, _, depth = extents_of(schedule.get(main)) or (1, 1, 1, 1)
    length = depth // slices

    def sliced(number: Any, row: Any, column: Any, summand: Any) -> list[Any]:
        return [number, row, column, summand // length, summand % length]

    def fused(piece: Any, number: Any, *others: Any) -> list[Any]:
        return [piece * batch + number, *others]

    schedule.transform_block_layout(main, index_map(sliced, 4))
    partial = schedule.rfactor(schedule.get_loops(main)[3], 0)
    loops = schedule.get_loops(partial)
    schedule.reorder(loops[3], *loops[:3], loops[4])
    schedule.transform_block_layout(partial, index_map(fused, 5))
    schedule.transform_layout(partial, ("write", 0), index_map(fused, 4))
    total = schedule.cache_write(main, 0, "local")
    inline_readers(schedule, total)
    thread = bind_elements(schedule, list(schedule.get_loops(total)), total, limits)
    schedule.compute_at(main, thread)
    return partial


def _cut_axes(schedule: Schedule, main: Any, cut: _Cut) -> None:
    """Cut the product's axes, and those of its results.

    What a thread has lies apart. Only with an axis for the thread does TVM see which it is.
    """

    def block(batch: Any, row: Any, column: Any, depth: Any) -> list[Any]:
        return [batch, *cut.side(row), *cut.side(column), *cut.depth(depth)]

    def results(batch: Any, row: Any, column: Any) -> list[Any]:
        return [batch, *cut.side(row), *cut.side(column)]

    schedule.transform_block_layout(main, index_map(block, 4))
    schedule.transform_layout(main, ("write", 0), index_map(results, 3))


def _stage(
    schedule: Schedule, main: Any, name: str, cut: _Cut, rows_first: bool
) -> tuple[str, str]:
    """Let a factor's tiles go through registers to shared memory.

    Args:
        schedule: The schedule.
        main: The product's block.
        name: The factor's.
        cut: How the axes are cut.
        rows_first: Whether its rows are its outer axis, and its summands the inner one.

    Returns:
        Names of the blocks that fetch and that store.
    """
    buffer = schedule.get(schedule.get_sblock(name)).writes[0].source
    reads = [region.source for region in schedule.get(main).reads]
    index = read_index(reads, buffer, name)
    fetch = schedule.cache_read(main, index, "shared")
    inline_writers(schedule, fetch)
    store = schedule.cache_write(fetch, 0, "shared")
    schedule.set_scope(fetch, 0, "local")

    def pieces(batch: Any, outer: Any, inner: Any) -> list[Any]:
        if rows_first:
            return [batch, *cut.side(outer), *cut.depth(inner)]
        return [batch, *cut.depth(outer), *cut.side(inner)]

    for block in (fetch, store):
        schedule.transform_block_layout(block, index_map(pieces, 3))
        schedule.transform_layout(block, ("write", 0), index_map(pieces, 3))
    return schedule.get(fetch).name_hint, schedule.get(store).name_hint


def _bind(schedule: Schedule, main: Any) -> tuple[Any, Any]:
    """Bind the product's loops; returns the loop over steps and the innermost of the threads."""
    batch, row_tile, row, row_thread, column_tile, column, column_thread, step, inner = (
        schedule.get_loops(main)
    )
    grid = (batch, row_tile, column_tile)
    schedule.reorder(*grid, row_thread, column_thread, step, inner, row, column)
    schedule.bind(schedule.fuse(*grid), "blockIdx.x")
    schedule.bind(row_thread, "threadIdx.y")
    schedule.bind(column_thread, "threadIdx.x")
    schedule.annotate(column_thread, "pragma_auto_unroll_max_step", 1024)
    schedule.annotate(column_thread, "pragma_unroll_explicit", 0)
    for loop in (row, column):
        schedule.unroll(loop)
    return step, column_thread


def _place(schedule: Schedule, stage: tuple[str, str], step: Any, rows_first: bool) -> None:
    """Let all threads fetch and store one factor's tile; one read down its columns is padded."""
    fetch, store = map(schedule.get_sblock, stage)
    for block in (store, fetch):
        schedule.compute_at(block, step, preserve_unit_loops=True)
    for block in (fetch, store):
        loops = list(schedule.get_loops(block)[-6:])
        across = loops.pop()
        down = loops.pop(3 if rows_first else 2)
        schedule.reorder(*loops, down, across)
        schedule.bind(down, "threadIdx.y")
        schedule.bind(across, "threadIdx.x")
    if rows_first:
        schedule.storage_align(store, 0, axis=3, factor=DEPTH, offset=1)


def _overlap(schedule: Schedule, step: Any) -> None:
    """Fetch for the next step before this one is multiplied, and store after it.

    The body of a step is: fetch A, store A, fetch B, store B, multiply.
    """
    schedule.annotate(step, "software_pipeline_stage", [0, 0, 0, 0, 1])
    schedule.annotate(step, "software_pipeline_order", [0, 3, 1, 4, 2])


def _check_complete(schedule: Schedule) -> None:
    """Refuse a schedule that left a block without threads."""
    for block in blocks_of(schedule):
        loops = [schedule.get(loop) for loop in schedule.get_loops(block)]
        if not any(loop.kind == tirx.ForKind.THREAD_BINDING for loop in loops):
            raise Misfit("a block is left over")
