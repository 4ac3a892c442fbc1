"""The Open Inference Protocol v2 over HTTP, with the extension for binary tensors that Triton has.

A body is a JSON object, and behind it the elements of its tensors one after another. A header says
where the JSON ends. Connections are kept and taken in turns; one that the server closed meanwhile
is replaced.

Python's timeouts are for one read each, so a server that sends a byte now and then would never time
out. Here each read gets what is left of the call.
"""

from __future__ import annotations

import http.client
import io
import json
import select
import socket
import ssl
import time
import zlib
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from hybridc.bundle.manifest import RemoteSpec
from hybridc.errors import UsageError
from hybridc.runtime.remote_settings import RemoteSettings
from hybridc.runtime.remote_tensors import BUILD, WireTensor, asked_outputs, trace_of
from hybridc.runtime.remote_transport import (
    PROBE_MODEL,
    Exchange,
    Lost,
    Refused,
    Signature,
    token_header,
)

_JSON_LENGTH = "Inference-Header-Content-Length"
_BUSY = (408, 425, 429, 502, 503, 504)
"""Answers of gateways and servers that have no time or are not there; another try may succeed."""

_LEVEL = 1
"""Level of compression: the fastest, since links that gain from more are rare."""

_CHUNK = 1 << 18


@dataclass(frozen=True)
class _Answer:
    """What came back.

    Attributes:
        status: The number that HTTP gives an answer.
        headers: By names in lower case.
        body: As it was before compression.
        received: How many bytes it came in.
    """

    status: int
    headers: Mapping[str, str]
    body: bytes
    received: int


