"""OpenCL C's names of functions that have those of C here, such as ``atanf``."""

from __future__ import annotations

from functools import cache
from typing import Any

import tvm
import tvm_ffi
from hybridc.targets.relax_pipeline import map_kernels
from tvm.ir import StringImm
from tvm.tirx import call_pure_extern, register_intrin_lowering

FUNCTIONS = (
    "acos",
    "acosh",
    "asin",
    "asinh",
    "atan",
    "atan2",
    "atanh",
    "copysign",
    "hypot",
    "ldexp",
    "log1p",
    "nextafter",
    "tan",
)
"""Functions that OpenCL C has for every type of floats under one name."""


CALLED = {"fmodf": "fmod"}
"""Functions that kernels call by name, and OpenCL C's names of them."""


def renamed(module: tvm.IRModule) -> tvm.IRModule:
    """The module with functions called by OpenCL C's names."""

    def rename(name: StringImm) -> StringImm:
        return StringImm(CALLED[name.value]) if name.value in CALLED else name

    return map_kernels(module, lambda kernel: tvm_ffi.structural_map(kernel, (StringImm, rename)))


@cache
def register_rules() -> None:
    """Tell TVM's code generator; the rules are the process's."""
    for name in FUNCTIONS:
        register_intrin_lowering(f"tirx.{name}", target="opencl", f=_by_name, level=99)


def _by_name(call: Any) -> Any:
    return call_pure_extern(call.ty, call.op.name.removeprefix("tirx."), *call.args)
