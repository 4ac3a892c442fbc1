"""The Open Inference Protocol v2 over gRPC."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from hybridc.bundle.manifest import RemoteSpec
from hybridc.errors import RemoteMissing
from hybridc.runtime.remote_messages import (
    METHODS,
    SERVICE,
    infer_request,
    message_types,
    reply_tensors,
)
from hybridc.runtime.remote_settings import RemoteSettings, read_file
from hybridc.runtime.remote_tensors import BUILD, WireTensor, trace_of
from hybridc.runtime.remote_transport import (
    PROBE_MODEL,
    Exchange,
    Lost,
    Refused,
    Signature,
    token_header,
)

_CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.min_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.enable_retries", 0),
)


class GrpcTransport:
    """A channel to one endpoint; see :class:`Transport`.

    Raises:
        RemoteMissing: grpcio is not installed.
        UsageError: A file with a certificate or a key cannot be read.
    """

    def __init__(self, settings: RemoteSettings, endpoint: str) -> None:
        try:
            import grpc
            from google.protobuf.message import DecodeError
        except ImportError as error:
            raise RemoteMissing(
                "a server can be used over gRPC only with grpcio; run: "
                "pip install 'hybridc[remote]', or name an endpoint as in http://host:8000"
            ) from error
        self._grpc, self._garbled = grpc, DecodeError
        self._metadata = token_header(settings)
        self.address = endpoint.partition("://")[2] or endpoint
        if settings.is_secure(endpoint):
            files = (settings.ca, settings.key, settings.certificate)
            contents = [read_file(path) if path else None for path in files]
            credentials = grpc.ssl_channel_credentials(*contents)
            self._channel = grpc.secure_channel(self.address, credentials, _CHANNEL_OPTIONS)
        else:
            self._channel = grpc.insecure_channel(self.address, _CHANNEL_OPTIONS)
        types = message_types()
        self._methods = {
            name: self._channel.unary_unary(
                f"/{SERVICE}/{name}",
                types[request].SerializeToString,
                None,  # read below, where a reply that makes no sense is told from a lost call
            )
            for name, (request, _) in METHODS.items()
        }

    def ask_live(self, until: float) -> None:
        """A call without contents."""
        self._call("ServerLive", message_types()["Empty"](), until)

    def signature(self, spec: RemoteSpec, until: float) -> Signature:
        """The tensors of the model that serves a part."""
        found = self._call("ModelMetadata", _asked(spec), until)
        inputs, outputs = (
            {tensor.name: tensor.datatype for tensor in tensors}
            for tensors in (found.inputs, found.outputs)
        )
        return Signature(inputs, outputs)

    def build(self, spec: RemoteSpec, until: float) -> str | None:
        """The build that the model's configuration names; ``None`` if the server does not tell."""
        try:
            found = self._call("ModelConfig", _asked(spec), until)
        except Refused:
            return None  # Triton alone has this method
        name = f"{BUILD}_{spec.version}"
        values = (e.value.string_value for e in found.config.parameters if e.key == name)
        return next(values, None)

    def infer(
        self,
        spec: RemoteSpec,
        tensors: Sequence[WireTensor],
        until: float,
        headers: Mapping[str, str],
    ) -> Exchange:
        """Run a part."""
        request = infer_request(spec, tensors, trace_of(headers))
        reply = self._call("ModelInfer", request, until, headers)
        found = reply_tensors(reply)
        return Exchange(found, sum(len(tensor.data) for tensor in (*tensors, *found)))

    def send(self, count: int, until: float) -> None:
        """Send zeros."""
        request = message_types()["ModelInferRequest"](model_name=PROBE_MODEL)
        request.inputs.add(name="zeros", datatype="UINT8", shape=[count])
        request.raw_input_contents.append(bytes(count))
        try:
            self._send("ModelInfer", request, until, {})
        except Refused:
            return

    def close(self) -> None:
        """Close the connection."""
        self._channel.close()

    def _call(
        self, method: str, request: Any, until: float, headers: Mapping[str, str] | None = None
    ) -> Any:
        data = self._send(method, request, until, headers or {})
        try:
            return message_types()[METHODS[method][1]].FromString(data)
        except self._garbled as error:
            raise Refused(str(error) or "its reply makes no sense") from error

    def _send(self, method: str, request: Any, until: float, headers: Mapping[str, str]) -> bytes:
        left = max(until - time.monotonic(), 0.001)
        metadata = (*self._metadata, *headers.items())
        try:
            data: bytes = self._methods[method](request, timeout=left, metadata=metadata)
        except self._grpc.RpcError as error:
            if self._is_lost(error):
                raise Lost(_describe(error)) from error
            raise Refused(_describe(error)) from error
        return data

    def _is_lost(self, error: Any) -> bool:
        """Whether a call did not reach the server or got no answer, rather than being refused."""
        codes, code = self._grpc.StatusCode, error.code()
        if code == codes.UNAVAILABLE:
            return "restricted" not in (error.details() or "")  # Triton's word to a wrong token
        return code in (codes.DEADLINE_EXCEEDED, codes.ABORTED)


def _asked(spec: RemoteSpec) -> Any:
    return message_types()["ModelMetadataRequest"](name=spec.model, version=spec.version)


def _describe(error: Any) -> str:
    name = error.code().name.lower().replace("_", " ")
    lines = (error.details() or "").strip().splitlines()
    return f"{name}: {lines[0][:200]}" if lines else name