class HttpTransport:
    """Kept connections to one endpoint; see :class:`Transport`.

    Raises:
        UsageError: A file with a certificate or a key cannot be read.
    """

    def __init__(self, settings: RemoteSettings, endpoint: str) -> None:
        self.address = endpoint.partition("://")[2]
        self._tls = _tls_context(settings) if settings.is_secure(endpoint) else None
        self._headers = dict(token_header(settings))
        self._compress = settings.compression
        self._idle: deque[http.client.HTTPConnection] = deque()
        self._closed = False

    def ask_live(self, until: float) -> None:
        """A call without contents."""
        self._ask("GET", "v2/health/live", until)

    def signature(self, spec: RemoteSpec, until: float) -> Signature:
        """The tensors of the model that serves a part."""
        found = _json(self._ask("GET", _path(spec), until).body)
        try:
            inputs, outputs = (
                {str(tensor["name"]): str(tensor["datatype"]) for tensor in found[kind]}
                for kind in ("inputs", "outputs")
            )
        except (KeyError, TypeError) as error:
            raise Refused("its description of the model makes no sense") from error
        return Signature(inputs, outputs)

    def build(self, spec: RemoteSpec, until: float) -> str | None:
        """The build that the model's configuration names; ``None`` if the server does not tell."""
        try:
            found = _json(self._ask("GET", f"{_path(spec)}/config", until).body)
            return str(found["parameters"][f"{BUILD}_{spec.version}"]["string_value"])
        except (Refused, KeyError, TypeError):
            return None  # Triton alone has this

    def infer(
        self,
        spec: RemoteSpec,
        tensors: Sequence[WireTensor],
        until: float,
        headers: Mapping[str, str],
    ) -> Exchange:
        """Run a part."""
        head, data = _request(spec, tensors, trace_of(headers))
        body = head + data
        headers = {**headers, **_binary(head)}
        if self._compress:
            body = zlib.compress(body, _LEVEL)
            headers |= {"Content-Encoding": "deflate", "Accept-Encoding": "deflate"}
        answer = self._ask("POST", f"{_path(spec)}/infer", until, body, headers)
        return Exchange(_reply_tensors(answer), len(body) + answer.received)

    def send(self, count: int, until: float) -> None:
        """Send zeros; they are not compressed."""
        zeros = WireTensor("zeros", "UINT8", (count,), bytes(count))
        head, data = _request(RemoteSpec(PROBE_MODEL, "", "", (), ()), [zeros], {})
        self._send("POST", f"/v2/models/{PROBE_MODEL}/infer", until, head + data, _binary(head))

    def close(self) -> None:
        """Close the connections."""
        self._closed = True
        while self._idle:
            self._idle.pop().close()

    def _ask(
        self,
        method: str,
        path: str,
        until: float,
        body: bytes = b"",
        headers: Mapping[str, str] | None = None,
    ) -> _Answer:
        """An answer that is none of an error."""
        answer = self._send(method, f"/{path}", until, body, headers or {})
        if answer.status == 200:
            return answer
        reason = f"{answer.status}: {_reason(answer.body)}"
        raise Lost(reason) if answer.status in _BUSY else Refused(reason)

    def _send(
        self, method: str, path: str, until: float, body: bytes, headers: Mapping[str, str]
    ) -> _Answer:
        """An answer, whatever it says."""
        request = (method, path, body, {**self._headers, **headers})
        try:
            return self._exchange(self._kept() or self._connect(until), until, *request)
        except TimeoutError as error:
            raise Lost("deadline exceeded") from error
        except (OSError, http.client.IncompleteRead) as error:
            raise Lost(str(error)) from error
        except (ValueError, http.client.HTTPException, zlib.error) as error:
            raise Refused(f"its answer makes no sense: {error!r:.200}") from error

    def _kept(self) -> http.client.HTTPConnection | None:
        """A kept connection that is still open."""
        while True:
            try:
                connection = self._idle.pop()
            except IndexError:
                return None
            poll = select.poll()
            poll.register(connection.sock, select.POLLIN)
            if not poll.poll(0):  # what an idle connection has to say is that it was closed
                return connection
            connection.close()

    def _connect(self, until: float) -> http.client.HTTPConnection:
        if self._tls is None:
            connection = http.client.HTTPConnection(self.address)
        else:
            connection = http.client.HTTPSConnection(self.address, context=self._tls)
        own = _connected(connection.host, connection.port, until)
        try:
            own.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._tls is not None:
                own.settimeout(_left(until))
                own = self._tls.wrap_socket(own, server_hostname=connection.host)
        except BaseException:
            own.close()
            raise
        connection.sock = own
        return connection

    def _exchange(
        self,
        connection: http.client.HTTPConnection,
        until: float,
        method: str,
        path: str,
        body: bytes,
        headers: Mapping[str, str],
    ) -> _Answer:
        """One request and its answer; the connection is kept if it can be."""
        reading: Any = _Reading(connection.sock, until)
        response_of: Any = lambda _sock, **own: http.client.HTTPResponse(reading, **own)  # noqa: E731
        connection.response_class = response_of
        try:
            connection.sock.settimeout(_left(until))
            connection.putrequest(method, path, skip_accept_encoding=True)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                connection.putheader(name, value)
            connection.endheaders()
            for start in range(0, len(body), _CHUNK):
                connection.sock.settimeout(_left(until))
                connection.send(memoryview(body)[start : start + _CHUNK])
            response = connection.getresponse()
            data = response.read()
            found = {name.lower(): value for name, value in response.headers.items()}
            answer = _Answer(response.status, found, _decoded(response, data), len(data))
        except BaseException:
            connection.close()
            raise
        if response.will_close or self._closed:
            connection.close()
        else:
            self._idle.append(connection)
        return answer


class _Reading:
    """A socket for ``HTTPResponse``, whose reads end at a time."""

    def __init__(self, connection: socket.socket, until: float) -> None:
        self._connection, self._until = connection, until

    def makefile(self, _mode: str) -> io.BufferedReader:
        """The file that the response is read from."""
        return io.BufferedReader(_Reader(self._connection, self._until), _CHUNK)


