"""Lower a section for a GPU: as for any target, but for nodes whose kernels a GPU cannot run."""

from __future__ import annotations

import dataclasses
from typing import Any

import tvm
import tvm_ffi
from hybridc.targets.gpu.limits import Limits
from hybridc.targets.gpu.schedules.programs import MAX_SCRATCH, scratch_bytes
from hybridc.targets.protocol import Section
from tvm import relax, tirx

from hybridc.lowering.call import Call, Converter, Unsupported
from hybridc.lowering.lower import Lowered, lower
from hybridc.lowering.ops import OperatorTable, default_table
from hybridc.lowering.value import Value


def lower_for_gpu(section: Section, limits: Limits | None = None) -> Lowered:
    """A section as a Relax module.

    Args:
        section: What to lower.
        limits: What the device can do, where not every GPU computes with all types.

    Raises:
        UnsupportedError: Some nodes cannot run on a GPU; it lists all of them.
    """
    rows = default_table().rows
    guarded = (dataclasses.replace(row, convert=_guarded(row.convert, limits)) for row in rows)
    return lower(section, OperatorTable(tuple(guarded)))


def _guarded(convert: Converter, limits: Limits | None) -> Converter:
    """A converter that refuses its node if one of the kernels that it emits cannot run."""

    def convert_for_gpu(call: Call) -> Value | tuple[Value, ...]:
        before = set(call.builder.get().functions)
        result = convert(call)
        if limits is not None:
            _refuse_types(call, result, limits)
        for variable, function in call.builder.get().functions.items():
            if variable not in before and isinstance(function, tirx.PrimFunc):
                reason = unfit(function) or (limits and unfit_types(function, limits))
                if reason:
                    raise Unsupported(reason)
        return result

    return convert_for_gpu


def _refuse_types(call: Call, result: Value | tuple[Value, ...], limits: Limits) -> None:
    """Refuse a node if a tensor between its inputs and its outputs is of a type not there."""
    results = result if isinstance(result, tuple) else (result,)
    given = [value for value in call.inputs if isinstance(value, relax.Expr)]
    pending = [*given, *(value for value in results if isinstance(value, relax.Expr))]
    seen = {value.__chandle__() for value in given if isinstance(value, relax.Var)}
    while pending:
        value = pending.pop()
        reason = _unfit_type(value, limits)
        if reason is not None:
            raise Unsupported(reason)
        if isinstance(value, relax.Var) and value.__chandle__() not in seen:
            seen.add(value.__chandle__())
            bound = call.builder.lookup_binding(value)
            pending += [] if bound is None else [bound, *relax.analysis.free_vars(bound)]


def _unfit_type(value: relax.Expr, limits: Limits) -> str | None:
    """Why a device cannot hold what an expression gives; ``None`` if it can."""
    dtype = str(value.ty.dtype) if isinstance(value.ty, relax.TensorType) else ""
    return None if _has_type(dtype, limits) else _missing(dtype)


def unfit_types(function: tirx.PrimFunc, limits: Limits) -> str | None:
    """Why a device cannot run a kernel for the types in it; ``None`` if there is no reason."""
    found: set[str] = set()

    def see(node: Any) -> None:
        dtype = getattr(getattr(node, "ty", None), "dtype", None)
        found.add(str(dtype or "").partition("x")[0])

    tvm_ffi.structural_walk(function, [(tvm.ir.Expr, see)], order="post")
    missing = sorted(dtype for dtype in found if not _has_type(dtype, limits))
    return _missing(missing[0]) if missing else None


def _has_type(dtype: str, limits: Limits) -> bool:
    numeric = dtype.startswith(("float", "bfloat", "int", "uint", "bool"))
    return limits.types is None or not numeric or dtype in limits.types


def _missing(dtype: str) -> str:
    return f"it computes with {dtype}, which not every device of this target has"


def unfit(function: tirx.PrimFunc) -> str | None:
    """Why no GPU can run a kernel; ``None`` if there is no reason."""
    reasons: list[str] = []

    def see_assert(_node: Any) -> None:
        reasons.append("it checks sizes while the model runs, and a GPU's kernel cannot raise")

    def see_call(node: Any) -> None:
        name = getattr(node.op, "name", "")
        if name in ("tirx.tvm_call_packed", "tirx.tvm_call_cpacked"):
            reasons.append(f"its kernel calls {node.args[0]}, a function of the host")

    tvm_ffi.structural_walk(
        function, [(tirx.AssertStmt, see_assert), (tvm.ir.Call, see_call)], order="post"
    )
    scratch = scratch_bytes(function)
    if scratch is None or scratch > MAX_SCRATCH:
        size = "memory of a size that depends on its inputs" if scratch is None else f"{scratch} B"
        reasons.append(f"each thread of its kernel would need {size}")
    return reasons[0] if reasons else None
