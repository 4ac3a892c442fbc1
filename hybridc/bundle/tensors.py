"""The safetensors container, read in place and written with aligned tensors.

A file is an 8-byte little-endian header length, a JSON header, and the tensors' bytes. The format
allows no holes, so a tensor is brought to a 64-byte boundary by a filler tensor before it, and the
header is padded with spaces. https://github.com/huggingface/safetensors describes the format.

    | u64 length | {"a": {"dtype", "shape", "data_offsets"}, ...}   | a | filler | b | ...
    0            8                                          aligned ^      aligned ^

Large tensors of float32 whose numbers all are numbers of float16, as those of models trained or
stored in 16 bits are, take 16 bits each. The header's metadata says so by the tensor's name, and
reading makes float32 of them again.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np

from hybridc.bundle.dtypes import dtype_named
from hybridc.errors import BundleError

ALIGNMENT = 64
"""Bytes; a cache line, and what the widest vector load likes best."""

FILLER = "__filler__"
METADATA = "__metadata__"

MIN_NARROWED = 1024
"""Elements from which a tensor is stored in 16 bits where that loses nothing."""

MAX_HEADER_BYTES = 100_000_000

_NAMES = {
    "bfloat16": "BF16",
    "bool": "BOOL",
    "float16": "F16",
    "float32": "F32",
    "float64": "F64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int8": "I8",
    "int16": "I16",
    "int32": "I32",
    "int64": "I64",
    "uint8": "U8",
    "uint16": "U16",
    "uint32": "U32",
    "uint64": "U64",
}
_CODES = {code: name for name, code in _NAMES.items()}

_MALFORMED = (
    struct.error,
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    OverflowError,
    RecursionError,
)
"""What reading a container whose contents make no sense may raise."""

Array: TypeAlias = "np.ndarray[Any, Any]"


def encode(tensors: Mapping[str, Array]) -> list[bytes | memoryview]:
    """The file's contents as a list of chunks to write one after the other.

    Raises:
        ValueError: A dtype that the format has no name for.
    """
    header: dict[str, Any] = {}
    chunks: list[bytes | memoryview] = []
    offset = 0
    for index, (name, tensor) in enumerate(tensors.items()):
        array = narrowed(np.ascontiguousarray(tensor).reshape(tensor.shape))
        if array.dtype != tensor.dtype:
            header.setdefault(METADATA, {})[name] = tensor.dtype.name
        if array.dtype.name not in _NAMES:
            raise ValueError(f"tensor {name!r} has dtype {array.dtype}, which cannot be stored")
        filler = -offset % ALIGNMENT
        if filler:
            header[f"{FILLER}{index}"] = _entry("U8", (filler,), offset, filler)
            chunks.append(bytes(filler))
            offset += filler
        header[name] = _entry(_NAMES[array.dtype.name], array.shape, offset, array.nbytes)
        chunks.append(array.reshape(-1).view(np.uint8).data if array.nbytes else b"")
        offset += array.nbytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    return [struct.pack("<Q", len(text)), text, *chunks]


def narrowed(array: Array) -> Array:
    """A large tensor of float32 as float16 if that loses nothing, not even a zero's sign."""
    if array.dtype != np.float32 or array.size < MIN_NARROWED:
        return array
    with np.errstate(over="ignore"):
        half = array.astype(np.float16)
    same = np.array_equal(half.astype(np.float32).view(np.uint32), array.view(np.uint32))
    return half if same else array


def _entry(code: str, shape: tuple[int, ...], offset: int, size: int) -> dict[str, Any]:
    return {"dtype": code, "shape": list(shape), "data_offsets": [offset, offset + size]}


def decode(data: Any, where: str) -> dict[str, Array]:
    """Tensors by name, each a view of ``data`` without a copy, but for those that were narrowed.

    Args:
        data: Any object with the buffer protocol (bytes, a memory map).
        where: The file's name, for messages.

    Raises:
        BundleError: The contents are not a well-formed container.
    """
    view = memoryview(data)
    try:
        (length,) = struct.unpack_from("<Q", view)
        if length > min(MAX_HEADER_BYTES, len(view) - 8):
            raise ValueError("the header is longer than the file")
        header = json.loads(bytes(view[8 : 8 + length]))
        body = view[8 + length :]
        computed = header.get(METADATA, {})
        return {
            name: _widened(_tensor(entry, body), computed.get(name))
            for name, entry in header.items()
            if name != METADATA and not name.startswith(FILLER)
        }
    except _MALFORMED as error:
        raise BundleError(f"{where} is not a valid safetensors file: {error}") from error


def _widened(array: Array, dtype: str | None) -> Array:
    """A tensor as it was before it was narrowed."""
    is_narrow = dtype == "float32" and array.dtype == np.float16
    return array.astype(np.float32) if is_narrow else array


def _tensor(entry: Mapping[str, Any], body: memoryview) -> Array:
    begin, end = entry["data_offsets"]
    dtype, shape = dtype_named(_CODES[entry["dtype"]]), tuple(int(dim) for dim in entry["shape"])
    if not 0 <= begin <= end <= len(body) or min(shape, default=0) < 0:
        raise ValueError("a tensor lies outside the file")
    count = math.prod(shape)
    if count * dtype.itemsize != end - begin:
        raise ValueError("a tensor's size does not fit its shape")
    return np.frombuffer(body, dtype, count, begin).reshape(shape)
