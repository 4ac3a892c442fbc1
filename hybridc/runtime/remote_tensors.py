"""Tensors as the Open Inference Protocol v2 carries them, whatever carries the protocol.

Elements go row by row, little-endian. Every reply brings one tensor more, ``hybridc_build``: which
build it is of, and how long the server computed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hybridc.bundle.dtypes import Array
from hybridc.bundle.manifest import RemoteSpec, TensorSpec

BUILD = "hybridc_build"
"""Output that every reply brings, and parameter that every request has: which build it is of."""

TRACE = ("traceparent", "tracestate")
"""Headers of W3C's trace context. A request has them as parameters too, since a server may keep its
headers from a model."""

BUILD_BYTES = 40
"""Bytes of that output: the digest of the server's bundle, and its seconds as a float64."""

DATATYPES: Mapping[str, str] = {
    "bool": "BOOL",
    "int8": "INT8",
    "int16": "INT16",
    "int32": "INT32",
    "int64": "INT64",
    "uint8": "UINT8",
    "uint16": "UINT16",
    "uint32": "UINT32",
    "uint64": "UINT64",
    "float16": "FP16",
    "float32": "FP32",
    "float64": "FP64",
}
"""The protocol's name of each element type that may cross; Triton's Python back end has no more."""


def trace_of(values: Mapping[str, str]) -> dict[str, str]:
    """The trace context among headers or parameters."""
    return {name: str(values[name]) for name in TRACE if name in values}


@dataclass(frozen=True)
class WireTensor:
    """A tensor in a request or a reply.

    Attributes:
        name: Its name.
        datatype: The protocol's name of its element type.
        shape: Its dimensions.
        data: Its elements.
    """

    name: str
    datatype: str
    shape: tuple[int, ...]
    data: bytes


def wire_tensors(specs: Sequence[TensorSpec], arrays: Sequence[Array]) -> list[WireTensor]:
    """Arrays as they are sent."""
    return [
        WireTensor(spec.name, DATATYPES[spec.dtype], array.shape, to_bytes(array))
        for spec, array in zip(specs, arrays, strict=True)
    ]


def asked_outputs(spec: RemoteSpec) -> list[str]:
    """Names of the outputs that a request asks for."""
    return [*(tensor.name for tensor in spec.outputs), BUILD]


def read_reply(spec: RemoteSpec, tensors: Iterable[WireTensor]) -> tuple[list[Array], float]:
    """The outputs in a reply, in their order, and the server's seconds.

    Raises:
        ValueError: The reply is not what this part gives, or is of another build.
    """
    found = {tensor.name: tensor for tensor in tensors}
    build = found[BUILD].data if BUILD in found else b""
    if len(build) < BUILD_BYTES:
        raise ValueError(f"the reply lacks the tensor {BUILD}")
    if build[:32].hex() != spec.build:
        raise ValueError(
            f"it is of another build: {build[:4].hex()}... instead of {spec.build[:8]}..."
        )
    arrays = [_output(tensor, found.get(tensor.name)) for tensor in spec.outputs]
    seconds = float(np.frombuffer(build[32:BUILD_BYTES], "<f8")[0])
    if not 0 <= seconds < float("inf"):
        raise ValueError(f"the reply says that it took {seconds} s")
    return arrays, seconds


def _output(spec: TensorSpec, found: WireTensor | None) -> Array:
    if found is None:
        raise ValueError(f"the reply lacks the tensor {spec.name!r}")
    if found.datatype != DATATYPES[spec.dtype] or not fits(spec, found.shape):
        raise ValueError(
            f"the reply's tensor {spec.name!r} is {found.datatype}{list(found.shape)} and must be "
            f"{DATATYPES[spec.dtype]}{list(spec.shape)}"
        )
    return from_bytes(found.data, spec.dtype, found.shape)


def fits(spec: TensorSpec, shape: Sequence[int]) -> bool:
    """Whether a shape has the rank and the static dimensions of a specification."""
    if len(shape) != len(spec.shape):
        return False
    pairs = zip(spec.shape, shape, strict=True)
    return all(size >= 0 and (isinstance(dim, str) or dim == size) for dim, size in pairs)


def to_bytes(array: Array) -> bytes:
    """An array's elements as the protocol has them: row by row, little-endian."""
    return np.ascontiguousarray(array).tobytes()


def from_bytes(data: bytes, dtype: str, shape: Sequence[int]) -> Array:
    """An array of its own memory out of what :func:`to_bytes` gives.

    Raises:
        ValueError: There are more or fewer bytes than the shape needs.
    """
    count = math.prod(shape) * np.dtype(dtype).itemsize
    if len(data) != count:
        raise ValueError(f"a tensor came with {len(data)} bytes and needs {count}")
    array: Array = np.ndarray(tuple(shape), dtype, bytearray(data))
    return array


def same_signature(specs: Sequence[TensorSpec], found: Mapping[str, str]) -> bool:
    """Whether a server's tensors, type by name, are those that are expected."""
    wanted = {spec.name: DATATYPES[spec.dtype] for spec in specs}
    return wanted == {name: datatype for name, datatype in found.items() if name != BUILD}
