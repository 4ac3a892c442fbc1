"""Put the channels of quantized convolutions last, where integer kernels want them.

QLinearConv and MaxPool over 8-bit images become the operators of ONNX Runtime's domain that take
``(N, H, W, C)``, each between two transpositions. ``move_transposes.py`` then cancels these through
the element-wise work in between. A mean over whole images becomes ReduceMean, through which
transpositions can be moved, too.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir
from hybridc.passes.editor import Editor, contents, dims_of, static_shape
from hybridc.passes.infer_shapes import InferShapes
from hybridc.passes.quantization.fuse_regions import FIRST_TO_LAST, LAST_TO_FIRST, MICROSOFT
from hybridc.passes.quantization.quantized import MIN_FILTERS, without_filling

_BY_FILTER = (3, 4, 5, 8)
"""Inputs of QLinearConv that have an element for each filter: weight, scale, zero point, bias."""

_SCALES = (4, 5)
"""Those of them that may also be one number for all filters."""

_ACTIVATIONS = frozenset(("FastGelu", "Gelu", "QuickGelu"))
"""Operators of one input whose result has its shape."""

_AXES_INPUT = 18
"""Opset from which ReduceMean takes its axes as an input."""


class ChannelsLast(ir.passes.InPlacePass):
    """Moves the channels of the main graph's quantized images."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Change convolutions; pools only if there are any."""
        if any(node.op_type == "QLinearConv" for node in model.graph):
            _complete_shapes(model)
        editor = Editor(model.graph)
        for build in (_convolution, _max_pool, _mean):
            for node in list(model.graph):
                if not node.domain and static_shape(node.inputs[0] if node.inputs else None):
                    build(editor, node)
            if not editor.modified:
                break
        if editor.modified:
            model.graph.opset_imports.setdefault(MICROSOFT, 1)
        return ir.passes.PassResult(model, editor.modified)


def _complete_shapes(model: ir.Model) -> None:
    """Find shapes behind activations of ONNX Runtime's domain, which ONNX's inference stops at."""
    nodes = [node for node in model.graph if node.op_type in _ACTIVATIONS and node.domain]
    waiting = [node for node in nodes if node.outputs[0].shape is None]
    while waiting:
        known = [node for node in waiting if node.inputs[0] and node.inputs[0].shape is not None]
        if not known:
            return
        for node in known:
            source, result = node.inputs[0], node.outputs[0]
            assert source is not None
            result.shape, result.type = source.shape, source.type
        InferShapes()(model)
        waiting = [node for node in waiting if node.outputs[0].shape is None]


def _convolution(editor: Editor, node: ir.Node) -> None:
    if node.op_type != "QLinearConv":
        return
    weight, data = contents(node.inputs[3]), static_shape(node.inputs[0])
    if weight is None or weight.ndim != 4 or data is None:
        return
    groups = node.attributes.get_int("group", 1)
    depthwise = weight.shape[1] == 1 and groups == weight.shape[0] == data[1]
    few = weight.shape[0] < MIN_FILTERS
    if groups == 1 and few:
        _between(editor, node, "QLinearConv", {"channels_last": 1}, _filled_up(editor, node))
    elif (groups == 1 or depthwise) and not few:
        _between(editor, node, "QLinearConv", {"channels_last": 1})


def _filled_up(editor: Editor, node: ir.Node) -> list[ir.Value | None]:
    """The inputs of a QLinearConv with zeros for the filters that are missing."""
    inputs = list(node.inputs)
    for place in _BY_FILTER:
        value = inputs[place] if place < len(inputs) else None
        array = contents(value)
        if value is None or array is None or (place in _SCALES and array.size == 1):
            continue
        missing = MIN_FILTERS - array.shape[0]
        last = array[-1:] if array.dtype == np.float32 else np.zeros_like(array[-1:])
        whole = np.concatenate([array, *[last] * missing])  # a scale may not be zero
        inputs[place] = editor.constant(whole, f"{value.name}__filled")
    return inputs


def _max_pool(editor: Editor, node: ir.Node) -> None:
    dtype = node.outputs[0].dtype
    whole = len(node.outputs) == 1 and len(dims_of(node.inputs[0]) or ()) == 4
    if node.op_type != "MaxPool" or dtype not in (ir.DataType.INT8, ir.DataType.UINT8) or not whole:
        return
    _between(editor, node, "NhwcMaxPool", {})


def _between(
    editor: Editor,
    node: ir.Node,
    operator: str,
    more: dict[str, int],
    filled: list[ir.Value | None] | None = None,
) -> None:
    """An operator with channels last, between transpositions, in place of a node.

    With inputs that were filled up to MIN_FILTERS, channels are sliced off its result.
    """
    mode = node.attributes.get_string("auto_pad", "NOTSET")
    source, dims = node.inputs[0], static_shape(node.inputs[0])
    result = dims_of(node.outputs[0])
    if mode != "NOTSET" or source is None or dims is None or result is None:
        return
    last = editor.emit(
        node, "Transpose", [source], [dims[i] for i in FIRST_TO_LAST], {"perm": FIRST_TO_LAST}
    )
    attributes = {name: a.value for name, a in node.attributes.items() if name != "auto_pad"}
    sizes, dtype = [result[i] for i in FIRST_TO_LAST], node.outputs[0].dtype
    value = editor.emit(
        node,
        operator,
        [last, *(filled or node.inputs)[1:]],
        [*sizes[:3], MIN_FILTERS] if filled else sizes,
        {**attributes, **more},
        MICROSOFT,
        dtype=dtype,
    )
    if filled:
        value = without_filling(editor, node, value, sizes)
    back = editor.emit(node, "Transpose", [value], result, {"perm": LAST_TO_FIRST})
    editor.replace(node.outputs[0], back)


def _mean(editor: Editor, node: ir.Node) -> None:
    source, dims = node.inputs[0], static_shape(node.inputs[0])
    producer = None if source is None else source.producer()
    if producer is None or producer.op_type != "DequantizeLinear" or dims is None or len(dims) != 4:
        return
    if not (node.op_type == "GlobalAveragePool" or _is_global(node, dims)):
        return
    axes = [2, 3]
    inputs: list[ir.Value | None] = [source]
    attributes: dict[str, object] = {"keepdims": 1}
    if editor.graph.opset_imports.get("", 0) >= _AXES_INPUT:
        inputs.append(editor.constant(np.array(axes, np.int64), f"{node.outputs[0].name}__axes"))
    else:
        attributes["axes"] = axes
    result = editor.emit(node, "ReduceMean", inputs, dims_of(node.outputs[0]), attributes)
    editor.replace(node.outputs[0], result)


def _is_global(node: ir.Node, dims: Sequence[int]) -> bool:
    """Whether an AveragePool has one window, which is the image."""
    if node.op_type != "AveragePool" or "kernel_shape" not in node.attributes:
        return False
    pads = node.attributes.get("pads")
    return list(node.attributes["kernel_shape"].value) == list(dims[2:]) and not (
        pads is not None and any(pads.value)
    )
