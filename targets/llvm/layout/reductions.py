"""Let means take in the dequantization before them.

    dequantize -> mean          one kernel that reads 8-bit integers

TVM takes a mean, which is a sum and a quotient, for a kernel that element-wise work behind it is
fused into, and fuses none before it. Before it is an image, whose floats are four times as many
bytes as its integers; behind it is what is left of that. So the mean is declared a reduction.
"""

from __future__ import annotations

from typing import Any

import tvm
from hybridc.targets.llvm.layout.graph import bindings_of, called_kernel, count_uses
from hybridc.targets.llvm.schedules.blocks import (
    axes_of,
    inner_blocks,
    is_spatial,
    loads_of,
    same_variables,
    store_of,
)
from hybridc.targets.relax_pipeline import with_attribute
from tvm import tirx

REDUCTION = 3
"""TVM's number for a kernel into which element-wise kernels before it are fused."""


def fuse_before_means(module: tvm.IRModule) -> tvm.IRModule:
    """The module with means declared reductions where something is to be fused into them.

    Args:
        module: Tensor programs that are not fused yet, and ``main``, which calls them.
    """
    main = module["main"]
    values: dict[Any, Any] = {b.var: getattr(b, "value", None) for b in bindings_of(main)}
    uses = count_uses(main)
    found = set()
    for variable, value in values.items():
        mean = called_kernel(module, value)
        if mean is None or not _is_mean(mean):
            continue
        source = value.args[1].fields[0]
        before = called_kernel(module, values.get(source))
        if uses[source] == 1 and before is not None and _dequantizes(before):
            found.add(variable)
    return with_attribute(module, found, "op_pattern", REDUCTION)


def _is_mean(function: tirx.PrimFunc) -> bool:
    """Whether a kernel of one tensor is a reduction, and element-wise work on its result."""
    kinds = [is_spatial(block) for block in inner_blocks(function)]
    return len(function.params) == 2 and kinds == [False, True]


def _dequantizes(function: tirx.PrimFunc) -> bool:
    """Whether a kernel makes floats of the 8-bit integers at the same place."""
    blocks, tensor = inner_blocks(function), function.params[0]
    if len(blocks) != 1 or not is_spatial(blocks[0]) or str(tensor.dtype) not in ("int8", "uint8"):
        return False
    axes, store = axes_of(blocks[0]), store_of(blocks[0])
    whole = [load for load in loads_of(blocks[0]) if len(load.indices) == len(axes)]
    return store is not None and all(same_variables(load.indices, axes) for load in whole)
