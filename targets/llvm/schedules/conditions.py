"""Conditions that hold for a whole vector or for none of it, written so that TVM sees it.

A concatenation chooses by ``bound <= channel``. Where vectors of channels start at multiples of
their length and so does the bound, the vector's start may be compared in place of each lane. TVM
then makes vectors of the choice, where it would otherwise take it apart into lanes.
"""

from __future__ import annotations

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
    lanes = int(loop.extent)

    def start_of(value: Any, bound: Any) -> Any | None:
        is_known = isinstance(bound, tirx.IntImm) and int(bound) % lanes == 0
        return starts.get(value) if is_known and isinstance(value, tirx.Var) else None

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


def _starts(loop: tirx.For) -> dict[Any, Any]:
    """What a vector starts from, by the variable of a block that counts from there."""
    found = {}
    lanes, analyzer = int(loop.extent), tvm.sym.Analyzer()
    for realize in collect(loop.body, SBlockRealize):
        for axis, value in zip(realize.block.iter_vars, realize.iter_values, strict=True):
            parts = tvm.sym.detect_linear_equation(value, [loop.loop_var])
            if len(parts) != 2 or not isinstance(parts[0], tirx.IntImm) or int(parts[0]) != 1:
                continue
            steps = analyzer.modular_set(parts[1])
            if int(steps.coeff) % lanes == 0 and int(steps.base) % lanes == 0:
                found[axis.var] = parts[1]
    return found
