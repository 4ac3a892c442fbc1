"""Let kernels take tensors at any address.

TVM assumes that every buffer starts on a 64-byte boundary and emits aligned vector moves, which
fault on a numpy array that does not. Since AVX an unaligned move of aligned data costs nothing, so
kernels are told to expect only the alignment of an element, and callers' arrays need no copy.
"""

from __future__ import annotations

from typing import Any

import tvm
import tvm_ffi
from hybridc.targets.relax_pipeline import map_kernels
from tvm import tirx
from tvm.tirx.buffer import is_buffer_var


def accept_any_alignment(module: tvm.IRModule) -> tvm.IRModule:
    """The module with every kernel's parameters aligned to their element size only."""
    return map_kernels(module, _relax_function)


def _relax_function(function: tirx.PrimFunc) -> tirx.PrimFunc:
    relaxed = {
        parameter.__chandle__(): tirx.decl_buffer(
            parameter.shape,
            parameter.dtype,
            parameter.name,
            elem_offset=parameter.elem_offset,
            data_alignment=element_bytes(str(parameter.dtype)),
        )
        for parameter in function.params
        if is_buffer_var(parameter)
    }

    def replace(variable: Any) -> Any:
        return relaxed.get(variable.__chandle__(), variable)

    return tvm_ffi.structural_map(function, [(tvm.ir.Var, replace)])


def element_bytes(dtype: str) -> int:
    """Bytes of one element of a TVM dtype; at least one."""
    return max(int(tvm.DataType(dtype).bits) // 8, 1)
