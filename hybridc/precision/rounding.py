"""Weights of layers that stay float in an int8 model, rounded so that a bundle stores them in less.

They stay tensors of float32. What float16 holds is stored in 16 bits. Multiples of a power of two
that fit 8 bits are such numbers, too, and deflate to little more than integers do.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import numpy as np
import onnx
from onnx import numpy_helper

from hybridc.bundle.tensors import Array

HALF_ERROR = 1e-3
"""Largest error of a weight in float16, relative to the largest magnitude of its filter."""

_WEIGHT = 1
_LARGEST = 127

_LEAST_STEP = 2.0**-24
"""The smallest number above zero in float16. A filter of smaller numbers makes results that are
zero beside those of the others once all are rounded by one scale."""


def round_weights(model: onnx.ModelProto, layers: Collection[str]) -> None:
    """Round the weights of some layers to numbers of float16, where these are close enough."""
    _replace_weights(model, layers, _in_halves)


def round_to_steps(model: onnx.ModelProto, layers: Collection[str]) -> None:
    """Round the weights of some layers to 8 bits, multiples of a power of two for each filter."""
    _replace_weights(model, layers, _in_steps)


def _replace_weights(
    model: onnx.ModelProto, layers: Collection[str], change: Callable[[Array], Array]
) -> None:
    names = {node.input[_WEIGHT] for node in model.graph.node if node.name in layers}
    for tensor in model.graph.initializer:
        if tensor.name in names:
            changed = change(numpy_helper.to_array(tensor))
            tensor.CopyFrom(numpy_helper.from_array(changed, tensor.name))


def _in_halves(weight: Array) -> Array:
    with np.errstate(over="ignore"):
        rounded = weight.astype(np.float16).astype(np.float32)
    is_close = np.all(np.abs(rounded - weight) <= HALF_ERROR * _largest(weight))
    return rounded if is_close else weight


def _in_steps(weight: Array) -> Array:
    least = np.maximum(_largest(weight) / _LARGEST, _LEAST_STEP)
    step = np.exp2(np.ceil(np.log2(least))).astype(np.float32)
    return np.asarray(np.rint(weight / step) * step)


def _largest(weight: Array) -> Array:
    """The largest magnitude of each filter."""
    return np.asarray(np.abs(weight).max(axis=tuple(range(1, weight.ndim)), keepdims=True))
