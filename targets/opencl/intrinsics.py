"""OpenCL C's names of functions that TVM knows by those of C only, such as ``atanf``."""

from __future__ import annotations

from functools import cache
from typing import Any

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


@cache
def register_rules() -> None:
    """Tell TVM's code generator; the rules are the process's."""
    for name in FUNCTIONS:
        register_intrin_lowering(f"tirx.{name}", target="opencl", f=_by_name, level=99)


def _by_name(call: Any) -> Any:
    return call_pure_extern(call.ty, call.op.name.removeprefix("tirx."), *call.args)
