"""Floating-point constants that TVM's code generators would print with too few digits.

    CUDA      float64 with 15 digits behind the point, so that 1e-20 becomes 0
    OpenCL    float32 and float64 with 7 digits

What does not survive that is written as its bits. The largest number of a type and its negative are
left: reductions start from them, and TVM must see that they do.
"""

from __future__ import annotations

import math
import struct
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import tvm
import tvm_ffi
from hybridc.targets.relax_pipeline import map_kernels
from tvm import tirx


@dataclass(frozen=True)
class Print:
    """How a code generator prints the constants of a type, and what to write instead.

    Attributes:
        form: In Python's format language.
        function: A function of the language, from bits to a number.
    """

    form: str
    function: str


CUDA: Mapping[str, Print] = {"float64": Print(".15f", "__longlong_as_double")}
OPENCL: Mapping[str, Print] = {
    "float32": Print(".6e", "as_float"),
    "float64": Print(".6e", "as_double"),
}

_LARGEST = {"float32": (2 - 2.0**-23) * 2.0**127, "float64": sys.float_info.max}
_BITS = {"float32": ("<f", "<i", "int32"), "float64": ("<d", "<q", "int64")}


def keep_constants(module: tvm.IRModule, printed: Mapping[str, Print]) -> tvm.IRModule:
    """The module with exact constants in its tensor programs."""

    def exact(constant: tirx.FloatImm) -> Any:
        dtype = str(constant.ty.dtype)
        value = float(constant.value)
        if dtype not in printed or not math.isfinite(value) or abs(value) == _LARGEST[dtype]:
            return constant
        if _survives(value, dtype, printed[dtype].form):
            return constant
        return _from_bits(value, dtype, printed[dtype].function)

    return map_kernels(
        module, lambda kernel: tvm_ffi.structural_map(kernel, (tirx.FloatImm, exact))
    )


def _survives(value: float, dtype: str, form: str) -> bool:
    return _pattern(float(format(value, form)), dtype) == _pattern(value, dtype)


def _pattern(value: float, dtype: str) -> bytes:
    return struct.pack(_BITS[dtype][0], value)


def _from_bits(value: float, dtype: str, function: str) -> Any:
    _, integer, name = _BITS[dtype]
    (bits,) = struct.unpack(integer, _pattern(value, dtype))
    return tirx.call_pure_extern(dtype, function, tirx.IntImm(name, bits))
