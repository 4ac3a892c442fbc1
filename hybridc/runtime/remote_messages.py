"""Messages of the Open Inference Protocol v2 over gRPC, as far as the loader uses it.

The messages are put together from the table below, which follows the public definition of the
protocol, https://github.com/kserve/open-inference-protocol. So there is no generated code that
would have to fit the installed protobuf. ``ModelConfig`` is Triton's addition; others refuse it.

A map is written as what it is on the wire: a list of entries.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from hybridc.bundle.manifest import RemoteSpec
from hybridc.runtime.remote_tensors import BUILD, WireTensor, asked_outputs

SERVICE = "inference.GRPCInferenceService"

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


def infer_request(
    spec: RemoteSpec, tensors: Sequence[WireTensor], parameters: Mapping[str, str]
) -> Any:
    """A request to run a part on tensors."""
    types = message_types()
    request = types["ModelInferRequest"](model_name=spec.model, model_version=spec.version)
    for name, text in {BUILD: spec.build, **parameters}.items():
        request.parameters.add(key=name).value.string_param = text
    for tensor in tensors:
        request.inputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
        request.raw_input_contents.append(tensor.data)
    for name in asked_outputs(spec):
        request.outputs.add(name=name)
    return request


def reply_tensors(reply: Any) -> list[WireTensor]:
    """The tensors in a reply; those that came without their bytes are left out."""
    pairs = zip(reply.outputs, reply.raw_output_contents)  # noqa: B905
    return [WireTensor(t.name, t.datatype, tuple(t.shape), raw) for t, raw in pairs]
