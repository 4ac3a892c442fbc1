"""Kernels written as loops and stores, for what tensor expressions cannot say.

A tensor expression gives every element of its result by a formula. Where elements depend on one
another (sorting, suppression), on a running count, or on a number of iterations that is data, the
kernel is a small program instead: a function that is called once, while compiling, and leaves its
loops, conditions and stores behind. It is not fused with its neighbors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

from tvm import relax, te, tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as script

from hybridc.lowering.call import Call, as_dim, as_expression
from hybridc.lowering.ops.common import Own, emit_kernel
from hybridc.lowering.value import Dim, Expression


@dataclass(frozen=True)
class Array:
    """A tensor inside a program: read and written by index."""

    buffer: Any

    @property
    def shape(self) -> tuple[Dim, ...]:
        """Its dimensions, as the kernel sees them."""
        return tuple(as_dim(dim) for dim in self.buffer.shape)

    @property
    def dtype(self) -> str:
        """numpy's name of its element type."""
        return str(self.buffer.dtype)

    def __getitem__(self, index: Any) -> Any:
        return tirx.BufferLoad(self.buffer, _indices(index))

    def __setitem__(self, index: Any, value: Any) -> None:
        if isinstance(value, int | float | bool):
            value = tirx.const(value, self.dtype)
        script.buffer_store(self.buffer, value, _indices(index))


def _indices(index: Any) -> list[Any]:
    items = index if isinstance(index, tuple) else (index,)
    return [as_expression(item) for item in items]


Program: TypeAlias = Callable[..., None]
"""Called with a function that translates dimensions, the arrays it reads, those it writes."""


def emit_program(
    call: Call,
    program: Program,
    results: Sequence[tuple[Sequence[Dim], str]],
    *operands: Expression,
    name: str,
) -> list[Expression]:
    """Bind the results of a program.

    Args:
        call: The node being lowered.
        program: Writes every element of the results.
        results: Shape and element type of each result.
        operands: Tensors that it reads.
        name: Name of the kernel.

    Returns:
        One tensor per result.
    """

    def kernel(own: Own, *tensors: te.Tensor) -> Any:
        def body(sources: Sequence[Any], targets: Sequence[Any]) -> Any:
            with IRBuilder() as builder:
                # One enclosing loop holds the statements together.
                with script.serial(as_expression(0), as_expression(1)):
                    program(own, *map(Array, sources), *map(Array, targets))
                return builder.get()

        shapes = [tuple(as_expression(own(dim)) for dim in shape) for shape, _ in results]
        dtypes = [dtype for _, dtype in results]
        return te.extern(shapes, list(tensors), body, name=name, dtype=dtypes)

    result = emit_kernel(call, kernel, *operands, name=name, fused=False)
    if len(results) == 1:
        return [result]
    return [call.emit(relax.TupleGetItem(result, index)) for index in range(len(results))]


@contextmanager
def count(extent: Any, start: Any = 0, parallel: bool = False) -> Iterator[Any]:
    """A loop of ``extent`` iterations; gives the int64 counter, which begins at ``start``."""
    loop = script.parallel if parallel else script.serial
    with loop(as_expression(start), as_expression(start) + as_expression(extent)) as counter:
        yield counter


@contextmanager
def when(condition: Any) -> Iterator[None]:
    """Statements under a condition."""
    with script.If(condition), script.Then():
        yield


@contextmanager
def repeat_while(condition: Any) -> Iterator[None]:
    """A loop that goes on as long as a condition, which reads arrays, holds."""
    with script.While(condition):
        yield


def local(dtype: str, value: Any, size: int = 1) -> Array:
    """A few variables of a program's own, set to ``value``; by index."""
    array = Array(script.alloc_buffer((size,), dtype, scope="local"))
    for index in range(size):
        array[index] = value
    return array


def divisor(dim: Dim) -> Any:
    """A dimension to divide an index by; 1 for an empty one, which has no index."""
    return tirx.max(as_expression(dim), tirx.const(1, "int64"))


def unraveled(position: Any, shape: Sequence[Dim]) -> list[Any]:
    """Index of an element from its number in the order of memory."""
    index: list[Any] = []
    for dim in reversed(shape):
        index.insert(0, tirx.floormod(position, divisor(dim)))
        position = tirx.floordiv(position, divisor(dim))
    return index


def equals(left: Any, right: Dim) -> Any:
    """Whether two int64 expressions are equal, as an expression."""
    return tirx.EQ(as_expression(left), as_expression(right))
