"""Lower a section for a GPU: as for any target, but for nodes whose kernels a GPU cannot run."""

from __future__ import annotations

import dataclasses
from typing import Any

import tvm
import tvm_ffi
from hybridc.targets.gpu.schedules.programs import MAX_SCRATCH, scratch_bytes
from hybridc.targets.protocol import Section
from tvm import tirx

from hybridc.lowering.call import Call, Converter, Unsupported
from hybridc.lowering.lower import Lowered, lower
from hybridc.lowering.ops import OperatorTable, default_table
from hybridc.lowering.value import Value


def lower_for_gpu(section: Section) -> Lowered:
    """A section as a Relax module.

    Raises:
        UnsupportedError: Some nodes cannot run on a GPU; it lists all of them.
    """
    rows = default_table().rows
    guarded = (dataclasses.replace(row, convert=_guarded(row.convert)) for row in rows)
    return lower(section, OperatorTable(tuple(guarded)))


def _guarded(convert: Converter) -> Converter:
    """A converter that refuses its node if one of the kernels that it emits cannot run."""

    def convert_for_gpu(call: Call) -> Value | tuple[Value, ...]:
        before = set(call.builder.get().functions)
        result = convert(call)
        for variable, function in call.builder.get().functions.items():
            if variable not in before and isinstance(function, tirx.PrimFunc):
                reason = unfit(function)
                if reason is not None:
                    raise Unsupported(reason)
        return result

    return convert_for_gpu


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
