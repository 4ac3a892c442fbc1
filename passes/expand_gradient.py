"""Expand Gradient of ai.onnx.preview.training: the derivatives of a scalar, by reverse mode.

The nodes between the variables and the scalar are walked from the last one to the first. Each adds
to the gradients of its inputs what its rule makes of the gradient of its output:

    gradient[input] += gradient[output] * d output / d input

A Gradient over other operators than those with a rule, or over operands that are broadcast, stays.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import numpy as np
import onnx_ir as ir
from hybridc.passes.editor import Editor, dims_of, same_shape

DOMAIN = "ai.onnx.preview.training"

Emit: TypeAlias = Callable[..., ir.Value]
"""Called with an operator and its inputs, which are of one shape."""


class ExpandGradient(ir.passes.InPlacePass):
    """Replaces Gradient in the main graph by nodes that compute it."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Expand; shapes and types must have been inferred before."""
        editor = Editor(model.graph)
        for node in list(model.graph):
            if (node.domain, node.op_type) == (DOMAIN, "Gradient"):
                _expand(editor, node)
        if editor.modified:
            model.graph.sort()  # what a Gradient looks at may stand behind it
        return ir.passes.PassResult(model, editor.modified)


def _expand(editor: Editor, node: ir.Node) -> None:
    names = list(node.attributes["xs"].as_strings())
    variables = [value for value in node.inputs if value is not None]
    # Inputs of other names stand for these ones in a second evaluation of the graph.
    if [value.name for value in variables] != names:
        return
    scalar = _value_of(editor.graph, node.attributes.get_string("y", ""))
    if scalar is None or dims_of(scalar) != () or scalar.dtype is None:
        return
    path = _path(variables, scalar)
    if path is None:
        return
    one = editor.constant(np.ones((), scalar.dtype.numpy()), f"{node.outputs[0].name}__one")
    gradients = _gradients(_emitter(editor, node), path, {scalar: one})
    if all(variable in gradients for variable in variables):
        for output, variable in zip(node.outputs, variables, strict=True):
            editor.replace(output, gradients[variable])


def _emitter(editor: Editor, node: ir.Node) -> Emit:
    def emit(operator: str, *inputs: ir.Value) -> ir.Value:
        return editor.emit(node, operator, inputs, dims_of(inputs[0]))

    return emit


def _value_of(graph: ir.Graph, name: str | None) -> ir.Value | None:
    """The result of a node of the graph that has a name."""
    values = (value for node in graph for value in node.outputs)
    return next((value for value in values if value.name == name), None)


def _path(variables: Sequence[ir.Value], scalar: ir.Value) -> list[ir.Node] | None:
    """The nodes between the variables and the scalar, or ``None`` if one of them has no rule."""
    graph = scalar.graph
    if graph is None:
        return None
    dependent, between = set(variables), []
    for node in graph:
        reads = any(value in dependent for value in node.inputs) or _has_graph(node)
        if reads and dependent.isdisjoint(node.outputs):
            dependent.update(node.outputs)
            between.append(node)
    needed, path = {scalar}, []
    for node in reversed(between):
        if not needed.isdisjoint(node.outputs):
            if not _has_rule(node):
                return None
            needed.update(value for value in node.inputs if value is not None)
            path.append(node)
    return path


def _has_graph(node: ir.Node) -> bool:
    """Whether a node may read values that are not among its inputs."""
    kinds = (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS)
    return any(attribute.type in kinds for attribute in node.attributes.values())


def _has_rule(node: ir.Node) -> bool:
    arity = _RULES[node.op_type][0] if node.op_type in _RULES and not node.domain else None
    return len(node.inputs) == arity and all(same_shape(v, node.outputs[0]) for v in node.inputs)


def _gradients(
    emit: Emit, path: Sequence[ir.Node], known: Mapping[ir.Value, ir.Value]
) -> dict[ir.Value, ir.Value]:
    """The gradients of all values on a path, which begins at its end, from that of its end."""
    gradients = dict(known)
    for node in path:
        inputs = [value for value in node.inputs if value is not None]
        _, rule = _RULES[node.op_type]
        parts = rule(emit, gradients[node.outputs[0]], node.outputs[0], *inputs)
        for value, part in zip(inputs, parts, strict=True):
            before = gradients.get(value)
            gradients[value] = part if before is None else emit("Add", before, part)
    return gradients


def _divided(emit: Emit, g: ir.Value, y: ir.Value, _a: ir.Value, b: ir.Value) -> list[ir.Value]:
    quotient = emit("Div", g, b)
    return [quotient, emit("Neg", emit("Mul", quotient, y))]


def _squashed(emit: Emit, g: ir.Value, y: ir.Value, _x: ir.Value) -> list[ir.Value]:
    return [emit("Sub", g, emit("Mul", g, emit("Mul", y, y)))]


def _logistic(emit: Emit, g: ir.Value, y: ir.Value, _x: ir.Value) -> list[ir.Value]:
    part = emit("Mul", g, y)
    return [emit("Sub", part, emit("Mul", part, y))]


Rule: TypeAlias = Callable[..., "list[ir.Value]"]

_RULES: dict[str, tuple[int, Rule]] = {
    "Add": (2, lambda emit, g, y, a, b: [g, g]),
    "Cos": (1, lambda emit, g, y, x: [emit("Neg", emit("Mul", g, emit("Sin", x)))]),
    "Div": (2, _divided),
    "Exp": (1, lambda emit, g, y, x: [emit("Mul", g, y)]),
    "Identity": (1, lambda emit, g, y, x: [g]),
    "Log": (1, lambda emit, g, y, x: [emit("Div", g, x)]),
    "Mul": (2, lambda emit, g, y, a, b: [emit("Mul", g, b), emit("Mul", g, a)]),
    "Neg": (1, lambda emit, g, y, x: [emit("Neg", g)]),
    "Sigmoid": (1, _logistic),
    "Sin": (1, lambda emit, g, y, x: [emit("Mul", g, emit("Cos", x))]),
    "Sqrt": (1, lambda emit, g, y, x: [emit("Div", g, emit("Add", y, y))]),
    "Sub": (2, lambda emit, g, y, a, b: [g, emit("Neg", g)]),
    "Tanh": (1, _squashed),
}
"""Number of inputs, and what a rule makes of the output's gradient, the output and the inputs."""
