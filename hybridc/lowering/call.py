"""One ONNX node on its way to Relax: what a converter sees and what it may ask for.

A converter is a function ``(Call) -> Value`` (or a tuple of values for several outputs). It reads
inputs and attributes through the call, builds with ``relax.op`` functions or with tensor
expressions, and refuses what it cannot do exactly by raising :class:`Unsupported` with a reason.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import onnx_ir as ir
from tvm import relax, tirx

from hybridc.lowering.value import (
    Absent,
    Constant,
    Dim,
    Expression,
    Integers,
    Narrow,
    TensorList,
    Value,
)


class Unsupported(Exception):
    """A converter's refusal; its message is the reason that the user reads."""


class Invalid(Unsupported):
    """The node breaks ONNX's rules for every input of these shapes: nothing can run it."""


class RanksDiffer(Unsupported):
    """The branches of an If have results of different ranks, so that no one value holds both."""

    def __init__(self) -> None:
        super().__init__("the branches' results have different ranks")


@dataclass(frozen=True)
class Call:
    """A node with its inputs already lowered.

    Attributes:
        node: The ONNX node; its attributes are read with :meth:`attribute`.
        inputs: Lowered inputs in order; ``None`` for an optional input left out.
        opset: Version of the node's domain that the model imports.
        builder: The block builder of the function under construction.
        weight: Turns a constant into an expression that reads the weight at run time.
        lower_graph: Lowers a subgraph where the builder stands, given values for its inputs, and
            returns its outputs.
    """

    node: ir.Node
    inputs: Sequence[Value | None]
    opset: int
    builder: relax.BlockBuilder
    weight: Callable[[Constant], Expression]
    lower_graph: Callable[[ir.Graph, Mapping[ir.Value, Value]], list[Value]]

    def with_inputs(self, inputs: Sequence[Value | None]) -> Call:
        """The same node on other inputs."""
        return dataclasses.replace(self, inputs=inputs)

    def has(self, index: int) -> bool:
        """Whether the optional input ``index`` is given."""
        return index < len(self.inputs) and self.inputs[index] is not None

    def is_known(self, index: int) -> bool:
        """Whether :meth:`integers` can tell input ``index`` while compiling."""
        return isinstance(self.value(index), Constant | Integers)

    def attribute(self, name: str, default: Any = None) -> Any:
        """Value of an attribute as a plain Python object, or ``default`` if it is not set."""
        attribute = self.node.attributes.get(name)
        if attribute is None:
            return default
        value = attribute.value
        if attribute.type in (ir.AttributeType.INTS, ir.AttributeType.FLOATS):
            return list(value)
        return value

    def value(self, index: int) -> Value:
        """Input ``index`` in whatever form it has; raises if it was left out."""
        if not self.has(index):
            raise Unsupported(f"input {index} is missing")
        return self.inputs[index]

    def _tensor_value(self, index: int) -> Value:
        value = self.value(index)
        return _checked_tensor(value.codes if isinstance(value, Narrow) else value)

    def tensor(self, index: int) -> Expression:
        """Input ``index`` as a run-time tensor."""
        return self.materialize(self.value(index))

    def tensors(self) -> list[Expression]:
        """All given inputs as run-time tensors."""
        return [self.materialize(value) for value in self.inputs if value is not None]

    def constant(self, index: int, what: str) -> np.ndarray[Any, Any]:
        """Input ``index`` as a compile-time array; refuses, naming ``what``, if it is not one."""
        value = self.value(index)
        if isinstance(value, Constant):
            return value.array
        if isinstance(value, Integers) and all(isinstance(e, int) for e in value.elements):
            return np.array(value.elements, value.dtype).reshape(value.shape)
        raise Unsupported(f"{what} must be known at compile time")

    def integers(self, index: int, what: str) -> list[Dim]:
        """Input ``index`` as a flat list of ints or shape expressions; refuses otherwise."""
        value = self.value(index)
        if isinstance(value, Integers):
            return list(value.elements)
        return [int(element) for element in np.ravel(self.constant(index, what))]

    def dims_of(self, tensor: Expression, what: str) -> list[Dim]:
        """Elements of a run-time integer tensor of rank 0 or 1 as dimensions.

        The tensor is read on the host when the model runs. Its elements must be sizes already:
        not negative, nothing left to resolve; a kernel before this does that where it is needed.
        """
        shape = shape_of(tensor)
        if len(shape) > 1 or not all(isinstance(dim, int) for dim in shape):
            raise Unsupported(f"{what} must have a known length")
        count = shape[0] if shape else 1
        if dtype_of(tensor) != "int64":
            tensor = self.emit(relax.op.astype(tensor, "int64"))
        if not shape:
            tensor = self.emit(relax.op.reshape(tensor, (1,)))
        return read_dims(self.builder, tensor, count)

    def shape(self, index: int) -> tuple[Dim, ...]:
        """Shape of input ``index``; ints where a dimension is known."""
        value = self._tensor_value(index)
        if isinstance(value, Constant):
            return tuple(value.array.shape)
        return value.shape if isinstance(value, Integers) else shape_of(value)

    def static_shape(self, index: int, what: str) -> tuple[int, ...]:
        """Shape of input ``index``, refusing if a dimension is symbolic."""
        shape = self.shape(index)
        if not all(isinstance(dim, int) for dim in shape):
            raise Unsupported(f"{what} must have a static shape")
        return shape

    def rank(self, index: int) -> int:
        """Number of dimensions of input ``index``."""
        return len(self.shape(index))

    def dtype(self, index: int) -> str:
        """Element type of input ``index`` by numpy's name."""
        if isinstance(self.value(index), Narrow):
            return str(self.value(index).dtype)
        value = self._tensor_value(index)
        if isinstance(value, Constant):
            return str(value.array.dtype)
        return value.dtype if isinstance(value, Integers) else dtype_of(value)

    def axis(self, default: int, index: int = 0) -> int:
        """Attribute ``axis`` counted from the front of input ``index``'s shape."""
        axis = int(self.attribute("axis", default))
        rank = self.rank(index)
        if not -rank <= axis < max(rank, 1):
            raise Unsupported(f"axis {axis} is out of range for rank {rank}")
        return axis + rank if axis < 0 else axis

    def emit(self, expression: Expression) -> Expression:
        """Bind an expression to a variable, inferring its shape and type."""
        return self.builder.emit(expression)

    def emit_te(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> Expression:
        """Bind the result of a tensor-expression function over lowered tensors."""
        return self.builder.emit_te(function, *arguments, **options)

    def materialize(self, value: Value) -> Expression:
        """Any lowered value as a run-time tensor."""
        if isinstance(value, Constant):
            return self.weight(value)
        if isinstance(value, Integers):
            return self._integers_tensor(value)
        return _checked_tensor(value)

    def _integers_tensor(self, value: Integers) -> Expression:
        if all(isinstance(element, int) for element in value.elements):
            array = np.array(value.elements, value.dtype).reshape(value.shape)
            return self.weight(Constant("integers", array))
        shape = relax.ShapeExpr([as_expression(element) for element in value.elements])
        tensor = self.emit(relax.op.shape_to_tensor(shape))
        if value.rank == 0:
            tensor = self.emit(relax.op.reshape(tensor, ()))
        return tensor if value.dtype == "int64" else self.emit(relax.op.astype(tensor, value.dtype))


def read_dims(builder: relax.BlockBuilder, tensor: Expression, count: int) -> list[Dim]:
    """The elements of an int64 vector of ``count``, read when the model runs, as dimensions."""
    # Reading is marked impure because TVM's fusion may move a kernel in front of the dimensions
    # that it uses, but not across an impure call.
    reader = relax.ExternFunc("vm.builtin.tensor_to_shape")
    call = relax.Call(reader, [tensor], ty_args=[relax.ShapeType(ndim=count)])
    prefix = builder.get_unique_name("size")
    dims = [tirx.Var(f"{prefix}_{index}", "int64") for index in range(count)]
    builder.match_cast(builder.emit(call), relax.ShapeType(dims))
    return dims


Converter: TypeAlias = Callable[[Call], "Value | tuple[Value, ...]"]


@dataclass(frozen=True)
class Operator:
    """One row of the operator table.

    Attributes:
        name: ONNX operator type.
        convert: The converter.
        since: First opset version of the domain that the converter is right for.
        domain: ONNX domain; empty for the default one.
    """

    name: str
    convert: Converter
    since: int = 1
    domain: str = ""


def _checked_tensor(value: Value) -> Value:
    if isinstance(value, TensorList | Absent):
        raise Unsupported("a sequence or an empty optional stands where a tensor is needed")
    if isinstance(value, Narrow):
        raise Unsupported(f"an operand of type {value.dtype}; cast it to another type first")
    return value


def shape_of(expression: Expression) -> tuple[Dim, ...]:
    """Shape of a relax tensor; ints where a dimension is known."""
    return tuple(as_dim(dim) for dim in expression.ty.shape.values)


def dtype_of(expression: Expression) -> str:
    """Element type of a relax tensor by numpy's name."""
    return str(expression.ty.dtype)


def as_dim(dim: Any) -> Dim:
    """A dimension as an int where it is constant, otherwise as it is."""
    return int(dim) if isinstance(dim, int | tirx.IntImm) else dim


def as_expression(dim: Dim) -> Any:
    """A dimension as a ``tirx`` expression of dtype int64."""
    return tirx.IntImm("int64", dim) if isinstance(dim, int) else dim
