"""Filters of convolutions with channels innermost, where kernels for tensor cores want them.

A step of such a kernel takes some channels of one position of the filter, so that one condition per
step says whether a pixel is inside the image, and that neighbors along the step are neighbors in
memory. Filters are rewritten here, at compile time:

    conv2d(data, filters)  ->  conv2d(data, filters', kernel_layout="OHWI")
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tvm
from hybridc.targets.cuda.weights import reorder_weights
from hybridc.targets.llvm.layout.graph import sizes_of
from tvm import relax

from hybridc.bundle.tensors import Array

PLAIN, INNERMOST = "OIHW", "OHWI"

MIN_CHANNELS = 16
"""Filters with fewer channels stay as they are."""


def channels_innermost(
    module: tvm.IRModule, weights: Mapping[str, Array], types: frozenset[str]
) -> tuple[tvm.IRModule, Mapping[str, Array]]:
    """The module and its weights with filters rewritten.

    Args:
        module: A Relax module whose ``main`` takes the weights as one tuple, last.
        weights: Their arrays by name, in order.
        types: Types of filters that are rewritten.
    """
    return reorder_weights(
        module,
        weights,
        lambda value, names: _is_chosen(value, names, types),
        lambda name, array: (f"{name}.{INNERMOST}", array.transpose(0, 2, 3, 1)),
        lambda _writer, binding, filters: _convolution(binding.value, filters),
    )


def _is_chosen(value: Any, names: Mapping[Any, str], types: frozenset[str]) -> bool:
    """Whether a value is a convolution whose filters are rewritten."""
    if getattr(getattr(value, "op", None), "name", "") != "relax.nn.conv2d":
        return False
    filters, attributes = value.args[1], value.attrs
    if filters not in names or str(filters.ty.dtype) not in types:
        return False
    if attributes.kernel_layout != PLAIN or int(attributes.groups) != 1:
        return False
    _, channels, height, width = sizes_of(filters)
    return channels >= MIN_CHANNELS and height * width > 1


def _convolution(call: Any, filters: Any) -> Any:
    attributes = call.attrs
    return relax.op.nn.conv2d(
        call.args[0],
        filters,
        strides=list(map(int, attributes.strides)),
        padding=list(map(int, attributes.padding)),
        dilation=list(map(int, attributes.dilation)),
        data_layout=attributes.data_layout,
        kernel_layout=INNERMOST,
        out_layout=attributes.out_layout,
        out_dtype=str(attributes.out_dtype),
    )