class _Reader(io.RawIOBase):
    """Reads a socket, which stays open until this is closed."""

    def __init__(self, connection: socket.socket, until: float) -> None:
        self._connection, self._until = connection, until
        self._file = connection.makefile("rb", buffering=0)

    def readable(self) -> bool:
        """It is."""
        return True

    def readinto(self, buffer: Any) -> int | None:
        """Read what is there, and wait for it as long as there is time."""
        self._connection.settimeout(_left(self._until))
        return self._file.readinto(buffer)

    def close(self) -> None:
        """Let go of the socket."""
        self._file.close()
        super().close()


def _connected(host: str, port: int, until: float) -> socket.socket:
    """A connection to the first of a host's addresses that takes one.

    Each address is tried for its share of the time that is left, and what is left after that goes
    to the next.
    """
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    failure = OSError(f"{host} has no address")
    for index, (family, kind, protocol, _, address) in enumerate(found):
        own = socket.socket(family, kind, protocol)
        try:
            own.settimeout(_left(until) / (len(found) - index))
            own.connect(address)
            return own
        except OSError as error:
            own.close()
            failure = error
    raise failure


def _left(until: float) -> float:
    left = until - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


def _tls_context(settings: RemoteSettings) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=settings.ca)
        if settings.certificate is not None:
            context.load_cert_chain(settings.certificate, settings.key)
    except OSError as error:
        raise UsageError(f"a certificate or a key cannot be read: {error}") from error
    return context


def _path(spec: RemoteSpec) -> str:
    version = f"/versions/{quote(spec.version)}" if spec.version else ""
    return f"v2/models/{quote(spec.model)}{version}"


def _binary(head: bytes) -> dict[str, str]:
    """Headers of a body with tensors behind its JSON."""
    return {_JSON_LENGTH: str(len(head)), "Content-Type": "application/octet-stream"}


def _request(
    spec: RemoteSpec, tensors: Sequence[WireTensor], parameters: Mapping[str, str]
) -> tuple[bytes, bytes]:
    """The JSON of a request, and what follows it."""
    inputs = [
        {
            "name": tensor.name,
            "shape": list(tensor.shape),
            "datatype": tensor.datatype,
            "parameters": {"binary_data_size": len(tensor.data)},
        }
        for tensor in tensors
    ]
    outputs = [{"name": n, "parameters": {"binary_data": True}} for n in asked_outputs(spec)]
    head = {
        "id": "hybridc",  # KServe takes binary tensors in requests that have one only
        "parameters": {BUILD: spec.build, **parameters},
        "inputs": inputs,
        "outputs": outputs,
    }
    return json.dumps(head).encode(), b"".join(tensor.data for tensor in tensors)


def _reply_tensors(answer: _Answer) -> list[WireTensor]:
    """The tensors in a reply.

    Raises:
        ValueError: The reply makes no sense.
    """
    try:
        length = int(answer.headers.get(_JSON_LENGTH.lower(), len(answer.body)))
        place, found = length, []
        for item in _json(answer.body[:length])["outputs"]:
            size = int(item["parameters"]["binary_data_size"])
            if size < 0:
                raise ValueError(f"a tensor has {size} bytes")
            data = answer.body[place : place + size]
            shape = tuple(int(dim) for dim in item["shape"])
            found.append(WireTensor(str(item["name"]), str(item["datatype"]), shape, data))
            place += size
    except (KeyError, TypeError) as error:
        raise ValueError("its reply has no binary tensors") from error
    return found


def _decoded(response: http.client.HTTPResponse, data: bytes) -> bytes:
    encoding = response.headers.get("Content-Encoding", "identity").lower()
    if encoding == "deflate":
        return zlib.decompress(data)
    if encoding != "identity":
        raise ValueError(f"the body is in {encoding}")
    return data


def _json(text: bytes) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Refused("its answer makes no sense: it is no JSON") from error


def _reason(body: bytes) -> str:
    """What an error says: the protocol's message, or the start of the text."""
    try:
        text = str(json.loads(body)["error"])
    except (ValueError, KeyError, TypeError, RecursionError):
        text = body[:200].decode(errors="replace")
    lines = text.strip().splitlines()
    return lines[0][:200] if lines else "no reason given"
