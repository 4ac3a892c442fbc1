"""Recognize activation functions that an exporter wrote out, and make one node of each.

    x * 0.5 * (1 + erf(x / sqrt 2))                     Gelu
    x * 0.5 * (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))   Gelu, approximate
    x * sigmoid(a x)                                    QuickGelu; SiLU, or Swish, where a is 1
    x * clip(x + 3, 0, 6) / 6                           HardSwish
    clip(a x + b, 0, 1)                                 HardSigmoid

Gelu entered ONNX with opset 20 and HardSwish with opset 14. A model that cannot be raised that far
gets ONNX Runtime's Gelu, or HardSigmoid and a product, instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import pi, sqrt

import onnx_ir as ir
from hybridc.passes.editor import Editor, dims_of, number
from hybridc.passes.pattern import (
    Match,
    Pattern,
    Variable,
    clip,
    either,
    match,
    operation,
    product,
    square,
)
from hybridc.passes.raise_opset import ensure_opset

MICROSOFT = "com.microsoft"


class RecognizeActivations(ir.passes.InPlacePass):
    """Replaces written-out activations of the main graph."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Replace, larger forms before those that they contain."""
        editor = Editor(model.graph)
        for pattern, build in _forms():
            for node in list(model.graph):
                found = match(pattern, node.outputs[0]) if _may_be_root(node) else None
                if found is None or not _keeps_shape(found, node):
                    continue
                result = build(model, editor, node, found)
                if result is not None:
                    editor.replace(node.outputs[0], result)
        return ir.passes.PassResult(model, editor.modified)


_ROOTS = frozenset(("Mul", "Div", "Clip", "Min", "Max"))

Build = Callable[[ir.Model, Editor, ir.Node, Match], ir.Value | None]


def _may_be_root(node: ir.Node) -> bool:
    if node.op_type not in _ROOTS or node.domain or node.graph is None:
        return False
    dtype = node.outputs[0].dtype
    return dtype is not None and dtype.is_floating_point()


def _keeps_shape(found: Match, node: ir.Node) -> bool:
    """Whether constants leave the rank of the operand alone."""
    dims, result = dims_of(found.values["x"]), dims_of(node.outputs[0])
    return dims is not None and result is not None and len(dims) == len(result)


def _forms() -> Iterator[tuple[Pattern, Build]]:
    x = Variable("x")
    slope = Variable("alpha", lambda value: number(value) is not None)
    shift = Variable("beta", lambda value: number(value) is not None)
    yield product(x, 0.5, _one_plus(operation("Erf", x * sqrt(0.5)))), _gelu
    yield product(x, 0.5, _one_plus(operation("Tanh", _inner(x)))), _gelu_by_tanh
    hard = either(
        clip(x + 3, 0, 6) * (1 / 6),
        clip(x * (1 / 6) + 0.5, 0, 1),
        operation("HardSigmoid", x, alpha=1 / 6, beta=0.5),
    )
    yield either(product(x, clip(x + 3, 0, 6), 1 / 6), operation("Mul", x, hard)), _hard_swish
    yield clip(x + 3, 0, 6) * (1 / 6), _hard_sigmoid_of(1 / 6, 0.5)
    yield clip(operation("Mul", x, slope) + shift, 0, 1), _hard_sigmoid
    scaled = operation("Sigmoid", operation("Mul", x, slope))
    yield operation("Mul", x, scaled), _quick_gelu
    yield operation("Mul", x, operation("Sigmoid", x)), _silu
    yield operation("Div", x, _one_plus(operation("Exp", operation("Neg", x)))), _silu


def _one_plus(operand: Pattern) -> Pattern:
    return operand + 1


def _inner(x: Pattern) -> Pattern:
    """The argument of the hyperbolic tangent, in the forms that exporters write."""
    cube = either(
        operation("Pow", x, 3), operation("Mul", x, square(x)), operation("Mul", square(x), x)
    )
    third = either(
        cube * 0.044715, product(x, x, operation("Mul", x, 0.044715)), product(x, x * 0.044715, x)
    )
    root = sqrt(2 / pi)
    bent = either(square(x) * 0.044715, operation("Mul", x, x * 0.044715)) + 1
    return either((x + third) * root, product(x, root, bent))


def _is_float32(found: Match) -> bool:
    """Whether ONNX Runtime, which runs the model as the reference, has all functions for it."""
    return found.values["x"].dtype == ir.DataType.FLOAT


def _emit(
    editor: Editor, node: ir.Node, found: Match, operator: str, **attributes: object
) -> ir.Value:
    x = found.values["x"]
    return editor.emit(node, operator, [x], dims_of(x), attributes)


def _microsoft(
    model: ir.Model, editor: Editor, node: ir.Node, found: Match, name: str, **attributes: object
) -> ir.Value | None:
    if not _is_float32(found):
        return None
    x = found.values["x"]
    model.graph.opset_imports.setdefault(MICROSOFT, 1)
    return editor.emit(node, name, [x], dims_of(x), attributes, MICROSOFT)


def _gelu(model: ir.Model, editor: Editor, node: ir.Node, found: Match) -> ir.Value | None:
    if ensure_opset(model, 20):
        return _emit(editor, node, found, "Gelu")
    return _microsoft(model, editor, node, found, "Gelu")


def _gelu_by_tanh(model: ir.Model, editor: Editor, node: ir.Node, found: Match) -> ir.Value | None:
    if ensure_opset(model, 20):
        return _emit(editor, node, found, "Gelu", approximate="tanh")
    return _microsoft(model, editor, node, found, "FastGelu")


def _hard_swish(model: ir.Model, editor: Editor, node: ir.Node, found: Match) -> ir.Value | None:
    if not _is_float32(found):
        return None
    if ensure_opset(model, 14):
        return _emit(editor, node, found, "HardSwish")
    x = found.values["x"]
    gate = _emit(editor, node, found, "HardSigmoid", alpha=1 / 6, beta=0.5)
    return editor.emit(node, "Mul", [x, gate], dims_of(x))


def _hard_sigmoid_of(alpha: float, beta: float) -> Build:
    def build(_model: ir.Model, editor: Editor, node: ir.Node, found: Match) -> ir.Value | None:
        if not _is_float32(found):
            return None
        return _emit(editor, node, found, "HardSigmoid", alpha=alpha, beta=beta)

    return build


def _hard_sigmoid(model: ir.Model, editor: Editor, node: ir.Node, found: Match) -> ir.Value | None:
    alpha, beta = (number(found.values[name]) for name in ("alpha", "beta"))
    assert alpha is not None
    assert beta is not None
    return _hard_sigmoid_of(alpha, beta)(model, editor, node, found)


def _quick_gelu(model: ir.Model, editor: Editor, node: ir.Node, found: Match) -> ir.Value | None:
    alpha = number(found.values["alpha"])
    return _microsoft(model, editor, node, found, "QuickGelu", alpha=alpha)


def _silu(model: ir.Model, editor: Editor, node: ir.Node, found: Match) -> ir.Value | None:
    return _microsoft(model, editor, node, found, "QuickGelu", alpha=1.0)
