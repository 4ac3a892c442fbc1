"""Tiles that do not divide their axis: the last tile is moved back instead of cut.

Splitting an axis of 197 into tiles of 6 leaves a predicate ``outer * 6 + inner < 197`` on every
block below. A predicate inside a register tile keeps it from being unrolled and vectorized, so
the last tile is made to start at 191 instead: every tile is whole, and a few elements are
computed twice with the same result. That is sound for a block whose tile is initialized, reduced
and written inside one iteration of the tile's outer loops, which the rules here guarantee; only
data-parallel axes are ever moved.

A rule marks the loops inside a tile with :func:`mark_tile`; :func:`move_tails` runs once after
scheduling, because a schedule accepts only affine bindings.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import tvm
import tvm_ffi
from tvm import tirx
from tvm.s_tir import SBlockRealize, Schedule

MARK = "hybridc.tile"


def mark_tile(schedule: Schedule, *loops: Any) -> None:
    """Say that these loops run over the inside of a tile whose last copy may be moved back."""
    for loop in loops:
        schedule.annotate(loop, MARK, 1)


def move_tails(function: tirx.PrimFunc) -> tuple[tirx.PrimFunc, list[Any]]:
    """Replace the predicates that cut marked tiles by start positions that need none.

    Returns:
        The function, and what must be true of unknown sizes for it to be right.

    Raises:
        ValueError: A predicate on a marked tile has an unexpected form; nothing can be said
            about the function's correctness and another rule must be used.
    """
    tiles = _Tiles(set(), tvm.sym.Analyzer())
    tvm_ffi.structural_walk(function.body, (tirx.For, tiles.add))
    if not tiles.inside:
        return function, []
    body = tvm_ffi.structural_map(
        function.body,
        [(SBlockRealize, lambda realize: _move(realize, tiles)), (tirx.For, _without_mark)],
    )
    return function.with_body(body), tiles.needed


@dataclass
class _Tiles:
    """The loops' variables, those of marked loops, and an analyzer that knows their ranges.

    What the moved tiles need is collected: that an axis of unknown size has room for one.
    """

    inside: set[tirx.Var]
    analyzer: Any
    loops: set[tirx.Var] = field(default_factory=set)
    needed: list[Any] = field(default_factory=list)

    def add(self, loop: tirx.For) -> None:
        self.loops.add(loop.loop_var)
        self.analyzer.bind(loop.loop_var, tvm.ir.Range.from_min_extent(loop.min, loop.extent))
        if MARK in loop.annotations:
            self.inside.add(loop.loop_var)


def _without_mark(loop: tirx.For) -> tirx.For:
    if MARK not in loop.annotations:
        return loop
    annotations = {key: value for key, value in loop.annotations.items() if key != MARK}
    return tirx.For(
        loop.loop_var,
        loop.min,
        loop.extent,
        loop.kind,
        loop.body,
        thread_binding=loop.thread_binding,
        annotations=annotations,
    )


def _move(realize: SBlockRealize, tiles: _Tiles) -> SBlockRealize:
    kept: list[Any] = []
    moved: list[Any] = []
    for condition in _conjuncts(realize.predicate):
        (moved if variables_of(condition) & tiles.inside else kept).append(condition)
    if not moved:
        return realize
    values = list(realize.iter_values)
    for condition in moved:
        _move_axis(realize, values, condition, tiles)
    predicate = tirx.const(True, "bool")
    for condition in kept:
        predicate = tirx.And(predicate, condition)
    return SBlockRealize(values, tiles.analyzer.simplify(predicate), realize.block)


def _move_axis(realize: SBlockRealize, values: list[Any], condition: Any, tiles: _Tiles) -> None:
    """Rewrite in ``values`` the binding that ``condition`` bounds."""
    if not isinstance(condition, tirx.LT):
        raise ValueError(f"unexpected predicate on a tile: {condition}")
    analyzer = tiles.analyzer
    position, bound = analyzer.simplify(condition.a), condition.b
    if variables_of(bound) & tiles.loops:
        raise ValueError(f"predicate {condition} has a bound that moves")
    axes = [
        axis
        for axis, value in enumerate(values)
        if variables_of(position) & tiles.inside & variables_of(value)
    ]
    if len(axes) != 1 or realize.block.iter_vars[axes[0]].iter_type != tirx.IterVar.DataPar:
        raise ValueError(f"predicate {condition} does not bound one data-parallel axis")
    rest = analyzer.simplify(values[axes[0]] - position)
    if variables_of(rest) & variables_of(position):
        raise ValueError(f"predicate {condition} does not bound an axis by itself")
    zero = tirx.IntImm(position.ty.dtype, 0)
    start = analyzer.simplify(substitute(position, dict.fromkeys(tiles.inside, zero)))
    offset = analyzer.simplify(position - start)
    if not variables_of(offset) <= tiles.inside:
        raise ValueError(f"predicate {condition} mixes the inside of a tile with its position")
    span = int(analyzer.const_int_bound(offset).max_value) + 1
    if isinstance(bound, tirx.IntImm):
        if span > int(bound):
            raise ValueError(f"tile of {span} is larger than its axis of {bound}")
    else:
        tiles.needed.append(bound >= span)
    last = analyzer.simplify(bound - span)
    values[axes[0]] = analyzer.simplify(rest + tirx.min(start, last) + offset)


def substitute(expression: Any, mapping: dict[tirx.Var, Any]) -> Any:
    """The expression with variables replaced."""
    return tvm_ffi.structural_map(
        expression, (tirx.Var, lambda variable: mapping.get(variable, variable))
    )


def _conjuncts(predicate: Any) -> list[Any]:
    if isinstance(predicate, tirx.And):
        return [*_conjuncts(predicate.a), *_conjuncts(predicate.b)]
    return [] if isinstance(predicate, tirx.IntImm) and int(predicate) else [predicate]


def variables_of(expression: Any) -> set[tirx.Var]:
    """The variables that occur in an expression."""
    found: set[tirx.Var] = set()
    tvm_ffi.structural_walk(expression, (tirx.Var, lambda variable: found.add(variable)))
    return found
