"""Fold per-channel scales and shifts in front of a convolution or Gemm into it.

    Conv(s x + t, W, b) = Conv(x, W s, b + sum over W of t)

A shift goes only into a convolution without padding: what is padded around ``s x + t`` are zeros,
not ``t``. The products are computed in float64 and rounded once.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from hybridc.passes.editor import Array, Editor, contents, dims_of, only_reader
from hybridc.passes.fold_affine import AFFINE, Affine, affine_of, is_float_constant


class FoldAffineBefore(ir.passes.InPlacePass):
    """Folds until no convolution or Gemm reads something that folds."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Fold in the main graph."""
        editor = Editor(model.graph)
        for node in list(model.graph):
            while node.graph is not None and _fold_producer(editor, node):
                pass
        return ir.passes.PassResult(model, editor.modified)


def _fold_producer(editor: Editor, node: ir.Node) -> bool:
    """Fold what computes the data of ``node`` into it, if only that reads it."""
    if node.domain or node.op_type not in ("Conv", "Gemm") or len(node.inputs) < 2:
        return False
    value = node.inputs[0]
    producer = None if value is None else value.producer()
    if value is None or producer is None or producer.op_type not in AFFINE:
        return False
    if producer.graph is not node.graph or only_reader(value) is not node:
        return False
    weight = contents(node.inputs[1]) if is_float_constant(node.inputs[1]) else None
    old = contents(node.inputs[2]) if len(node.inputs) > 2 else None
    given = len(node.inputs) > 2 and node.inputs[2] is not None
    if weight is None or (given and old is None):
        return False
    channels = _input_channels(node, weight)
    source, affine = (None, None) if channels is None else _source(producer, value, channels)
    if source is None or affine is None or (affine.shift.any() and not _takes_shift(node)):
        return False
    if _has_bias_to_change(node, old) or not affine.shift.any():
        _change(editor, node, weight, old, affine)
        node.replace_input_with(0, source)
        editor.remove_dead(producer)
        editor.modified = True
        return True
    return False


def _input_channels(node: ir.Node, weight: Array) -> int | None:
    if node.op_type == "Conv":
        return int(weight.shape[1]) * node.attributes.get_int("group", 1)
    if node.attributes.get_int("transA", 0) or weight.ndim != 2:
        return None
    return int(weight.shape[1 if node.attributes.get_int("transB", 0) else 0])


def _source(
    producer: ir.Node, value: ir.Value, channels: int
) -> tuple[ir.Value | None, Affine | None]:
    """What ``producer`` scales and shifts, and by how much."""
    dims = dims_of(value)
    for source in producer.inputs[:2]:
        if source is None or source.const_value is not None or dims_of(source) != dims:
            continue
        affine = affine_of(producer, source, channels)
        if affine is not None:
            return source, affine
    return None, None


def _takes_shift(node: ir.Node) -> bool:
    """Whether a node adds no zeros around its input."""
    if node.op_type == "Gemm":
        return True
    padding = node.attributes.get_string("auto_pad", "NOTSET")
    pads = node.attributes.get("pads")
    return padding == "VALID" or (padding == "NOTSET" and (pads is None or not any(pads.value)))


def _has_bias_to_change(node: ir.Node, old: Array | None) -> bool:
    """Whether a summand for each output channel can be added to what is there."""
    if node.op_type == "Conv" or old is None:
        return True
    return node.attributes.get_float("beta", 1.0) == 1.0 and old.ndim <= 2


def _change(
    editor: Editor, node: ir.Node, weight: Array, old: Array | None, affine: Affine
) -> None:
    wide = weight.astype(np.float64)
    scale, shift = _spread(node, weight, affine.scale), _spread(node, weight, affine.shift)
    scaled = (wide * scale).astype(weight.dtype)
    node.replace_input_with(1, editor.constant(scaled, f"{node.name}__weight"))
    if not affine.shift.any():
        return
    summand = _summed(node, wide * shift)
    total = summand if old is None else old.astype(np.float64) + summand
    if len(node.inputs) < 3:
        node.resize_inputs(3)
    bias = editor.constant(total.astype(weight.dtype), f"{node.name}__bias")
    node.replace_input_with(2, bias)


def _spread(node: ir.Node, weight: Array, channels: Array) -> Array:
    """One number for each input channel, shaped to broadcast over the weights."""
    if node.op_type == "Gemm":
        return channels if node.attributes.get_int("transB", 0) else channels[:, None]
    groups = node.attributes.get_int("group", 1)
    rows = channels.reshape(groups, 1, -1).repeat(weight.shape[0] // groups, axis=1)
    result: Array = rows.reshape(*weight.shape[:2], *(1,) * (weight.ndim - 2))
    return result


def _summed(node: ir.Node, products: Array) -> Array:
    """What a shift adds to each output channel."""
    if node.op_type == "Conv":
        return np.asarray(products.sum(axis=tuple(range(1, products.ndim))))
    axis = 1 if node.attributes.get_int("transB", 0) else 0
    return np.asarray(products.sum(axis=axis) * node.attributes.get_float("alpha", 1.0))
