"""Move large channels of what matrix products read into their weights, after SmoothQuant.

    x W  =  (x / s) (s W)        s_j = |x_j|^a / |W_j|^(1-a), by largest magnitudes over samples

One scale for all of ``x`` must reach to its largest channel; in transformers a few channels are
many times larger than the others, which then have few steps left. Weights, which have a scale for
each filter, take a part of that. All products that read one tensor share its ``s``. Scales are
powers of two, so that nothing is rounded by the change itself.

The division is a product with a constant. It is computed in the kernel that makes ``x`` or in the
one that quantizes it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np
import onnx
import onnx_ir as ir

from hybridc.passes.editor import Array, Editor, contents, dims_of
from hybridc.precision.observe import Channels
from hybridc.precision.qdq import channel_axis
from hybridc.precision.weights import drop_unread

PRODUCTS = ("MatMul", "Gemm")

SHARES = (0.5, 0.65, 0.8, 0.9)
"""Exponents ``a`` that are tried: 1 moves everything into the weights."""

LARGEST, LEAST_GAIN = 64.0, 0.9
"""The largest scale, and the share of the expected error below which smoothing pays."""


def smooth(
    model: onnx.ModelProto, nodes: Collection[str], channels: Mapping[str, Channels]
) -> onnx.ModelProto:
    """A model that computes the same, with channels of more equal magnitude.

    Args:
        model: The model.
        nodes: Names of nodes that are to be quantized.
        channels: What occurred at each position of the last axis, by name of a tensor.
    """
    whole = ir.from_proto(model)
    editor = Editor(whole.graph)
    readers: dict[ir.Value, list[ir.Node]] = {}
    for node in whole.graph:
        data = node.inputs[0] if node.inputs else None
        if node.name in nodes and node.op_type in PRODUCTS and data is not None:
            readers.setdefault(data, []).append(node)
    for data, products in readers.items():
        seen = channels.get(str(data.name))
        if seen is not None and all(_is_plain(node, len(seen.largest)) for node in products):
            _smooth(editor, data, products, seen)
    if not editor.modified:
        return model
    result = ir.to_proto(whole)
    drop_unread(result)
    return result


def _is_plain(node: ir.Node, summed: int) -> bool:
    """Whether a product sums over the last axis of its data, with a matrix that nobody shares."""
    weight = contents(node.inputs[1])
    value = node.inputs[1]
    if weight is None or value is None or weight.ndim != 2 or len(list(value.uses())) != 1:
        return False
    if node.attributes.get_int("transA", 0) != 0:
        return False
    return bool(weight.shape[1 - channel_axis(node, 2)] == summed)


def best_scales(seen: Channels, weight: Array) -> Array | None:
    """The scales that are expected to help most; ``None`` if none help.

    Args:
        seen: What occurred in the data's channels.
        weight: What they are multiplied with, with a row for each.
    """
    rows = np.abs(weight).max(axis=1)
    candidates = [scales_of(seen.largest, rows, share) for share in SHARES]
    errors = [expected_error(seen, weight, scales) for scales in candidates]
    best = int(np.argmin(errors))
    plain = expected_error(seen, weight, np.ones(len(rows), np.float32))
    return candidates[best] if errors[best] < LEAST_GAIN * plain else None


def expected_error(seen: Channels, weight: Array, scales: Array) -> float:
    """The mean square of what rounding data and weights adds to a product, up to a factor.

    Rounding errors are taken to be independent, each with a twelfth of its squared step.
    """
    scaled = np.square(weight.astype(np.float64) * scales[:, None])
    data_step = (seen.largest / scales).max() / 255
    weight_steps = scaled.max(axis=0) / 127**2
    of_weights = weight_steps.sum() * (seen.mean_squares / np.square(scales)).sum()
    return float(data_step**2 * scaled.sum() + of_weights)


def scales_of(data: Array, weight: Array, share: float) -> Array:
    """The powers of two nearest to what the channels of data are to be divided by.

    Args:
        data: Largest magnitude of each channel.
        weight: The same of the weights that it is multiplied with.
        share: One of ``SHARES``.
    """
    smallest = np.float64(np.finfo(np.float32).tiny)
    data, weight = (np.maximum(a.astype(np.float64), smallest) for a in (data, weight))
    scales = data**share / weight ** (1 - share)
    scales = np.clip(scales / np.median(scales), 1 / LARGEST, LARGEST)
    powers: Array = np.exp2(np.rint(np.log2(scales))).astype(np.float32)
    return powers


def _smooth(editor: Editor, data: ir.Value, products: list[ir.Node], seen: Channels) -> None:
    rows = [_rows(node) for node in products]
    scales = best_scales(seen, np.concatenate(rows, axis=1))
    if scales is None:
        return
    inverse = editor.constant((1 / scales).astype(np.float32), f"{data.name}__smooth")
    divided = editor.emit(products[0], "Mul", [data, inverse], dims_of(data))
    for node, array in zip(products, rows, strict=True):
        scaled = array * scales[:, None]
        if channel_axis(node, 2) == 0:
            scaled = scaled.T
        value = node.inputs[1]
        assert value is not None
        node.replace_input_with(1, editor.constant(scaled, f"{value.name}__smooth"))
        node.replace_input_with(0, divided)
    editor.modified = True


def _rows(node: ir.Node) -> Array:
    """The weight with the axis that is summed over first."""
    weight = contents(node.inputs[1])
    assert weight is not None
    return weight if channel_axis(node, 2) == 1 else weight.T
