"""Recognize layer normalization and root-mean-square normalization from their parts.

    d = x - mean(x);  d / sqrt(mean(d^2) + epsilon) * scale + bias      LayerNormalization
    x / sqrt(mean(x^2) + epsilon) * scale                               RMSNormalization

over the last axes. LayerNormalization entered ONNX with opset 17 and RMSNormalization with 23; a
model that cannot be raised that far keeps the parts.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from hybridc.passes.editor import Editor, contents, dims_of, number, reduced_axes
from hybridc.passes.pattern import Match, Pattern, Variable, match, operation, over_root, square
from hybridc.passes.raise_opset import ensure_opset

_OPSETS = {"LayerNormalization": 17, "RMSNormalization": 23}
_ROOTS = frozenset(("Add", "Mul", "Div"))


class RecognizeNormalizations(ir.passes.InPlacePass):
    """Replaces written-out normalizations of the main graph."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Replace; forms with scale and bias come before those without."""
        editor = Editor(model.graph)
        for operator, pattern in _forms():
            for node in list(model.graph):
                if node.op_type not in _ROOTS or node.domain or node.graph is None:
                    continue
                found = match(pattern, node.outputs[0])
                if found is not None:
                    _replace(model, editor, node, operator, found)
        return ir.passes.PassResult(model, editor.modified)


def _forms() -> list[tuple[str, Pattern]]:
    x = Variable("x")
    epsilon = Variable("epsilon", lambda value: number(value) is not None)
    scale = Variable("scale", lambda value: contents(value) is not None)
    bias = Variable("bias", lambda value: contents(value) is not None)

    def mean(operand: Pattern, label: str) -> Pattern:
        return operation("ReduceMean", operand, label=label)

    deviation = x - mean(x, "mean")
    layer = over_root(deviation, mean(square(deviation), "variance") + epsilon)
    root_mean = over_root(x, mean(square(x), "variance") + epsilon)
    return [
        ("LayerNormalization", operation("Mul", layer, scale) + bias),
        ("LayerNormalization", operation("Mul", layer, scale)),
        ("LayerNormalization", layer),
        ("RMSNormalization", operation("Mul", root_mean, scale)),
        ("RMSNormalization", root_mean),
    ]


def _replace(model: ir.Model, editor: Editor, node: ir.Node, operator: str, found: Match) -> None:
    x = found.values["x"]
    axis, epsilon = _first_axis(found), number(found.values["epsilon"])
    if axis is None or epsilon is None or not _is_fit(x, node):
        return
    inner = _inner_shape(x, axis)
    if inner is None:
        return
    parameters = []
    for name in ("scale", "bias"):
        array = contents(found.values.get(name))
        if array is None and name == "scale":
            assert x.dtype is not None
            array = np.ones(inner, x.dtype.numpy())
        if array is not None:
            if not _spreads(array, inner):
                return
            parameters.append(np.broadcast_to(array.reshape(_last(array.shape, inner)), inner))
    if not ensure_opset(model, _OPSETS[operator]):
        return
    base = str(node.outputs[0].name)
    constants = [editor.constant(np.ascontiguousarray(p), f"{base}__scale") for p in parameters]
    attributes = {"axis": axis, "epsilon": epsilon}
    result = editor.emit(node, operator, [x, *constants], dims_of(x), attributes)
    editor.replace(node.outputs[0], result)


def _is_fit(x: ir.Value, node: ir.Node) -> bool:
    dims, result = dims_of(x), dims_of(node.outputs[0])
    same_rank = dims is not None and result is not None and len(dims) == len(result)
    return same_rank and x.dtype is not None and x.dtype.is_floating_point()


def _first_axis(found: Match) -> int | None:
    """The first of the normalized axes if they are the last ones of ``x`` in every reduction."""
    dims = dims_of(found.values["x"])
    first = None
    for node in found.inside:
        if node.op_type != "ReduceMean":
            continue
        axes = reduced_axes(node)
        if dims is None or not axes or node.attributes.get_int("keepdims", 1) != 1:
            return None
        if axes != tuple(range(axes[0], len(dims))) or first not in (None, axes[0]):
            return None
        first = axes[0]
    return first


def _inner_shape(x: ir.Value, axis: int) -> tuple[int, ...] | None:
    dims = dims_of(x)
    assert dims is not None
    inner = [dim for dim in dims[axis:] if isinstance(dim, int)]
    return tuple(inner) if len(inner) == len(dims) - axis else None


def _last(shape: tuple[int, ...], inner: tuple[int, ...]) -> tuple[int, ...]:
    """A shape without the ones in front of the normalized axes."""
    return shape[max(len(shape) - len(inner), 0) :]


def _spreads(array: np.ndarray, inner: tuple[int, ...]) -> bool:
    """Whether a scale or bias is the same for everything in front of the normalized axes."""
    front = array.shape[: max(array.ndim - len(inner), 0)]
    if any(dim != 1 for dim in front):
        return False
    return all(
        dim in (1, whole)
        for dim, whole in zip(_last(array.shape, inner)[::-1], inner[::-1], strict=False)
    )
