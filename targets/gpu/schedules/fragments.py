"""The rule for products on tensor cores: factors of 8 and 16 bits, and float32 rounded to tf32.

See :mod:`.factors` for what is taken from the function, and :mod:`.fragment_kernel` for what is
written in its place.
"""

from __future__ import annotations

from typing import Any

import tvm
from hybridc.targets.fitting import Misfit
from hybridc.targets.gpu.limits import Limits
from hybridc.targets.gpu.schedules.choices import in_order, product_problem
from hybridc.targets.gpu.schedules.factors import Product, extract_product
from hybridc.targets.gpu.schedules.fragment_choice import Cut, rank_cuts
from hybridc.targets.gpu.schedules.fragment_copies import can_copy
from hybridc.targets.gpu.schedules.fragment_kernel import INTEGERS, write_kernels
from hybridc.targets.gpu.schedules.fragment_moves import Side
from hybridc.targets.gpu.schedules.product import only_product, right_along_depth
from hybridc.targets.llvm.schedules.blocks import changed, loads_of, store_of
from hybridc.targets.llvm.schedules.statements import sequence
from hybridc.targets.tuning import Figures, Problem, figures
from tvm import tirx
from tvm.s_tir import SBlockRealize, Schedule


def schedule_fragments(schedule: Schedule, limits: Limits) -> Schedule:
    """Schedule a function around one product on tensor cores; returns a schedule of its own.

    Raises:
        Misfit: There is no such product in it, or the device has no tensor cores for its type.
    """
    function = schedule.mod["main"]
    product, problem, cuts = _find(schedule, limits)
    kernels, buffers = write_kernels(product, in_order(problem, cuts, limits.tuning)[0])
    root = changed(function.body.block, body=sequence(kernels), alloc_buffers=buffers)
    written = function.with_body(SBlockRealize([], True, root))
    return Schedule(tvm.IRModule({"main": written}))


def fragment_choices(schedule: Schedule, limits: Limits) -> tuple[Problem, list[Figures]]:
    """What a function's cut is chosen for, and the choices, best first; changes the schedule.

    Raises:
        Misfit: There is no product for tensor cores in it.
    """
    _, problem, cuts = _find(schedule, limits)
    return problem, list(cuts)


def _find(schedule: Schedule, limits: Limits) -> tuple[Product, Problem, dict[Figures, Cut]]:
    """A function's product, what a cut is chosen for, and ways to cut it, best first."""
    main = only_product(schedule)
    node = schedule.get(main)
    check_types(node, limits)
    product = extract_product(schedule, main, right_along_depth(schedule, main))
    sides = (Side(product.left, 32, 32, is_right=False), Side(product.right, 32, 32, is_right=True))
    packed, copied = sides[0].packed, all(map(can_copy, sides))
    if product.left.dtype in INTEGERS and not copied:
        raise Misfit("factors of 8 bits that are no chunks in memory")
    problem = product_problem("fragments", node, product.shape, packed=packed, copied=copied)
    cuts = {
        figures(rows=cut.rows, columns=cut.columns, slices=cut.slices): cut
        for cut in rank_cuts(product.shape, packed, copied)
    }
    return product, problem, cuts


def check_types(node: Any, limits: Limits) -> None:
    """Refuse factors that are of other types, or more than loads and casts to the sums' type."""
    store: Any = store_of(node)
    loads = [load for load in loads_of(node) if not load.source.same_as(store.buffer)]
    types = {str(load.ty.dtype) for load in loads}
    integers = types <= set(INTEGERS)
    if not types <= limits.matrix_types or not (integers or len(types) == 1):
        raise Misfit("no tensor cores for these types")
    product, total = store.value.b, "int32" if integers else "float32"
    if str(store.value.ty.dtype) != total or not all(map(_is_plain, (product.a, product.b))):
        raise Misfit(f"not sums in {total} of plain products")


def _is_plain(value: Any) -> bool:
    if isinstance(value, tirx.Cast):
        value = value.value
    return isinstance(value, tvm.ir.TensorLoad)
