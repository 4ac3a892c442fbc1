"""float16 and bfloat16 on devices that compute with float32.

A CPU has no arithmetic of 16 bits worth using: each node would convert its operands, compute in
float32, and round. Instead a value stays in float32 from one node to the next, and is rounded only
where its type matters: at outputs, casts and all else that does not compute with floats.

    as ONNX has it   x16 -> MatMul -> 16 -> Add -> 16 -> Softmax -> 16 -> Cast
    computed         x16 -> 32 -> MatMul -> Add -> Softmax ------> 16 -> Cast

The results are nearer to the exact ones than with a rounding at each node, and do not overflow
between nodes, but differ from those in the last places. ONNX Runtime does the same on CPUs. What
jumps, such as Round, and what names a type, such as Cast, gets rounded operands.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir
from tvm import relax

from hybridc.bundle.dtypes import dtype_named
from hybridc.float_operators import COMPUTED, MICROSOFT, MOVED
from hybridc.lowering.call import dtype_of
from hybridc.lowering.value import Constant, Value, Widened

_HALVES = {ir.DataType.FLOAT16: "float16", ir.DataType.BFLOAT16: "bfloat16"}


def applies(node: ir.Node, operands: Sequence[Value]) -> bool:
    """Whether a node is computed in float32 in place of the type of 16 bits that it gives.

    Args:
        node: Whose results, all that are used, must have such a type.
        operands: What its inputs were lowered to.
    """
    types = {value.dtype for value in node.outputs if value.name}
    if not types or not types <= _HALVES.keys():
        return False
    if node.domain == "com.microsoft":
        return node.op_type in MICROSOFT
    if node.domain or node.op_type in COMPUTED:
        return not node.domain
    return node.op_type in MOVED and any(isinstance(value, Widened) for value in operands)


def widened(builder: relax.BlockBuilder, value: Value) -> Value:
    """A tensor of 16 bits in float32; what is none stays as it is."""
    if isinstance(value, Constant) and value.array.dtype.name in _HALVES.values():
        return Widened(Constant(value.name, value.array.astype(np.float32)), value.array.dtype.name)
    if isinstance(value, relax.Expr) and dtype_of(value) in _HALVES.values():
        wide = builder.emit(relax.op.astype(value, "float32"))
        return Widened(wide, dtype_of(value))
    return value


def noted(value: ir.Value, result: Value) -> Value:
    """A result of a node that was computed in float32, with the type that the model gives it."""
    dtype = _HALVES.get(value.dtype) if value.dtype is not None else None
    wide = dtype is not None and _dtype(result) == "float32"
    return Widened(result, str(dtype)) if wide else result


def rounded(builder: relax.BlockBuilder, value: Widened) -> Value:
    """The tensor in the type that the model gives it."""
    if isinstance(value.tensor, Constant):
        array = value.tensor.array.astype(dtype_named(value.dtype))
        return Constant(value.tensor.name, array)
    return builder.emit(relax.op.astype(value.tensor, value.dtype))


def _dtype(value: Value) -> str:
    if isinstance(value, Constant):
        return str(value.array.dtype)
    return dtype_of(value) if isinstance(value, relax.Expr) else ""
