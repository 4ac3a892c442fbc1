"""Matrix products: one reduction axis, two operands, each read along its own output axis.

The loops around a register tile are ordered so that a panel of the right operand, ``columns``
wide and the whole reduction long, is reused by all row tiles before the next panel is touched.
Where many row tiles use it, the panel is first copied into a contiguous buffer; that also turns
a transposed right operand around.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import tvm
from hybridc.targets.fitting import Misfit
from hybridc.targets.llvm.cpu import Cpu
from hybridc.targets.llvm.schedules.blocks import (
    axes_of,
    blocks_of,
    is_reduction,
    is_spatial,
    store_of,
    strides_of,
)
from hybridc.targets.llvm.schedules.extents import number
from hybridc.targets.llvm.schedules.generic import schedule_spatial
from hybridc.targets.llvm.schedules.loops import (
    finish_tile,
    fuse_parallel,
    known_extent,
    operations_of,
    typical_extent,
)
from hybridc.targets.llvm.schedules.registers import RegisterTile, cycles_of, tiles_of
from hybridc.targets.llvm.schedules.tiles import (
    Initialization,
    final_block,
    initialize,
    move_into_tile,
)
from hybridc.targets.llvm.sizes import ranges_of, typical_size
from hybridc.targets.tuning import Figures, Problem, figures, require
from tvm import tirx
from tvm.s_tir import Schedule

PACK_ROW_TILES = 4
"""Row tiles from which on copying the right panel pays."""

MIN_TASKS = 16
"""Column tiles from which on rows need not be shared among threads too."""

PACK_BYTES = 64 * 1024
"""A right operand smaller than this stays in the first-level cache without packing."""


@dataclass(frozen=True)
class Product:
    """A matrix product found in a block.

    Attributes:
        rows: Axis of the output's rows, or ``None`` if it has one row.
        columns: Axis of the output's columns, the last one of the output.
        reduced: The reduction axis.
        right: Position among the block's reads of the operand that the columns index.
        is_transposed: Whether the right operand is contiguous along the reduction.
    """

    rows: int | None
    columns: int
    reduced: int
    right: int
    is_transposed: bool


def find_product(schedule: Schedule, block: Any) -> Product:
    """What kind of product a block computes.

    Raises:
        Misfit: It does not compute a product of two matrices.
    """
    node = schedule.get(block)
    store, sizes = store_of(node), [number(axis.dom.extent) for axis in node.iter_vars]
    if store is None or not is_reduction(node):
        raise Misfit("not a reduction")
    kinds = [axis.iter_type for axis in node.iter_vars]
    reduced = [i for i, kind in enumerate(kinds) if kind == tirx.IterVar.CommReduce]
    if len(reduced) != 1 or reduced[0] != len(kinds) - 1 or len(kinds) < 3:
        raise Misfit("not one reduction axis behind at least two others")
    operands = _factors(store)
    axes = axes_of(node)
    found = [strides_of(load.source, load.indices, axes, True) for load in operands]
    strides = [stride for stride in found if stride is not None]
    if len(strides) < len(found):
        raise Misfit("an operand is not read along its axes")
    columns, reduction = len(kinds) - 2, reduced[0]
    right = [i for i, stride in enumerate(strides) if stride and stride[columns]]
    if len(right) != 1:
        raise Misfit("the last axis does not belong to one operand")
    left_strides, right_strides = strides[1 - right[0]], strides[right[0]]
    rows = [a for a in range(columns) if left_strides[a] and not right_strides[a] and sizes[a] != 1]
    step = right_strides[columns], right_strides[reduction]
    if 1 not in step or not left_strides[reduction] or not all(step):
        raise Misfit("an operand has no contiguous axis")
    position = _read_position(node, operands[right[0]])
    return Product(rows[-1] if rows else None, columns, reduction, position, step[0] != 1)


def _factors(store: Any) -> list[Any]:
    """The two loads multiplied in ``C[i, j] = C[i, j] + a * b``, through casts."""
    value = store.value
    if not isinstance(value, tirx.Add) or not isinstance(value.b, tirx.Mul):
        raise Misfit("not a sum of products")
    factors = [_without_cast(value.b.a), _without_cast(value.b.b)]
    if not all(isinstance(factor, tvm.ir.TensorLoad) for factor in factors):
        raise Misfit("a factor is not a plain load")
    return factors


def _without_cast(value: Any) -> Any:
    return value.value if isinstance(value, tirx.Cast) else value


def _read_position(node: Any, load: Any) -> int:
    sources = [region.source for region in node.reads]
    found = [i for i, source in enumerate(sources) if source.same_as(load.source)]
    if len(found) != 1:
        raise Misfit("an operand is read twice")
    return found[0]


def schedule_matmul(schedule: Schedule, cpu: Cpu) -> None:
    """Schedule a function around one matrix product, in place.

    Raises:
        Misfit: The function is not of this kind.
    """
    reductions = [block for block in blocks_of(schedule) if is_reduction(schedule.get(block))]
    if len(reductions) != 1:
        raise Misfit("not one reduction")
    anchor = reductions[0]
    product = find_product(schedule, anchor)
    others = [block for block in blocks_of(schedule) if is_spatial(schedule.get(block))]
    final = final_block(schedule, anchor)
    names = {schedule.get(final).name_hint, schedule.get(anchor).name_hint}
    tile_product(schedule, anchor, final, product, cpu)
    for block in others:
        if schedule.get(block).name_hint not in names:
            schedule_spatial(schedule, block, cpu)


def tile_product(schedule: Schedule, anchor: Any, final: Any, product: Product, cpu: Cpu) -> None:
    """Tile a product for registers, with the block that finishes it inside the tile."""
    extents, store = typical_extents(schedule, anchor), store_of(schedule.get(anchor))
    if store is None:
        raise Misfit("not a store")
    operations = operations_of(schedule, anchor)
    height = 1 if product.rows is None else extents[product.rows]
    itemsize = max(tvm.DataType(str(store.buffer.dtype)).bits // 8, 1)
    tile = _choose_tile(problem_of(schedule, anchor, product), cpu)
    reused = -(-height // tile.rows)
    size = extents[product.reduced] * extents[product.columns] * itemsize
    packs = reused >= PACK_ROW_TILES and (size > PACK_BYTES or product.is_transposed)
    if product.is_transposed and not packs:
        raise Misfit("a transposed operand that is used too rarely to turn around")
    around, inner = _tile_final(schedule, final, product, tile, reused, packs)
    step = _tile_anchor(schedule, anchor, product, tile, inner)
    if packs:
        _pack_panel(schedule, anchor, product, tile, around[-1])
    fuse_parallel(schedule, around, operations)
    initialize(schedule, step)


def problem_of(schedule: Schedule, anchor: Any, product: Product) -> Problem:
    """What a tuning has a choice for; sizes that are not known are typical ones."""
    extents, store = typical_extents(schedule, anchor), store_of(schedule.get(anchor))
    if store is None:
        raise Misfit("not a store")
    inside = {product.rows, product.columns, product.reduced}
    sizes = figures(
        count=math.prod(size for axis, size in enumerate(extents) if axis not in inside),
        rows=1 if product.rows is None else extents[product.rows],
        columns=extents[product.columns],
        depth=extents[product.reduced],
        item_bits=max(tvm.DataType(str(store.buffer.dtype)).bits, 8),
        transposed=product.is_transposed,
    )
    return Problem("product", sizes)


def typical_extents(schedule: Schedule, block: Any) -> list[int]:
    """Extents of a block's axes, typical ones where they are not known."""
    ranges = ranges_of(schedule.mod["main"])
    return [typical_size(axis.dom.extent, ranges) for axis in schedule.get(block).iter_vars]


