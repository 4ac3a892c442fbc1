"""How much memory a part's intermediate tensors take, read off the planned module."""

from __future__ import annotations

from typing import Any

import tvm
from tvm import relax, tirx

_KEPT = "cuda_graph_alloc"
"""Name of the function that TVM moves the storages of a CUDA graph to; it is called once."""


def planned_bytes(module: tvm.IRModule) -> int:
    """Sum of the storages that ``main`` allocates or keeps; 0 if one has a dynamic size."""
    sizes: list[int | None] = []

    def visit(expression: Any) -> None:
        if isinstance(expression, relax.Call) and _is_allocation(expression):
            sizes.append(_static_size(expression.args[0]))
        elif isinstance(expression, tvm.ir.GlobalVar) and _KEPT in expression.name_hint:
            relax.analysis.post_order_visit(module[expression], visit)

    for block in module["main"].body.blocks:
        for binding in block.bindings:
            # What takes a field of a tuple allocates nothing; a visit would go through its type.
            if not isinstance(binding.value, tvm.ir.TupleGetItem):
                relax.analysis.post_order_visit(binding.value, visit)
    return 0 if None in sizes else sum(size for size in sizes if size is not None)


def _is_allocation(call: relax.Call) -> bool:
    name = getattr(call.op, "name", None) or getattr(call.op, "global_symbol", None)
    return name in ("relax.vm.alloc_storage", "relax.memory.alloc_storage")


def _static_size(shape: Any) -> int | None:
    if not isinstance(shape, relax.ShapeExpr):
        return None
    total = 1
    for dim in shape.values:
        if not isinstance(dim, tirx.IntImm):
            return None
        total *= int(dim)
    return total
