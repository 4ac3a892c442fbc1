"""Floating-point constants that TVM's code generators would print with too few digits.

    CUDA      float64 with 15 digits behind the point, so that 1e-20 becomes 0
    OpenCL    float32 and float64 with 7 digits

What does not survive that is written as its bits.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from typing import Any

import tvm
import tvm_ffi
from tvm import tirx

CUDA: Mapping[str, str] = {"float64": ".15f"}
OPENCL: Mapping[str, str] = {"float32": ".6e", "float64": ".6e"}
"""How a code generator prints the constants of a type, in Python's format language."""

_BITS = {"float32": ("<f", "<i", "int32"), "float64": ("<d", "<q", "int64")}


def keep_constants(module: tvm.IRModule, printed: Mapping[str, str]) -> tvm.IRModule:
    """The module with exact constants in its tensor programs."""

    def exact(constant: tirx.FloatImm) -> Any:
        dtype = str(constant.ty.dtype)
        value = float(constant.value)
        if dtype not in printed or not math.isfinite(value):
            return constant
        return constant if _survives(value, dtype, printed[dtype]) else _from_bits(value, dtype)

    functions = {
        variable: tvm_ffi.structural_map(function, (tirx.FloatImm, exact))
        if isinstance(function, tirx.PrimFunc)
        else function
        for variable, function in module.functions.items()
    }
    return tvm.IRModule(functions, attrs=module.attrs, global_infos=module.global_infos)


def _survives(value: float, dtype: str, form: str) -> bool:
    return _pattern(float(format(value, form)), dtype) == _pattern(value, dtype)


def _pattern(value: float, dtype: str) -> bytes:
    return struct.pack(_BITS[dtype][0], value)


def _from_bits(value: float, dtype: str) -> Any:
    _, integer, name = _BITS[dtype]
    (bits,) = struct.unpack(integer, _pattern(value, dtype))
    return tirx.reinterpret(dtype, tirx.IntImm(name, bits))