def _choose_tile(problem: Problem, cpu: Cpu) -> RegisterTile:
    """The register tile that was measured, or seems, fastest."""
    choices = rank_tiles(problem, cpu)
    chosen = cpu.tuning.choice(problem) or next(iter(choices))
    require(problem, chosen, choices)
    return RegisterTile(**dict(chosen))


def rank_tiles(problem: Problem, cpu: Cpu) -> dict[Figures, float]:
    """Register tiles for a product with their cycles for one step of the reduction, best first.

    Raises:
        Misfit: There is none that fills a vector.
    """
    sizes = dict(problem.sizes)
    rows, columns = sizes["rows"], sizes["columns"]
    prices = []
    for tile in tiles_of(rows, columns, sizes["item_bits"] // 8, cpu):
        if tile.lanes > 1:
            choice = figures(**dataclasses.asdict(tile))
            prices.append((cycles_of(tile, rows, columns), -tile.rows * tile.vectors, choice))
    if not prices:
        raise Misfit("too few columns for a vector")
    return {choice: cycles for cycles, _, choice in sorted(prices)}


def _tile_final(
    schedule: Schedule, final: Any, product: Product, tile: RegisterTile, reused: int, packs: bool
) -> tuple[list[Any], Any]:
    """Tile the block that finishes the product.

    Returns:
        The loops to share among threads, and the innermost loop around the register tile.
    """
    loops = list(schedule.get_loops(final))
    columns, *inside = schedule.split(loops[product.columns], [None, tile.vectors, tile.lanes])
    around = [loop for i, loop in enumerate(loops) if i not in (product.rows, product.columns)]
    if product.rows is None:
        around, rows = [*around, columns], columns
    elif packs and known_extent(schedule, loops[product.rows]) is None:
        # A chunk of unknown rows would repeat the last ones.
        rows, in_rows = schedule.split(loops[product.rows], [None, tile.rows])
        around, inside = [*around, columns], [in_rows, *inside]
    elif packs:
        # A panel serves the rows of one chunk; a chunk is long enough to repay the packing.
        tasks = math.prod(typical_extent(schedule, loop) for loop in [*around, columns])
        chunks = max(min(-(-MIN_TASKS // tasks), reused // (2 * PACK_ROW_TILES)), 1)
        factors = [None, -(-reused // chunks), tile.rows]
        chunk, rows, in_rows = schedule.split(loops[product.rows], factors)
        around, inside = [*around, chunk, columns], [in_rows, *inside]
    else:
        rows, in_rows = schedule.split(loops[product.rows], [None, tile.rows])
        around, inside = [*around, columns, rows], [in_rows, *inside]
    schedule.reorder(*around, *([rows] if packs else []), *inside)
    finish_tile(schedule, inside)
    return around, rows


def _tile_anchor(
    schedule: Schedule, anchor: Any, product: Product, tile: RegisterTile, place: Any
) -> Initialization:
    by_axis = move_into_tile(schedule, anchor, place)
    lanes = schedule.split(by_axis[product.columns], [tile.vectors, tile.lanes])
    rows = [by_axis[product.rows]] if product.rows is not None else []
    inside = [*rows, *lanes]
    reduction = by_axis[product.reduced]
    schedule.reorder(reduction, *inside)
    finish_tile(schedule, inside)
    return Initialization(anchor, reduction, len(inside))


def _pack_panel(
    schedule: Schedule, anchor: Any, product: Product, tile: RegisterTile, columns: Any
) -> None:
    """Copy the panel of the right operand that one column tile needs."""
    packed = schedule.cache_read(anchor, product.right, "global")
    if product.is_transposed:
        schedule.transform_layout(packed, ("write", 0), lambda *i: (*i[:-2], i[-1], i[-2]))
    schedule.compute_at(packed, columns, preserve_unit_loops=True)
    own = list(schedule.get_loops(packed))[-2:]
    if product.is_transposed:
        schedule.reorder(*reversed(own))
        own.reverse()
    finish_tile(schedule, schedule.split(own[-1], [tile.vectors, tile.lanes]))
