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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from hybridc.bundle.dtypes import Array
from hybridc.bundle.manifest import RemoteSpec
from hybridc.errors import RemoteMissing
from hybridc.runtime.remote_encoding import decode, encode, wire_spec
from hybridc.runtime.remote_settings import RemoteSettings
from hybridc.runtime.remote_tensors import BUILD, read_reply, same_signature, wire_tensors
from hybridc.runtime.remote_transport import Lost, Refused, Transport

_Result = TypeVar("_Result")

_PAUSE_SECONDS = 0.05
"""Longest pause before the first retry; it doubles."""


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

    def infer(
        self, spec: RemoteSpec, arrays: Sequence[Array], until: float, headers: Mapping[str, str]
    ) -> Reply:
        """Run a part; ``until`` is a time of ``time.monotonic``."""

    def measure(self, spec: RemoteSpec, count: int, until: float) -> tuple[float, float]:
        """Seconds of a call without contents, and of one that sends so many bytes, if any."""

    def check_again(self, spec: RemoteSpec) -> None:
        """Ask once more whether the server has a part, before it is used again."""

    def close(self) -> None:
        """Give up connections."""


@dataclass
class _Endpoint:
    """One server.

    Attributes:
        transport: The way to it.
        checked: Parts that it was found to have.
    """

    transport: Transport
    checked: set[RemoteSpec] = field(default_factory=set)


def connect(settings: RemoteSettings) -> RemoteClient:
    """A client for the endpoints of some settings.

    Raises:
        RemoteMissing: grpcio is not installed, and an endpoint needs it.
        UsageError: A file with a certificate or a key cannot be read.
    """
    return RemoteClient(settings, [_transport(settings, one) for one in settings.endpoints])


def _transport(settings: RemoteSettings, endpoint: str) -> Transport:
    if settings.is_http(endpoint):
        from hybridc.runtime.remote_http import HttpTransport

        return HttpTransport(settings, endpoint)
    from hybridc.runtime.remote_grpc import GrpcTransport

    return GrpcTransport(settings, endpoint)


class RemoteClient:
    """Talks to several endpoints, one at a time. Serves several threads."""

    def __init__(self, settings: RemoteSettings, transports: Sequence[Transport]) -> None:
        self._settings = settings
        self._endpoints = [_Endpoint(transport) for transport in transports]
        self._first = 0
        self._random = random.Random()
        self._lock = threading.Lock()

    @property
    def endpoint(self) -> str:
        """Address of the endpoint that is tried first."""
        return self._endpoints[self._first].transport.address

    def infer(
        self, spec: RemoteSpec, arrays: Sequence[Array], until: float, headers: Mapping[str, str]
    ) -> Reply:
        """Run a part on arrays.

        Args:
            spec: The part.
            arrays: Its inputs in order.
            until: When to give up, as a time of ``time.monotonic``.
            headers: What goes with each request.

        Raises:
            RemoteMissing: No endpoint gave a result in time; the message says why for each.
        """
        wire = wire_spec(spec)
        try:
            named = zip((tensor.name for tensor in spec.inputs), arrays, strict=True)
            sent = encode(spec.inputs, spec.encodings, dict(named))
        except ValueError as error:
            raise RemoteMissing(f"{spec.model} cannot be asked: {error}") from error
        tensors = wire_tensors(wire.inputs, [sent[tensor.name] for tensor in wire.inputs])

        def attempt(endpoint: _Endpoint, until: float) -> Reply:
            self._check(endpoint, wire, until)
            start = time.perf_counter()
            exchange = endpoint.transport.infer(wire, tensors, until, headers)
            found, seconds = read_reply(wire, exchange.tensors)
            took = time.perf_counter() - start
            named = dict(zip((tensor.name for tensor in wire.outputs), found, strict=True))
            decoded = decode(spec.outputs, spec.encodings, named)
            outputs = [decoded[tensor.name] for tensor in spec.outputs]
            return Reply(outputs, exchange.bytes, max(took - seconds, 0.0), seconds)

        return self._try_all(wire, attempt, until)

    def measure(self, spec: RemoteSpec, count: int, until: float) -> tuple[float, float]:
        """Seconds of a call without contents, and of one that sends so many zeros; 0 for none.

        Raises:
            RemoteMissing: No endpoint serves the part.
        """

        wire = wire_spec(spec)

        def attempt(endpoint: _Endpoint, until: float) -> tuple[float, float]:
            self._check(endpoint, wire, until)
            start = time.perf_counter()
            endpoint.transport.ask_live(until)
            empty = time.perf_counter() - start
            if count == 0:
                return empty, 0.0
            start = time.perf_counter()
            endpoint.transport.send(count, until)
            return empty, time.perf_counter() - start

        return self._try_all(wire, attempt, until)

    def check_again(self, spec: RemoteSpec) -> None:
        """Ask each endpoint once more what it has, before it is used for a part again."""
        for endpoint in self._endpoints:
            endpoint.checked.discard(wire_spec(spec))

    def close(self) -> None:
        """Close the connections."""
        for endpoint in self._endpoints:
            endpoint.transport.close()

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
            except (Refused, ValueError) as error:
                refused.add(index)
                reasons[endpoint.transport.address] = str(error)
            except Lost as error:
                reasons[endpoint.transport.address] = str(error)
                if number + 1 >= count:
                    self._pause(number + 1 - count, until)
            else:
                self._first = index
                return result
            endpoint.checked.discard(spec)
        if not reasons:
            reasons[self._endpoints[first].transport.address] = "no time was left to ask it"
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
        found = endpoint.transport.signature(spec, until)
        if not (
            same_signature(spec.inputs, found.inputs)
            and same_signature(spec.outputs, found.outputs)
            and BUILD in found.outputs
        ):
            raise Refused("it is of another build: its tensors are not those of this bundle")
        build = endpoint.transport.build(spec, until)
        if build not in (None, spec.build):  # a reply names its build too
            raise Refused(
                f"it is of another build: {str(build)[:8]}... instead of {spec.build[:8]}..."
            )
        endpoint.checked.add(spec)
