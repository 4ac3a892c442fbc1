"""Messages of the Open Inference Protocol v2, as far as the loader uses it, and raw tensors.

The messages are put together from the table below, which follows the public definition of the
protocol, https://github.com/kserve/open-inference-protocol. So there is no generated code that
would have to fit the installed protobuf. ``ModelConfig`` is Triton's addition; others refuse it.

A map is written as what it is on the wire: a list of entries.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from hybridc.bundle.dtypes import Array
from hybridc.bundle.manifest import RemoteSpec, TensorSpec

SERVICE = "inference.GRPCInferenceService"

BUILD = "hybridc_build"
"""Output that every reply brings, and parameter that every request has: which build it is of."""

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

_MESSAGES: Mapping[str, Sequence[str]] = {
    "Empty": (),
    "ServerLiveResponse": ("bool live 1",),
    "ModelMetadataRequest": ("string name 1", "string version 2"),
    "Tensor": ("string name 1", "string datatype 2", "int64* shape 3"),
    "ModelMetadataResponse": (
        "string name 1",
        "string* versions 2",
        "string platform 3",
        "Tensor* inputs 4",
        "Tensor* outputs 5",
    ),
    "Text": ("string string_value 1",),
    "TextEntry": ("string key 1", "Text value 2"),
    "ModelConfig": ("string name 1", "TextEntry* parameters 14"),
    "ModelConfigResponse": ("ModelConfig config 1",),
    "Parameter": ("string string_param 3",),
    "ParameterEntry": ("string key 1", "Parameter value 2"),
    "Requested": ("string name 1",),
    "ModelInferRequest": (
        "string model_name 1",
        "string model_version 2",
        "string id 3",
        "ParameterEntry* parameters 4",
        "Tensor* inputs 5",
        "Requested* outputs 6",
        "bytes* raw_input_contents 7",
    ),
    "ModelInferResponse": (
        "string model_name 1",
        "string model_version 2",
        "string id 3",
        "Tensor* outputs 5",
        "bytes* raw_output_contents 6",
    ),
}
"""Fields of each message: ``TYPE name number``, with a star behind the type of a list."""

METHODS: Mapping[str, tuple[str, str]] = {
    "ServerLive": ("Empty", "ServerLiveResponse"),
    "ModelMetadata": ("ModelMetadataRequest", "ModelMetadataResponse"),
    "ModelConfig": ("ModelMetadataRequest", "ModelConfigResponse"),
    "ModelInfer": ("ModelInferRequest", "ModelInferResponse"),
}
"""Request and reply of each method."""


@functools.cache
def message_types() -> Mapping[str, Any]:
    """The classes of all messages by name."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    pool = descriptor_pool.DescriptorPool()
    file = descriptor_pb2.FileDescriptorProto(name="v2.proto", package="inference", syntax="proto3")
    kinds = descriptor_pb2.FieldDescriptorProto
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for text in fields:
            kind, field, number = text.split()
            label = kinds.LABEL_REPEATED if kind.endswith("*") else kinds.LABEL_OPTIONAL
            made = message.field.add(name=field, number=int(number), label=label)
            plain = kind.rstrip("*")
            if plain in _MESSAGES:
                made.type, made.type_name = kinds.TYPE_MESSAGE, f".inference.{plain}"
            else:
                made.type = getattr(kinds, f"TYPE_{plain.upper()}")
    pool.Add(file)
    find = pool.FindMessageTypeByName
    return {n: message_factory.GetMessageClass(find(f"inference.{n}")) for n in _MESSAGES}


def infer_request(spec: RemoteSpec, arrays: Sequence[Array]) -> Any:
    """A request to run a part on arrays in its inputs' order."""
    types = message_types()
    request = types["ModelInferRequest"](model_name=spec.model, model_version=spec.version)
    request.parameters.add(key=BUILD).value.string_param = spec.build
    for tensor, array in zip(spec.inputs, arrays, strict=True):
        request.inputs.add(name=tensor.name, datatype=DATATYPES[tensor.dtype], shape=array.shape)
        request.raw_input_contents.append(to_bytes(array))
    for name in (*(tensor.name for tensor in spec.outputs), BUILD):
        request.outputs.add(name=name)
    return request


def read_reply(spec: RemoteSpec, reply: Any) -> tuple[list[Array], float]:
    """The outputs in a reply, in their order, and the server's seconds.

    Raises:
        ValueError: The reply is not what this part gives, or is of another build.
    """
    raw = dict(zip((tensor.name for tensor in reply.outputs), reply.raw_output_contents))  # noqa: B905
    found = {tensor.name: tensor for tensor in reply.outputs if tensor.name in raw}
    build = raw.get(BUILD, b"")
    if len(build) < BUILD_BYTES:
        raise ValueError(f"the reply lacks the tensor {BUILD}")
    if build[:32].hex() != spec.build:
        raise ValueError(
            f"it is of another build: {build[:4].hex()}... instead of {spec.build[:8]}..."
        )
    arrays = [_output(tensor, found.get(tensor.name), raw) for tensor in spec.outputs]
    seconds = float(np.frombuffer(build[32:BUILD_BYTES], "<f8")[0])
    if not 0 <= seconds < float("inf"):
        raise ValueError(f"the reply says that it took {seconds} s")
    return arrays, seconds


def _output(spec: TensorSpec, found: Any, raw: Mapping[str, bytes]) -> Array:
    if found is None:
        raise ValueError(f"the reply lacks the tensor {spec.name!r}")
    shape = tuple(found.shape)
    if found.datatype != DATATYPES[spec.dtype] or not fits(spec, shape):
        raise ValueError(
            f"the reply's tensor {spec.name!r} is {found.datatype}{list(shape)} and must be "
            f"{DATATYPES[spec.dtype]}{list(spec.shape)}"
        )
    return from_bytes(raw[spec.name], spec.dtype, shape)


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


def same_signature(specs: Sequence[TensorSpec], found: Iterable[Any]) -> bool:
    """Whether a server's tensors are those that are expected, by name and element type."""
    wanted = {spec.name: DATATYPES[spec.dtype] for spec in specs}
    return wanted == {tensor.name: tensor.datatype for tensor in found if tensor.name != BUILD}
