"""Lower one part of a model: its nodes, in order, to one Relax function.

The function is ``main(input 0, input 1, ..., weights)`` and returns a tuple of the part's
outputs. The weights are one tuple, so that a call passes one handle however many there are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx_ir as ir
import tvm
from tvm import relax, te, tirx

from hybridc.errors import InternalError, UnsupportedError
from hybridc.lowering import symbolic
from hybridc.lowering.call import Call, Unsupported, dtype_of, shape_of
from hybridc.lowering.ops import OperatorTable
from hybridc.lowering.value import Constant, Dim, Expression, Integers, Value

INLINE_BYTES = 16
"""Constants of at most this size are written into the code instead of the weights."""


@dataclass(frozen=True)
class Section:
    """What is lowered together: a convex piece of a graph, with its borders.

    Attributes:
        nodes: Nodes in topological order.
        inputs: Values that come from outside at run time.
        outputs: Values that are used outside.
        opsets: Imported version by domain.
    """

    nodes: Sequence[ir.Node]
    inputs: Sequence[ir.Value]
    outputs: Sequence[ir.Value]
    opsets: Mapping[str, int]


@dataclass(frozen=True)
class Lowered:
    """A lowered section.

    Attributes:
        module: Relax module with the function ``main``.
        weights: The weights' arrays by ONNX name, in the order of ``main``'s last argument.
        results: Shape and element type of each output; symbolic dimensions are expressions.
    """

    module: tvm.IRModule
    weights: Mapping[str, np.ndarray[Any, Any]]
    results: tuple[tuple[tuple[Dim, ...], str], ...]


@dataclass
class _State:
    """Values lowered so far, and the weights that they read."""

    builder: relax.BlockBuilder
    dimensions: dict[str, tirx.Var] = field(default_factory=dict)
    values: dict[ir.Value, Value] = field(default_factory=dict)
    weights: dict[str, tuple[np.ndarray[Any, Any], relax.Var]] = field(default_factory=dict)

    def weight(self, constant: Constant) -> Expression:
        if constant.array.nbytes <= INLINE_BYTES:
            return relax.const(constant.array, str(constant.array.dtype))
        if constant.name not in self.weights:
            kind = relax.TensorType(constant.array.shape, str(constant.array.dtype))
            variable = relax.Var(f"weight_{len(self.weights)}", kind)
            self.weights[constant.name] = (constant.array, variable)
        return self.weights[constant.name][1]


def lower(section: Section, table: OperatorTable) -> Lowered:
    """Lower a section to a Relax module.

    Raises:
        UnsupportedError: Some nodes have no converter or were refused; it lists all of them.
    """
    state = _State(relax.BlockBuilder())
    parameters = [_parameter(state, i, value) for i, value in enumerate(section.inputs)]
    state.values.update(zip(section.inputs, parameters, strict=True))
    attributes = {"num_input": len(parameters), "global_symbol": "main"}
    with state.builder.function("main", attrs=attributes):
        with state.builder.dataflow():
            reasons = list(_lower_nodes(section, table, state))
            if reasons:
                state.builder.emit_output(relax.Tuple([]))
            else:
                outputs = [_output(state, value, parameters) for value in section.outputs]
                result = state.builder.emit_output(relax.Tuple(outputs))
        if reasons:
            raise UnsupportedError("these nodes cannot be compiled:", tuple(reasons))
        variables = [variable for _, variable in state.weights.values()]
        state.builder.emit_func_output(result, [*parameters, *variables])
    module = relax.transform.BundleModelParams()(state.builder.finalize())
    weights = {name: array for name, (array, _) in state.weights.items()}
    return Lowered(module, weights, tuple((shape_of(o), dtype_of(o)) for o in outputs))


def _lower_nodes(
    section: Section, table: OperatorTable, state: _State
) -> Iterator[tuple[str, str, str]]:
    """Lower the nodes into ``state``; yield ``(node, operator, reason)`` for each that fails.

    A node behind a failed one is not judged: its inputs do not exist.
    """
    failed: set[ir.Value] = set()
    for node in section.nodes:
        if any(value in failed for value in node.inputs):
            failed.update(node.outputs)
            continue
        try:
            results = lower_node(node, section.opsets, table, state)
        except Unsupported as refusal:
            failed.update(node.outputs)
            yield node.name or "?", node.op_type, str(refusal)
        else:
            state.values.update(zip(node.outputs, results, strict=False))


def lower_node(
    node: ir.Node, opsets: Mapping[str, int], table: OperatorTable, state: _State
) -> tuple[Value, ...]:
    """Lower one node; raises :class:`Unsupported` with the reason if it cannot be."""
    inputs = [None if value is None else _value(state, value) for value in node.inputs]
    opset = opsets.get(node.domain, 1)
    call = Call(node, inputs, opset, state.builder, state.weight)
    known = symbolic.evaluate(call)
    if known is not None:
        return (known,)
    convert = table.find(node.domain, node.op_type, opset)
    if convert is None:
        domain = node.domain or "ai.onnx"
        raise Unsupported(f"{domain} {node.op_type} at opset {opset} has no converter")
    try:
        results = convert(call)
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        raise Unsupported(f"lowering failed: {_first_line(error)}") from error
    return results if isinstance(results, tuple) else (results,)


def _value(state: _State, value: ir.Value) -> Value:
    if value in state.values:
        return state.values[value]
    if value.const_value is None:
        raise InternalError(f"value {value.name!r} is read before it is computed")
    constant = Constant(str(value.name), value.const_value.numpy())
    state.values[value] = constant
    return constant


def _parameter(state: _State, index: int, value: ir.Value) -> relax.Var:
    if value.shape is None or value.dtype is None:
        raise InternalError(f"value {value.name!r} crosses parts without a shape or type")
    shape = [_dimension(state, dim) for dim in value.shape]
    return relax.Var(f"input_{index}", relax.TensorType(shape, value.dtype.numpy().name))


def _dimension(state: _State, dim: int | ir.SymbolicDim) -> Any:
    if isinstance(dim, int):
        return dim
    name = str(dim.value)
    return state.dimensions.setdefault(name, tirx.Var(name, "int64"))


def _output(state: _State, value: ir.Value, parameters: Sequence[relax.Var]) -> Expression:
    """An output as a tensor of its own: never an input or a weight handed back."""
    lowered = _value(state, value)
    if isinstance(lowered, Integers):
        call = Call(ir.node("Identity", []), [lowered], 1, state.builder, state.weight)
        return call.tensor(0)
    fresh = not isinstance(lowered, Constant) and lowered not in parameters
    if fresh:
        return lowered
    source = state.weight(lowered) if isinstance(lowered, Constant) else lowered
    return state.builder.emit_te(_copy, source)


def _copy(tensor: te.Tensor) -> te.Tensor:
    return te.compute(tensor.shape, lambda *index: tensor(*index), name="copy")


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
