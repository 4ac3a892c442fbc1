"""Calls to the server of a hybrid bundle: endpoints in turn, retries, deadlines.

A part is a function of its inputs, so a request may be sent again without harm. It is sent again
only while there is time, to the next endpoint first; with one endpoint, after a pause of random
length that grows. An endpoint that works stays the first choice. Connections are kept.

Before an endpoint is used for a part, it is asked what it has. A reply names the build it is of, so
a server that is replaced later is noticed too.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from hybridc.bundle.dtypes import Array
from hybridc.bundle.manifest import RemoteSpec
from hybridc.errors import RemoteMissing
from hybridc.runtime.remote_messages import (
    BUILD,
    METHODS,
    SERVICE,
    infer_request,
    message_types,
    read_reply,
    same_signature,
)
from hybridc.runtime.remote_settings import RemoteSettings, read_file

_Result = TypeVar("_Result")

_PAUSE_SECONDS = 0.05
"""Longest pause before the first retry; it doubles."""

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


@dataclass(frozen=True)
class Reply:
    """What a call to the server gave.

    Attributes:
        arrays: The outputs.
        bytes: What was sent and received.
        network_seconds: Time of the call without the server's.
        server_seconds: The server's time.
    """

    arrays: list[Array]
    bytes: int
    network_seconds: float
    server_seconds: float


class Client(Protocol):
    """A way to the server."""

    def infer(self, spec: RemoteSpec, arrays: Sequence[Array], until: float) -> Reply:
        """Run a part; ``until`` is a time of ``time.monotonic``."""

    def measure(self, spec: RemoteSpec, count: int, until: float) -> tuple[float, float]:
        """Seconds of a call without contents, and of one that sends so many bytes."""

    def close(self) -> None:
        """Give up connections."""


class _Refused(Exception):
    """An endpoint does not serve a part; trying it again at once is of no use."""


@dataclass
class _Endpoint:
    """One server, with its connection and what was found out about it.

    Attributes:
        address: ``host:port`` for messages.
        methods: The protocol's methods over its connection.
        channel: The connection.
        checked: Parts that it was found to have.
    """

    address: str
    methods: dict[str, Callable[..., Any]]
    channel: Any
    checked: set[RemoteSpec] = field(default_factory=set)


class GrpcClient:
    """Talks to the endpoints of some settings. Serves several threads.

    Raises:
        RemoteMissing: grpcio is not installed.
        UsageError: A file with a certificate or a key cannot be read.
    """

    def __init__(self, settings: RemoteSettings) -> None:
        try:
            import grpc
            from google.protobuf.message import DecodeError
        except ImportError as error:
            raise RemoteMissing(
                "a server can be used only with grpcio; run: pip install 'hybridc[remote]'"
            ) from error
        self._grpc, self._garbled = grpc, DecodeError
        self._settings = settings
        self._metadata = _token_header(settings)
        self._endpoints = [self._connect(endpoint) for endpoint in settings.endpoints]
        self._first = 0
        self._random = random.Random()
        self._lock = threading.Lock()

    @property
    def endpoint(self) -> str:
        """Address of the endpoint that is tried first."""
        return self._endpoints[self._first].address

    def _connect(self, endpoint: str) -> _Endpoint:
        address, grpc = endpoint.partition("://")[2] or endpoint, self._grpc
        if self._settings.is_secure(endpoint):
            files = (self._settings.ca, self._settings.key, self._settings.certificate)
            contents = [read_file(path) if path else None for path in files]
            credentials = grpc.ssl_channel_credentials(*contents)
            channel = grpc.secure_channel(address, credentials, _CHANNEL_OPTIONS)
        else:
            channel = grpc.insecure_channel(address, _CHANNEL_OPTIONS)
        types = message_types()
        methods = {
            name: channel.unary_unary(
                f"/{SERVICE}/{name}",
                types[request].SerializeToString,
                None,  # read below, where a reply that makes no sense is told from a lost call
            )
            for name, (request, _) in METHODS.items()
        }
        return _Endpoint(address, methods, channel)

    def infer(self, spec: RemoteSpec, arrays: Sequence[Array], until: float) -> Reply:
        """Run a part on arrays.

        Args:
            spec: The part.
            arrays: Its inputs in order.
            until: When to give up, as a time of ``time.monotonic``.

        Raises:
            RemoteMissing: No endpoint gave a result in time; the message says why for each.
        """
        request = infer_request(spec, arrays)
        size = sum(map(len, request.raw_input_contents))

        def attempt(endpoint: _Endpoint, until: float) -> Reply:
            self._check(endpoint, spec, until)
            start = time.perf_counter()
            reply = self._call(endpoint, "ModelInfer", request, until)
            outputs, seconds = read_reply(spec, reply)
            took = time.perf_counter() - start
            received = sum(map(len, reply.raw_output_contents))
            return Reply(outputs, size + received, max(took - seconds, 0.0), seconds)

        return self._try_all(spec, attempt, until)

    def measure(self, spec: RemoteSpec, count: int, until: float) -> tuple[float, float]:
        """Seconds of a call without contents, and of one that sends so many zeros.

        The zeros go to a model that no server has, which every server refuses after it has read
        them.

        Raises:
            RemoteMissing: No endpoint serves the part.
        """

        def attempt(endpoint: _Endpoint, until: float) -> tuple[float, float]:
            endpoint.checked.discard(spec)
            self._check(endpoint, spec, until)
            types = message_types()
            start = time.perf_counter()
            self._call(endpoint, "ServerLive", types["Empty"](), until)
            empty = time.perf_counter() - start
            request = types["ModelInferRequest"](model_name="hybridc-probe")
            request.inputs.add(name="zeros", datatype="UINT8", shape=[count])
            request.raw_input_contents.append(bytes(count))
            start = time.perf_counter()
            try:
                endpoint.methods["ModelInfer"](
                    request, timeout=until - time.monotonic(), metadata=self._metadata
                )
            except self._grpc.RpcError as error:
                if _is_lost(error, self._grpc):
                    raise
            return empty, time.perf_counter() - start

        return self._try_all(spec, attempt, until)

    def close(self) -> None:
        """Close the connections."""
        for endpoint in self._endpoints:
            endpoint.channel.close()

    def _try_all(
        self, spec: RemoteSpec, attempt: Callable[[_Endpoint, float], _Result], until: float
    ) -> _Result:
        """The result of the first attempt that succeeds."""
        reasons: dict[str, str] = {}
        first, count = self._first, len(self._endpoints)
        refused: set[int] = set()
        for number in range(max(self._settings.attempts, count)):
            index = (first + number) % count
            left = until - time.monotonic()
            if left <= 0 or len(refused) == count:
                break
            if index in refused:
                continue
            endpoint = self._endpoints[index]
            share = left / max(count - number, 1)  # one that hangs leaves time for the others
            try:
                result = attempt(endpoint, time.monotonic() + share)
            except (_Refused, ValueError, self._garbled) as error:
                refused.add(index)
                reasons[endpoint.address] = str(error) or "its reply makes no sense"
            except self._grpc.RpcError as error:
                reasons[endpoint.address] = _describe(error)
                if number + 1 >= count:
                    self._pause(number + 1 - count, until)
            else:
                self._first = index
                return result
            endpoint.checked.discard(spec)
        if not reasons:
            reasons[self._endpoints[first].address] = "no time was left to ask it"
        texts = "; ".join(f"{address}: {reason}" for address, reason in reasons.items())
        raise RemoteMissing(f"no server runs {spec.model}, version {spec.version}: {texts}")

    def _pause(self, turn: int, until: float) -> None:
        with self._lock:
            pause = self._random.uniform(0, _PAUSE_SECONDS * 2**turn)
        time.sleep(max(0.0, min(pause, until - time.monotonic())))

    def _check(self, endpoint: _Endpoint, spec: RemoteSpec, until: float) -> None:
        """Ask an endpoint, once, whether it has a part, and of which build it is."""
        if spec in endpoint.checked:
            return
        types = message_types()
        asked = types["ModelMetadataRequest"](name=spec.model, version=spec.version)
        found = self._call(endpoint, "ModelMetadata", asked, until)
        if not (
            same_signature(spec.inputs, found.inputs)
            and same_signature(spec.outputs, found.outputs)
            and BUILD in {tensor.name for tensor in found.outputs}
        ):
            raise _Refused("it is of another build: its tensors are not those of this bundle")
        build = self._configured_build(endpoint, asked, until)
        if build not in (None, spec.build):
            raise _Refused(
                f"it is of another build: {str(build)[:8]}... instead of {spec.build[:8]}..."
            )
        endpoint.checked.add(spec)

    def _configured_build(self, endpoint: _Endpoint, asked: Any, until: float) -> str | None:
        """The build in a model's parameters; ``None`` if the server does not tell parameters."""
        try:
            found = self._call(endpoint, "ModelConfig", asked, until)
        except _Refused:
            return None  # not every server has this method; a reply names its build too
        name = f"{BUILD}_{asked.version}"
        values = (
            entry.value.string_value for entry in found.config.parameters if entry.key == name
        )
        return next(values, None)

    def _call(self, endpoint: _Endpoint, method: str, request: Any, until: float) -> Any:
        """A reply.

        Raises:
            grpc.RpcError: The call was lost, and may be tried again.
            _Refused: The server refused it.
            DecodeError: The reply is no message of this kind.
        """
        left = max(until - time.monotonic(), 0.001)
        try:
            data = endpoint.methods[method](request, timeout=left, metadata=self._metadata)
        except self._grpc.RpcError as error:
            if _is_lost(error, self._grpc):
                raise
            raise _Refused(_describe(error)) from error
        return message_types()[METHODS[method][1]].FromString(data)


def _token_header(settings: RemoteSettings) -> tuple[tuple[str, str], ...]:
    if settings.token is None:
        return ()
    prefix = "Bearer " if settings.header.lower() == "authorization" else ""
    return ((settings.header.lower(), prefix + settings.token),)


def _is_lost(error: Any, grpc: Any) -> bool:
    """Whether a call did not reach the server or got no answer, rather than being refused."""
    code = error.code()
    if code == grpc.StatusCode.UNAVAILABLE:
        return "restricted" not in (error.details() or "")  # what Triton says to a wrong token
    return code in (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.ABORTED)


def _describe(error: Any) -> str:
    name = error.code().name.lower().replace("_", " ")
    lines = (error.details() or "").strip().splitlines()
    return f"{name}: {lines[0][:200]}" if lines else name
