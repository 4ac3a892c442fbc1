"""The rule for products on tensor cores: factors of 16 bits, and float32 rounded to tf32.

See :mod:`.factors` for what is taken from the function, and :mod:`.fragment_kernel` for what is
written in its place.
"""

from __future__ import annotations

from typing import Any

import tvm
from hybridc.targets.gpu.limits import Limits
from hybridc.targets.gpu.schedules.factors import extract_product
from hybridc.targets.gpu.schedules.fragment_choice import rank_cuts
from hybridc.targets.gpu.schedules.fragment_copies import can_copy
from hybridc.targets.gpu.schedules.fragment_kernel import write_kernels
from hybridc.targets.gpu.schedules.fragment_moves import Side
from hybridc.targets.gpu.schedules.product import only_product, right_along_depth
from hybridc.targets.llvm.schedules.blocks import changed, loads_of, store_of
from hybridc.targets.llvm.schedules.loops import Misfit
from hybridc.targets.llvm.schedules.statements import sequence
from tvm import tirx
from tvm.s_tir import SBlockRealize, Schedule


def schedule_fragments(schedule: Schedule, limits: Limits) -> Schedule:
    """Schedule a function around one product on tensor cores; returns a schedule of its own.

    Raises:
        Misfit: There is no such product in it, or the device has no tensor cores for its type.
    """
    function = schedule.mod["main"]
    main = only_product(schedule)
    _check_types(schedule.get(main), limits)
    product = extract_product(schedule, main, right_along_depth(schedule, main))
    sides = (Side(product.left, 32, 32, is_right=False), Side(product.right, 32, 32, is_right=True))
    cut = rank_cuts(product.shape, sides[0].packed, all(map(can_copy, sides)))[0]
    kernels, buffers = write_kernels(product, cut)
    root = changed(function.body.block, body=sequence(kernels), alloc_buffers=buffers)
    written = function.with_body(SBlockRealize([], True, root))
    return Schedule(tvm.IRModule({"main": written}))


def _check_types(node: Any, limits: Limits) -> None:
    """Refuse factors that are of other types, or more than loads and casts to float32."""
    store: Any = store_of(node)
    loads = [load for load in loads_of(node) if not load.source.same_as(store.buffer)]
    types = {str(load.ty.dtype) for load in loads}
    if len(types) != 1 or not types <= limits.matrix_types:
        raise Misfit("no tensor cores for these types")
    product = store.value.b
    if str(store.value.ty.dtype) != "float32" or not all(map(_is_plain, (product.a, product.b))):
        raise Misfit("not sums in float32 of plain products")


def _is_plain(value: Any) -> bool:
    if isinstance(value, tirx.Cast):
        value = value.value
    return isinstance(value, tvm.ir.TensorLoad)
