"""Raise the opset that a model imports, so that newer operators may stand in it.

Most operators mean the same from one version on and only gain element types and optional inputs.
The rest changed in one of these ways, each with a rule here:

    Reduce*, Squeeze, Unsqueeze, Split    an attribute became an input
    Softmax, LogSoftmax                   flattened all axes from ``axis`` on
    Resize                                empty inputs became inputs left out

All or nothing: a model that holds an operator outside of both tables stays at its opset.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import onnx
import onnx_ir as ir
from hybridc.passes.editor import Editor, contents, dims_of

Change = Callable[[], None]
Rule = Callable[[ir.Node, Editor], "Change | None"]

NEWEST = 23
"""Highest opset that the tables below were made for."""

_SAME_SINCE = {
    1: "AveragePool Cast Concat Constant Conv ConvTranspose DepthToSpace Flatten Gather "
    "GlobalAveragePool GlobalLpPool GlobalMaxPool Identity If LRN LpNormalization MatMul MaxPool "
    "Shape Size Softplus Softsign SpaceToDepth Transpose",
    5: "Reshape",
    6: "Abs Ceil Elu Exp Floor HardSigmoid InstanceNormalization LeakyRelu Log Max Mean Min Neg "
    "Reciprocal Relu Selu Sigmoid Sqrt Sum Tanh Tile",
    7: "Acos Add And Asin Atan Cos Div Equal Gemm Greater GRU Less LSTM Mul Not Or Pow PRelu RNN "
    "Sin Sub Tan Xor",
    8: "Expand",
    9: "Acosh Asinh Atanh BatchNormalization ConstantOfShape Cosh Erf EyeLike IsNaN "
    "MeanVarianceNormalization NonZero Sign Sinh Where",
    10: "DequantizeLinear IsInf Mod NonMaxSuppression QuantizeLinear ReverseSequence Slice "
    "ThresholdedRelu TopK",
    11: "ArgMax ArgMin Clip CumSum Det GatherElements GatherND Loop OneHot Pad Range Round "
    "ScatterElements ScatterND",
    12: "Celu Einsum GreaterOrEqual LessOrEqual",
    14: "HardSwish Trilu",
    17: "LayerNormalization",
}
"""Operators by a version from which on they mean the same."""


def ensure_opset(model: ir.Model, version: int) -> bool:
    """Raise the opset to ``version`` if it is lower and that can be done exactly.

    Returns:
        Whether the model imports that opset, or a newer one, now.
    """
    graph = model.graph
    current = graph.opset_imports.get("", 0)
    if current >= version:
        return True
    if model.functions or not current >= 7 or version > NEWEST:
        return False
    editor = Editor(graph)
    changes = []
    for node in ir.traversal.RecursiveGraphIterator(graph):
        change = None if node.domain else _change(node, current, version, editor)
        if change is None and not node.domain:
            return False
        changes.append(change)
    for change in changes:
        if change is not None:
            change()
    graph.opset_imports[""] = version
    return True


def _change(node: ir.Node, current: int, version: int, editor: Editor) -> Change | None:
    """What has to be done for one node; ``None`` if it cannot be raised."""
    try:
        old, new = (
            onnx.defs.get_schema(node.op_type, opset).since_version for opset in (current, version)
        )
    except onnx.defs.SchemaError:
        return None
    if old == new or _same_since(node.op_type) <= old:
        return _nothing
    known = _RULES.get(node.op_type)
    if known is None or old < known.lowest:
        return None
    return known.rule(node, editor) if old < known.changed <= new else _nothing


def _same_since(operator: str) -> int:
    for version, operators in _SAME_SINCE.items():
        if operator in operators.split():
            return version
    return NEWEST + 1


def _nothing() -> None:
    """No change."""


def _axes_to_input(node: ir.Node, editor: Editor) -> Change | None:
    if len(node.inputs) > 1 or "axes" not in node.attributes:
        return _nothing
    axes = np.array(node.attributes["axes"].value, np.int64)

    def change() -> None:
        node.attributes.pop("axes")
        node.resize_inputs(2)
        node.replace_input_with(1, editor.constant(axes, f"{node.outputs[0].name}__axes"))

    return change


def _split(node: ir.Node, editor: Editor) -> Change | None:
    """Sizes as an input; they are known from an attribute or from the shapes of the results."""
    if len(node.inputs) > 1 and node.inputs[1] is not None:
        return _nothing
    sizes = node.attributes["split"].value if "split" in node.attributes else _sizes(node)
    if sizes is None:
        return None

    def change() -> None:
        node.attributes.pop("split", None)
        node.resize_inputs(2)
        array = np.array(sizes, np.int64)
        node.replace_input_with(1, editor.constant(array, f"{node.outputs[0].name}__split"))

    return change


def _sizes(node: ir.Node) -> list[int] | None:
    axis = node.attributes.get_int("axis", 0)
    sizes = []
    for value in node.outputs:
        dims = dims_of(value)
        size = None if dims is None else dims[axis]
        if not isinstance(size, int):
            return None
        sizes.append(size)
    return sizes


def _softmax(node: ir.Node, _editor: Editor) -> Change | None:
    """Along one axis, if there is nothing but ones behind it."""
    dims = dims_of(node.inputs[0])
    if not dims:
        return None
    axis = node.attributes.get_int("axis", 1) % len(dims)
    if any(dim != 1 for dim in dims[axis + 1 :]):
        return None

    def change() -> None:
        node.attributes["axis"] = ir.AttrInt64("axis", axis)

    return change


def _resize(node: ir.Node, _editor: Editor) -> Change | None:
    mode = node.attributes.get_string("coordinate_transformation_mode", "half_pixel")
    if mode == "tf_half_pixel_for_nn":
        return None
    empty = []
    for index, value in enumerate(node.inputs[1:], 1):
        array = contents(value)
        if array is not None and array.size == 0:
            empty.append(index)

    def change() -> None:
        for index in empty:
            node.replace_input_with(index, None)

    return change


@dataclass(frozen=True)
class _Known:
    """An operator that changed.

    Attributes:
        lowest: The lowest version that the rule reads.
        changed: The version that brought the change; all others only add to the one before.
        rule: What to do.
    """

    lowest: int
    changed: int
    rule: Rule


_RULES = {
    **{
        f"Reduce{name}": _Known(1, 18, _axes_to_input)
        for name in "L1 L2 LogSum LogSumExp Max Mean Min Prod SumSquare".split()
    },
    "ReduceSum": _Known(1, 13, _axes_to_input),
    "Squeeze": _Known(1, 13, _axes_to_input),
    "Unsqueeze": _Known(1, 13, _axes_to_input),
    "Split": _Known(2, 13, _split),
    "Softmax": _Known(1, 13, _softmax),
    "LogSoftmax": _Known(1, 13, _softmax),
    "Resize": _Known(11, 13, _resize),
}
