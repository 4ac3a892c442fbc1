"""What an ONNX value can be while its graph is lowered.

    Expression   a tensor that exists at run time (a relax expression)
    Constant     a tensor known at compile time; becomes a weight only where a kernel reads it
    Integers     a short integer tensor whose elements are known as expressions of the symbolic
                 dimensions: what Shape and the arithmetic after it produce
    Narrow       a tensor of a narrow type, such as int4 or float8: the bytes that hold its numbers
    Widened      a tensor of a type of 16 bits that is kept in float32 until its type matters
    TensorList   a sequence of the above, of a length known at compile time
    Absent       an optional that holds nothing; one that holds a value is that value

Keeping constants and integers apart from tensors is what lets Reshape, Slice, Resize and their
like take their sizes from the graph without any tensor being computed at run time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

Dim: TypeAlias = Any
"""One dimension: a Python int, or a ``tirx`` expression of symbolic dimensions."""

Expression: TypeAlias = Any
"""A ``relax`` expression of tensor type."""


@dataclass(frozen=True)
class Constant:
    """A tensor known at compile time.

    Attributes:
        name: The ONNX name of the value; weights are stored under it.
        array: Its contents.
    """

    name: str
    array: np.ndarray[Any, Any]


@dataclass(frozen=True)
class Integers:
    """An integer tensor of rank 0 or 1 whose elements are known as expressions.

    Attributes:
        elements: The elements in order, each an int or a ``tirx`` expression of dtype int64.
        rank: 0 for a scalar, 1 for a vector.
        dtype: numpy's name of the ONNX element type.
    """

    elements: tuple[Dim, ...]
    rank: int = 1
    dtype: str = "int64"

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the tensor that this stands for."""
        return (len(self.elements),) if self.rank else ()


@dataclass(frozen=True)
class Narrow:
    """A tensor of a type that no target computes with: numbers of a byte or less.

    Attributes:
        codes: The bytes that hold the numbers, an expression or a constant of the carrier's type;
            see :data:`hybridc.bundle.dtypes.NARROW`.
        dtype: numpy's name of the narrow type.
    """

    codes: Any
    dtype: str


@dataclass(frozen=True)
class Widened:
    """A tensor of float16 or bfloat16, in float32: see :mod:`hybridc.lowering.widening`.

    Attributes:
        tensor: Its numbers, not rounded yet: an expression or a constant of float32.
        dtype: numpy's name of the type that the model gives it.
    """

    tensor: Any
    dtype: str


@dataclass(frozen=True)
class TensorList:
    """An ONNX sequence of tensors.

    Attributes:
        items: The tensors in order, each an expression, a constant or known integers.
    """

    items: tuple[Any, ...]


@dataclass(frozen=True)
class Absent:
    """An ONNX optional without an element."""


Value: TypeAlias = Any
"""``Expression | Constant | Integers | Narrow | Widened | TensorList | Absent``."""
