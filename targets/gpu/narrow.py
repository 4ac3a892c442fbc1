"""Integers of 8 and 16 bits are computed in 32 bits and cut off, where C would not cut them off.

CUDA and OpenCL C widen such integers to ``int`` in every operation, and TVM's code generators cut
off what is stored only. So a sum that overflows would be too large for what reads it in the same
kernel:

    uint8   (200 + 100) / 2       22, as ONNX says        in C: 150

and OpenCL's ``select`` refuses a sum beside a plain value, since they are of different types.
"""

from __future__ import annotations

from typing import Any

import tvm
import tvm_ffi
from hybridc.targets.relax_pipeline import map_kernels
from tvm import tirx

_OPERATIONS = (
    tirx.Add,
    tirx.Sub,
    tirx.Mul,
    tirx.Div,
    tirx.Mod,
    tirx.FloorDiv,
    tirx.FloorMod,
)

_CALLS = frozenset(
    f"tirx.{name}"
    for name in (
        "bitwise_and",
        "bitwise_or",
        "bitwise_xor",
        "bitwise_not",
        "shift_left",
        "shift_right",
    )
)

_WIDE = {"int8": "int32", "int16": "int32", "uint8": "uint32", "uint16": "uint32"}


def cut_off(module: tvm.IRModule) -> tvm.IRModule:
    """The module with arithmetic on narrow integers as its tensor programs mean it."""

    def operation(node: Any) -> Any:
        wide = _wide(node)
        if wide is None:
            return node
        return tirx.Cast(node.ty.dtype, type(node)(node.a.astype(wide), node.b.astype(wide)))

    def call(node: Any) -> Any:
        wide = _wide(node)
        if wide is None or getattr(node.op, "name", "") not in _CALLS:
            return node
        arguments = [argument.astype(wide) for argument in node.args]
        return tirx.Cast(node.ty.dtype, tirx.call_intrin(wide, node.op.name, *arguments))

    rewrites = [*((kind, operation) for kind in _OPERATIONS), (tvm.ir.Call, call)]
    return map_kernels(module, lambda kernel: tvm_ffi.structural_map(kernel, rewrites))


def _wide(node: Any) -> str | None:
    """The type to compute a narrow integer in, with as many lanes; ``None`` for other types."""
    name, cross, lanes = str(getattr(node.ty, "dtype", "")).partition("x")
    return _WIDE[name] + cross + lanes if name in _WIDE else None
