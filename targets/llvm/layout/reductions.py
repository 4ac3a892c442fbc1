"""Let means take in the dequantization before them.

    dequantize -> mean          one kernel that reads 8-bit integers

TVM takes a mean, which is a sum and a quotient, for a kernel that element-wise work behind it is
fused into, and fuses none before it. Before it is an image, whose floats are four times as many
bytes as its integers; behind it is what is left of that. So the mean is declared a reduction.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import tvm
from hybridc.targets.llvm.layout.graph import bindings_of, variables_used
from hybridc.targets.llvm.schedules.blocks import (
    axes_of,
    collect,
    is_spatial,
    loads_of,
    same_variables,
    store_of,
)
from hybridc.targets.relax_pipeline import rewrite_main
from tvm import relax, tirx
from tvm.s_tir import SBlock

REDUCTION = 3
"""TVM's number for a kernel into which element-wise kernels before it are fused."""


def fuse_before_means(module: tvm.IRModule) -> tvm.IRModule:
    """The module with means declared reductions where something is to be fused into them.

    Args:
        module: Tensor programs that are not fused yet, and ``main``, which calls them.
    """
    main = module["main"]
    values = {b.var: getattr(b, "value", None) for b in bindings_of(main)}
    uses = Counter(variables_used(main.body.body))
    uses += Counter(v for b in bindings_of(main) for v in variables_used(b.value))
    builder = relax.BlockBuilder(module)
    declared: dict[Any, Any] = {}

    def changed(binding: Any) -> Any:
        value: Any = values[binding.var]
        function = _kernel(module, value)
        if function is None or not _is_mean(function):
            return binding
        source, variable = value.args[1].fields[0], value.args[0]
        before = _kernel(module, values.get(source))
        if uses[source] != 1 or before is None or not _dequantizes(before):
            return binding
        if variable not in declared:
            reduction = function.with_attr("op_pattern", REDUCTION)
            declared[variable] = builder.add_func(reduction, variable.name_hint)
        call = relax.call_tir(declared[variable], value.args[1], value.ty_args[0])
        return relax.VarBinding(binding.var, call)

    def block(old: Any) -> Any:
        return type(old)([changed(binding) for binding in old.bindings])

    result = rewrite_main(builder, module, block)
    return result if declared else module


def _kernel(module: tvm.IRModule, value: Any) -> tirx.PrimFunc | None:
    """The tensor program that a value calls with tensors alone."""
    is_call = getattr(getattr(value, "op", None), "name", "") == "relax.call_tir"
    return module[value.args[0]] if is_call and len(value.args) == 2 else None


def _blocks(function: tirx.PrimFunc) -> list[Any]:
    return [b for b in collect(function.body, SBlock) if b.name_hint != "root"]


def _is_mean(function: tirx.PrimFunc) -> bool:
    """Whether a kernel of one tensor is a reduction, and element-wise work on its result."""
    first, *rest = _blocks(function)
    alone = len(function.params) == 2 and not is_spatial(first)
    return alone and len(rest) == 1 and is_spatial(rest[0])


def _dequantizes(function: tirx.PrimFunc) -> bool:
    """Whether a kernel makes floats of the 8-bit integers at the same place."""
    blocks, tensor = _blocks(function), function.params[0]
    if len(blocks) != 1 or not is_spatial(blocks[0]) or str(tensor.dtype) not in ("int8", "uint8"):
        return False
    axes, store = axes_of(blocks[0]), store_of(blocks[0])
    whole = [load for load in loads_of(blocks[0]) if len(load.indices) == len(axes)]
    return store is not None and all(same_variables(load.indices, axes) for load in whole)
