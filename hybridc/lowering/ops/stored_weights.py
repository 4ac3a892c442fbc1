"""Weights that are stored in 8 or 4 bits with a scale for each block, and made floats at run time.

Two numbers of 4 bits share a byte of the weight that a bundle holds, along the last axis.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from tvm import te, tirx

from hybridc.lowering.call import Call, Unsupported
from hybridc.lowering.ops.common import Own, compute, emit_kernel
from hybridc.lowering.value import Constant, Expression, Narrow

_NIBBLES = ("int4", "uint4")


def is_stored_weight(call: Call) -> bool:
    """Whether a DequantizeLinear reads a constant in blocks, of at most 8 bits, without offset."""
    value = call.value(0)
    constant = value.codes if isinstance(value, Narrow) else value
    blocks = int(call.attribute("block_size", 0)) > 0 and not call.has(2)
    kinds = (*_NIBBLES, "int8", "uint8")
    return blocks and isinstance(constant, Constant) and call.dtype(0) in kinds


def stored_weight(call: Call) -> Expression:
    """The weight as float32; a kernel of its own, since its readers want all of it at once."""
    value = call.value(0)
    dtype = call.dtype(0)
    constant = value.codes if isinstance(value, Narrow) else value
    shape = tuple(int(dim) for dim in constant.array.shape)
    axis, block = call.axis(1), int(call.attribute("block_size"))
    scales = call.constant(1, "the scales of a stored weight")
    expected = (*shape[:axis], -(-shape[axis] // block), *shape[axis + 1 :])
    if scales.shape != expected or scales.dtype != np.float32 or not shape or 0 in shape:
        raise Unsupported(f"scales of shape {scales.shape} for blocks of a tensor of shape {shape}")
    packed = dtype in _NIBBLES
    stored = _packed(constant) if packed else constant

    def kernel(_own: Own, codes: te.Tensor, factors: te.Tensor) -> te.Tensor:
        def element(*index: Any) -> Any:
            place = list(index)
            place[axis] = tirx.floordiv(index[axis], block)
            number = _nibble(codes, index, dtype) if packed else codes(*index)
            return number.astype("float32") * factors(*place)

        return compute(shape, element, "stored_weight")

    operands = (call.materialize(stored), call.materialize(call.value(1)))
    return emit_kernel(call, kernel, *operands, name="stored_weight", fused=False)


def _packed(constant: Constant) -> Constant:
    """Numbers of 4 bits, two to a byte along the last axis, the even one in the lower half."""
    codes = constant.array.astype(np.int16) & 15
    padded = np.pad(codes, [(0, 0)] * (codes.ndim - 1) + [(0, codes.shape[-1] % 2)])
    joined = padded[..., ::2] | (padded[..., 1::2] << 4)
    return Constant(f"{constant.name}.packed", np.ascontiguousarray(joined.astype(np.uint8)))


def _nibble(codes: te.Tensor, index: tuple[Any, ...], dtype: str) -> Any:
    """One number of 4 bits, as int32."""
    *outer, last = index
    byte = codes(*outer, tirx.floordiv(last, 2)).astype("int32")
    number = (byte >> (tirx.floormod(last, 2).astype("int32") * 4)) & 15
    return (number ^ 8) - 8 if dtype == "int4" else number
