"""Functions that are scheduled for sizes from some number on, and plain for smaller ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tvm
import tvm_ffi
from hybridc.targets.llvm.sizes import ranges_of
from tvm import tirx
from tvm.s_tir import SBlock, SBlockRealize
from tvm.tirx.buffer import is_buffer_var


def with_alternative(
    function: tirx.PrimFunc, plain: tirx.PrimFunc, needed: Sequence[Any]
) -> tirx.PrimFunc:
    """A function that computes something in one of two ways.

    Args:
        function: The way to take where all of ``needed`` is true.
        plain: The other way, with the same parameters.
        needed: Conditions on sizes; the choice is left out where they are true for all sizes.
    """
    conditions = _open(needed, ranges_of(plain))
    if not conditions:
        return function
    chosen = tirx.IfThenElse(tirx.all(*conditions), function.body, _renewed(plain).body)
    root = SBlock([], [], [], "root", chosen)
    return function.with_body(SBlockRealize([], True, root))


def _renewed(function: tirx.PrimFunc) -> tirx.PrimFunc:
    """The function with other variables for its loops and buffers, but not for parameters."""
    fresh = tvm.s_tir.renew_defs(function)
    own: dict[Any, Any] = {}
    for new, old in zip(fresh.params, function.params, strict=True):
        own[new.__chandle__()] = old
        if is_buffer_var(new):
            for size, dim in zip(new.shape, old.shape, strict=True):
                if isinstance(size, tirx.Var):
                    own[size.__chandle__()] = dim
    body = tvm_ffi.structural_map(
        fresh.body, [(tvm.ir.Var, lambda variable: own.get(variable.__chandle__(), variable))]
    )
    return function.with_body(body)


def _open(needed: Sequence[Any], ranges: Any) -> list[Any]:
    """Conditions that are not true for all sizes, each once."""
    found: list[Any] = []
    for condition in needed:
        analyzer = tvm.sym.Analyzer()
        for variable in tirx.analysis.undefined_vars(condition):
            low, high = ranges.get(variable.name, (0, 1 << 40))
            analyzer.bind(variable, tvm.ir.Range(low, high + 1))
        known = any(tvm_ffi.structural_equal(condition, other) for other in found)
        if not known and not analyzer.can_prove(condition):
            found.append(condition)
    return found
