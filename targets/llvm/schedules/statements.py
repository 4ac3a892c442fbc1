"""Statements of tensor programs that are written out rather than made by schedule primitives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tvm_ffi
from tvm import tirx


def int64(value: int) -> tirx.IntImm:
    """An index."""
    return tirx.IntImm("int64", value)


def index(value: Any) -> Any:
    """An index, or a number of them, that may be an expression."""
    return int64(value) if isinstance(value, int) else value


def bind(value: Any, statements: list[Any]) -> Any:
    """A variable for a value, which a statement added to the list binds."""
    variable = tirx.Var("value", value.ty)
    statements.append(tirx.Bind(variable, value))
    return variable


def let(value: Any, use: Callable[[Any], Any]) -> Any:
    """An expression that uses a value several times and computes it once.

    Truths in the value that are cast to numbers are chosen instead: TVM's analysis of what a
    variable is bound to cannot cast comparisons of vectors.
    """
    variable = tirx.Var("value", str(value.ty.dtype))
    bound = tvm_ffi.structural_map(value, (tirx.Cast, _chosen))
    return tirx.Let(variable, bound, use(variable))


def _chosen(cast: tirx.Cast) -> Any:
    if str(cast.value.ty.dtype) != "bool":
        return cast
    dtype = str(cast.ty.dtype)
    return tirx.Select(cast.value, tirx.const(1, dtype), tirx.const(0, dtype))


def serial_loop(extent: Any, body: Callable[[Any], Any], name: str, start: Any = 0) -> Any:
    """A serial loop; its variable is a constant if there is one iteration."""
    if isinstance(extent, int) and extent == 1 and isinstance(start, int):
        return body(int64(start))
    variable = tirx.Var(name, "int64")
    return tirx.For(variable, index(start), index(extent), tirx.ForKind.SERIAL, body(variable))


def prefetch(load: Any) -> Any:
    """A statement that asks for a cache line to be brought into the second-level cache."""
    read, second_level, data = (tirx.const(value, "int32") for value in (0, 2, 1))
    call = tirx.op.call_intrin(
        "void", "tirx.prefetch", tirx.address_of(load), read, second_level, data
    )
    return tirx.Evaluate(call)


def sequence(statements: Sequence[Any]) -> Any:
    """Statements one after the other; at least one."""
    return tirx.SeqStmt(list(statements)) if len(statements) > 1 else statements[0]
