"""Layers that 8-bit integers make no faster, so that they stay float.

Integers pay where one instruction multiplies several bytes and adds the products up. A depthwise
convolution adds up few: what it gains by that is less than rounding its results costs. On x86-64
CPUs whose widest such instruction takes two numbers (AVX2 without VNNI) it is slower than in float,
and so is the layer in front of it, which has to round for it.

Their weights are few, so that they make a bundle hardly larger. These are rounded to 8 bits all the
same, to multiples of a power of two: as float16 they deflate to little more than integers do.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np
import onnx
from onnx import numpy_helper

from hybridc.bundle.tensors import Array
from hybridc.precision.anchors import anchors_of
from hybridc.targets.protocol import Device

_WEIGHT = 1
_LARGEST = 127

_LEAST_STEP = 2.0**-24
"""The smallest number above zero in float16. A filter of smaller numbers makes results that are
zero beside those of the others once all are rounded by one scale."""


def no_faster(model: onnx.ModelProto, devices: Sequence[Device]) -> tuple[str, ...]:
    """Names of the layers that no device computes faster on 8-bit integers, in order.

    None if there are no others: who asks for integers gets some.

    Args:
        model: A model with names.
        devices: What it is compiled for.
    """
    if not devices or not all(map(_has_only_pairs, devices)):
        return ()
    layers = anchors_of(model)
    shapes = {tensor.name: tensor.dims for tensor in model.graph.initializer}
    nodes = (node for node in model.graph.node if node.name in set(layers))
    slow = tuple(node.name for node in nodes if _is_depthwise(node, shapes))
    return slow if len(slow) < len(layers) else ()


def _has_only_pairs(device: Device) -> bool:
    """Whether a device is an x86-64 CPU that adds up two products in an instruction at most."""
    from hybridc.targets.llvm.cpu import parse_cpu

    if device.kind != "llvm":
        return False
    cpu = parse_cpu(device.specification)
    return cpu.architecture == "x86_64" and not cpu.llvm_features & {"avx512vnni", "avxvnni"}


def _is_depthwise(node: onnx.NodeProto, shapes: Mapping[str, Sequence[int]]) -> bool:
    groups = next((a.i for a in node.attribute if a.name == "group"), 1)
    return node.op_type == "Conv" and groups > 1 and shapes[node.input[_WEIGHT]][1] == 1


def round_to_steps(model: onnx.ModelProto, layers: Collection[str]) -> None:
    """Round the weights of some layers to 8 bits, multiples of a power of two for each filter."""
    names = {node.input[_WEIGHT] for node in model.graph.node if node.name in layers}
    for tensor in model.graph.initializer:
        if tensor.name in names:
            rounded = _rounded(numpy_helper.to_array(tensor))
            tensor.CopyFrom(numpy_helper.from_array(rounded, tensor.name))


def _rounded(weight: Array) -> Array:
    largest = np.abs(weight).max(axis=tuple(range(1, weight.ndim)), keepdims=True)
    least = np.maximum(largest / _LARGEST, _LEAST_STEP)
    step = np.exp2(np.ceil(np.log2(least))).astype(np.float32)
    return np.asarray(np.rint(weight / step) * step)
