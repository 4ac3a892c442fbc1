"""Layers that 8-bit integers make no faster, so that they stay float.

Integers pay where one instruction multiplies several bytes and adds the products up. A depthwise
convolution adds up few: what it gains by that is less than rounding its results costs, and the
layer in front of it has to round for it, too. So it is faster in float on x86-64 CPUs, as measured
with AVX2 on Zen 3 and with VNNI and AMX on Sapphire Rapids: there PP-OCR's detector and recognizer
of text take 1.1 and 1.5 times as long with these layers in int8.

Their weights are few, so that they make a bundle hardly larger; :mod:`hybridc.precision.rounding`
rounds them to 8 bits all the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import onnx

from hybridc.precision.anchors import anchors_of
from hybridc.targets.protocol import Device

_WEIGHT = 1


def no_faster(model: onnx.ModelProto, devices: Sequence[Device]) -> tuple[str, ...]:
    """Names of the layers that no device computes faster on 8-bit integers, in order.

    None if there are no others: who asks for integers gets some.

    Args:
        model: A model with names.
        devices: What it is compiled for.
    """
    if not devices or not all(map(_is_x86_64, devices)):
        return ()
    layers = anchors_of(model)
    shapes = {tensor.name: tensor.dims for tensor in model.graph.initializer}
    nodes = (node for node in model.graph.node if node.name in set(layers))
    slow = tuple(node.name for node in nodes if _is_depthwise(node, shapes))
    return slow if len(slow) < len(layers) else ()


def multiplies_int16(devices: Sequence[Device]) -> bool:
    """Whether there is one device, whose kernels multiply int16 by pairs."""
    from hybridc.targets.llvm.cpu import parse_cpu
    from hybridc.targets.llvm.schedules.integer_tiles import has_pairs, vector_lanes

    if len(devices) != 1 or devices[0].kind != "llvm":
        return False
    cpu = parse_cpu(devices[0].specification)
    return has_pairs(cpu) and vector_lanes(cpu) > 0


def _is_x86_64(device: Device) -> bool:
    from hybridc.targets.llvm.cpu import parse_cpu

    return device.kind == "llvm" and parse_cpu(device.specification).architecture == "x86_64"


def _is_depthwise(node: onnx.NodeProto, shapes: Mapping[str, Sequence[int]]) -> bool:
    groups = next((a.i for a in node.attribute if a.name == "group"), 1)
    return node.op_type == "Conv" and groups > 1 and shapes[node.input[_WEIGHT]][1] == 1
