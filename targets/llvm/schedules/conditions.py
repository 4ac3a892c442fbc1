"""Conditions that hold for a whole vector or for none of it, written so that TVM sees it.

A concatenation chooses by ``bound <= channel``. Where vectors of channels start at multiples of
their length and so does the bound, the vector's start may be compared in place of each lane. TVM
then makes vectors of the choice, where it would otherwise take it apart into lanes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tvm
import tvm_ffi
from hybridc.targets.llvm.schedules.blocks import collect
from hybridc.targets.llvm.schedules.tails import variables_of
from tvm import tirx
from tvm.s_tir import SBlockRealize


def compare_starts(function: tirx.PrimFunc) -> tirx.PrimFunc:
    """The function with the starts of vectors compared where lanes cannot differ."""
    return function.with_body(tvm_ffi.structural_map(function.body, (tirx.For, _compared)))


def lane_variables(loop: tirx.For) -> set[Any]:
    """The variable of a loop, and those of blocks inside that depend on it."""
    found = {loop.loop_var}
    for realize in collect(loop.body, SBlockRealize):
        for axis, value in zip(realize.block.iter_vars, realize.iter_values, strict=True):
            if loop.loop_var in variables_of(value):
                found.add(axis.var)
    return found


def _compared(loop: tirx.For) -> tirx.For:
    if loop.kind != tirx.ForKind.VECTORIZED or not isinstance(loop.extent, tirx.IntImm):
        return loop
    starts = _starts(loop)
    if not starts:
        return loop
    lanes, varying = int(loop.extent), lane_variables(loop)

    def start_of(value: Any, bound: Any) -> Any | None:
        is_known = isinstance(bound, tirx.IntImm) and int(bound) % lanes == 0
        return _start_of(value, starts, varying, lanes) if is_known else None

    def compare(node: Any) -> Any:
        # ``bound <= value`` and its opposite; with ``<`` it is the other way round.
        left, right = node.a, node.b
        if isinstance(node, tirx.LE | tirx.GT):
            start = start_of(right, left)
            return node if start is None else type(node)(left, start)
        start = start_of(left, right)
        return node if start is None else type(node)(start, right)

    rule = ((tirx.LE, tirx.GT, tirx.LT, tirx.GE), compare)
    body = tvm_ffi.structural_map(loop.body, rule)
    return tirx.For(loop.loop_var, loop.min, loop.extent, loop.kind, body)


def _start_of(value: Any, starts: Mapping[Any, Any], varying: set[Any], lanes: int) -> Any | None:
    """What a vector of values starts from, if that is a multiple of its length.

    Args:
        value: Counts with the lanes if it counts with a variable.
        starts: By variable; multiples of the length.
        varying: All variables that are not the same for all lanes.
        lanes: The length.
    """
    if isinstance(value, tirx.Var):
        return starts.get(value)
    for variable in variables_of(value) & set(starts):
        rest = _less(value, variable)
        if rest is not None and _is_multiple(rest, lanes) and not variables_of(rest) & varying:
            return rest + starts[variable]
    return None


def _starts(loop: tirx.For) -> dict[Any, Any]:
    """What a vector starts from, by the variable of a block that counts from there."""
    found, lanes = {}, int(loop.extent)
    for realize in collect(loop.body, SBlockRealize):
        for axis, value in zip(realize.block.iter_vars, realize.iter_values, strict=True):
            rest = _less(value, loop.loop_var)
            if rest is not None and _is_multiple(rest, lanes):
                found[axis.var] = rest
    return found


def _less(value: Any, variable: Any) -> Any | None:
    """What a sum is without a variable; ``None`` if it does not count with that by ones."""
    parts = tvm.sym.detect_linear_equation(value, [variable])
    is_sum = len(parts) == 2 and isinstance(parts[0], tirx.IntImm) and int(parts[0]) == 1
    return parts[1] if is_sum else None


def _is_multiple(value: Any, lanes: int) -> bool:
    known = tvm.sym.Analyzer().modular_set(value)
    return int(known.coeff) % lanes == 0 and int(known.base) % lanes == 0
