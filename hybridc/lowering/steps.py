"""Dimensions that go in steps: the declared ranges, in a form that proofs about shapes can use.

A network halves and doubles its sizes, and the branches that meet again fit only for multiples of
some number. A dimension of 32..960 in steps of 32 is ``32 k`` with k in 1..30, so that a halving
and a doubling after it are proved to give it back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import tvm_ffi
from tvm import relax, tirx

from hybridc.frontend.shapes import Range
from hybridc.lowering.call import as_expression, dtype_of, read_dims, shape_of
from hybridc.lowering.scope import Context
from hybridc.lowering.value import Dim, Expression

RANGES = "hybridc.ranges"
"""Attribute of a function: lowest and highest value of variables in shapes, by name."""


@dataclass(frozen=True)
class Steps:
    """The dynamic dimensions of a section.

    Attributes:
        sizes: What stands for a dimension's variable, where it goes in steps.
        bounds: Lowest and highest value of the variables that are left.
    """

    sizes: Mapping[Any, Dim]
    bounds: Mapping[Any, tuple[int, int]]


def in_steps(context: Context, ranges: Mapping[str, Range]) -> Steps:
    """Variables for the numbers of steps, computed where the builder stands."""
    sizes, bounds = {}, {}
    for name, variable in context.dimensions.items():
        if name not in ranges:
            continue
        size = ranges[name]
        rest, number = size.low % size.step, variable
        if size.step > 1:
            number = _number_of_steps(context.builder, variable, size.step)
            sizes[variable] = number * size.step + rest
        bounds[number] = (size.low - rest) // size.step, (size.high - rest) // size.step
    return Steps(sizes, bounds)


def _number_of_steps(builder: relax.BlockBuilder, size: Any, step: int) -> Any:
    """A new variable; by way of a tensor, since TVM puts what it can see through in its place."""
    quotient = tirx.floordiv(size, as_expression(step))
    tensor = builder.emit(relax.op.shape_to_tensor(relax.ShapeExpr([quotient])))
    return read_dims(builder, tensor, 1)[0]


def with_dimensions(
    builder: relax.BlockBuilder, tensor: Expression, sizes: Mapping[Any, Dim]
) -> Expression:
    """A tensor with expressions in place of variables in its shape; checked when it runs."""
    shape = [
        dim
        if isinstance(dim, int)
        else tvm_ffi.structural_map(dim, (tirx.Var, lambda v: sizes.get(v, v)))
        for dim in shape_of(tensor)
    ]
    if not any(dim in sizes for dim in shape_of(tensor)):
        return tensor
    dims = [as_expression(dim) for dim in shape]
    return builder.match_cast(tensor, relax.TensorType(dims, dtype_of(tensor)))
