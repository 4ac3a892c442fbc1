"""Recognize a softmax that was written out.

    e = exp(x - max(x));  e / sum(e)  =  Softmax(x)

Before opset 13, Softmax flattens the axes from ``axis`` on, so there only the last axis will do.
"""

from __future__ import annotations

import onnx_ir as ir
from hybridc.passes.editor import Editor, dims_of, reduced_axes
from hybridc.passes.pattern import Match, Variable, match, operation

_FIRST_PER_AXIS = 13
"""Opset from which Softmax works along one axis."""


class RecognizeSoftmax(ir.passes.InPlacePass):
    """Replaces written-out softmaxes of the main graph."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Replace; the maximum must be subtracted, since without it large inputs overflow."""
        editor = Editor(model.graph)
        x = Variable("x")
        power = operation("Exp", x - operation("ReduceMax", x, label="max"))
        pattern = operation("Div", power, operation("ReduceSum", power, label="sum"))
        for node in list(model.graph):
            if node.op_type != "Div" or node.domain or node.graph is None:
                continue
            found = match(pattern, node.outputs[0])
            axis = None if found is None else _axis(model, found)
            if found is not None and axis is not None:
                x_value = found.values["x"]
                result = editor.emit(node, "Softmax", [x_value], dims_of(x_value), {"axis": axis})
                editor.replace(node.outputs[0], result)
        return ir.passes.PassResult(model, editor.modified)


def _axis(model: ir.Model, found: Match) -> int | None:
    """The one axis that both reductions work along."""
    x = found.values["x"]
    dims = dims_of(x)
    if dims is None or x.dtype is None or not x.dtype.is_floating_point():
        return None
    reductions = [node for node in found.inside if node.op_type.startswith("Reduce")]
    axes = {reduced_axes(node) for node in reductions}
    kept = all(node.attributes.get_int("keepdims", 1) == 1 for node in reductions)
    (first, *others) = axes
    if others or not kept or first is None or len(first) != 1:
        return None
    last = first[0] == len(dims) - 1
    return first[0] if last or model.graph.opset_imports[""] >= _FIRST_PER_AXIS else None
