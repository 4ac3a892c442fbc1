"""Tensors at the cut in fewer bytes than they are computed in: as float16, or in a byte each.

float16 keeps the shape and rounds each number. A byte has 256 values, which are spread over what
the numbers around it range over:

    code = round((number - low) / step)        step = (high - low) / 255

There is a range of its own for each channel of each row of an image, each token of each row of a
text, or else for each row; whatever the two leading axes are. The ranges are a float32 tensor
beside the codes, so rows of several requests can be brought together as those of any tensor.

What an encoding cannot hold is refused: numbers beyond the range of float16, infinities and NaN.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence

import numpy as np

from hybridc.bundle.dtypes import Array
from hybridc.bundle.manifest import EncodingSpec, RemoteSpec, TensorSpec

HALF, BYTE = "float16", "uint8"
"""Element types that tensors are encoded in."""

TOLERANCE: Mapping[str, float] = {HALF: 1e-2, BYTE: 1e-1}
"""Largest relative error of the model's outputs that is allowed unless the user says otherwise."""

_RANGES = "hybridc_range_"
_FEWEST = 256
"""A tensor of fewer elements is sent as it is."""

_PER_RANGE = 16
"""A range is shared by at least so many elements, since it takes eight bytes itself."""


def encodings_of(specs: Sequence[TensorSpec], dtype: str) -> tuple[EncodingSpec, ...]:
    """Which tensors are encoded: the large ones of floating-point numbers."""
    return tuple(EncodingSpec(spec.name, dtype) for spec in specs if _is_encoded(spec))


def _is_encoded(spec: TensorSpec) -> bool:
    return (
        spec.dtype in ("float32", "float64")
        and len(spec.shape) > 1
        and _static_count(spec.shape) >= _FEWEST
        and _static_count(spec.shape[_axes(spec) :]) >= _PER_RANGE
    )


def _static_count(shape: Sequence[int | str]) -> int:
    """Elements of a shape; one that is dynamic counts as many."""
    return math.prod(dim if isinstance(dim, int) else _FEWEST for dim in shape)


def _axes(spec: TensorSpec) -> int:
    """How many leading axes have ranges of their own."""
    return 2 if len(spec.shape) > 2 and _static_count(spec.shape[2:]) >= _PER_RANGE else 1


def shrink(dtype: str | None) -> int:
    """How many times fewer bytes a tensor of float32 takes, but for its ranges."""
    return 1 if dtype is None else 4 // np.dtype(dtype).itemsize


def encoded_bytes(spec: TensorSpec, dtype: str, count: int) -> int:
    """Bytes of an encoded tensor, out of those that it has before."""
    elements = count // np.dtype(spec.dtype).itemsize
    if dtype == HALF:
        return 2 * elements
    return elements + 8 * -(-elements // _static_count(spec.shape[_axes(spec) :]))


def wire_specs(
    specs: Sequence[TensorSpec], encodings: Sequence[EncodingSpec]
) -> tuple[TensorSpec, ...]:
    """The tensors that are sent for some tensors."""
    chosen = {encoding.tensor: encoding.dtype for encoding in encodings}
    found = []
    for spec in specs:
        dtype = chosen.get(spec.name, spec.dtype)
        found.append(dataclasses.replace(spec, dtype=dtype))
        if chosen.get(spec.name) == BYTE:
            shape = (*spec.shape[: _axes(spec)], 2)
            found.append(TensorSpec(_RANGES + spec.name, "float32", shape))
    return tuple(found)


@functools.lru_cache(64)
def wire_spec(spec: RemoteSpec) -> RemoteSpec:
    """A part's other end, with the tensors that are sent."""
    inputs, outputs = (wire_specs(s, spec.encodings) for s in (spec.inputs, spec.outputs))
    return dataclasses.replace(spec, inputs=inputs, outputs=outputs, encodings=())


def encode(
    specs: Sequence[TensorSpec], encodings: Sequence[EncodingSpec], arrays: Mapping[str, Array]
) -> dict[str, Array]:
    """Arrays as they are sent, by the names of :func:`wire_specs`.

    Raises:
        ValueError: A number cannot be encoded.
    """
    chosen = {encoding.tensor: encoding.dtype for encoding in encodings}
    found: dict[str, Array] = {}
    for spec in specs:
        array = arrays[spec.name]
        if chosen.get(spec.name) == HALF:
            array = _to_half(spec.name, array)
        elif chosen.get(spec.name) == BYTE:
            array, found[_RANGES + spec.name] = _to_bytes(spec.name, array, _axes(spec))
        found[spec.name] = array
    return found


def decode(
    specs: Sequence[TensorSpec], encodings: Sequence[EncodingSpec], arrays: Mapping[str, Array]
) -> dict[str, Array]:
    """Arrays out of what :func:`encode` gives, in the types of ``specs``."""
    chosen = {encoding.tensor: encoding.dtype for encoding in encodings}
    found: dict[str, Array] = {}
    for spec in specs:
        array = arrays[spec.name]
        if chosen.get(spec.name) == BYTE:
            array = _from_bytes(array, arrays[_RANGES + spec.name])
        found[spec.name] = array.astype(spec.dtype, copy=False)
    return found


def _to_half(name: str, array: Array) -> Array:
    with np.errstate(over="ignore"):
        half = array.astype(np.float16)
    if not np.isfinite(half).all():
        raise ValueError(f"the tensor {name!r} has numbers that float16 does not hold")
    return half


def _to_bytes(name: str, array: Array, axes: int) -> tuple[Array, Array]:
    """Codes, and the lowest number and the step of each range."""
    rest = tuple(range(axes, array.ndim))
    if not array.size:
        return np.zeros(array.shape, np.uint8), np.zeros((*array.shape[:axes], 2), np.float32)
    low, high = (
        reduce(array, axis=rest, keepdims=True).astype(np.float32) for reduce in (np.min, np.max)
    )
    with np.errstate(over="ignore", invalid="ignore"):
        step = (high - low) / np.float32(255)
    if not np.isfinite(step).all():
        raise ValueError(f"the tensor {name!r} has numbers that cannot be spread over a byte")
    divisor = np.where(step > 0, step, np.float32(1))
    codes = np.rint((array.astype(np.float32, copy=False) - low) / divisor)
    ranges = np.stack([low, step], axis=-1).reshape(*array.shape[:axes], 2)
    return np.clip(codes, 0, 255).astype(np.uint8), ranges


def _from_bytes(codes: Array, ranges: Array) -> Array:
    shape = (*ranges.shape[:-1], *(1 for _ in range(codes.ndim - ranges.ndim + 1)))
    low, step = (ranges[..., index].reshape(shape) for index in (0, 1))
    array: Array = codes.astype(np.float32)
    array *= step
    array += low
    return array
