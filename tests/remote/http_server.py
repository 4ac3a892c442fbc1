"""A server of the Open Inference Protocol v2 over HTTP in this process, with faults to order.

It takes the faults of ``server.py``, and two that only HTTP has.
"""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
import threading
import time
import zlib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from hybridc.runtime.remote_tensors import BUILD, DATATYPES, from_bytes, to_bytes, trace_of
from hybridc.runtime.serving import Asked, Served
from tests.remote.server import (
    ABORT,
    CRASH,
    DTYPES,
    GARBAGE,
    HANG,
    NO_MODEL,
    OTHER_BUILD,
    SHORT,
    Faulty,
    Models,
)

HEADERS_TRICKLE, BODY_TRICKLE = "headers trickle", "body trickles"
"""An answer that comes byte by byte, from its headers or its body on."""

_LENGTH = "Inference-Header-Content-Length"


class Failure(Exception):
    """An error that the server answers with."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class Dropped(Exception):
    """The connection is closed without an answer."""


class HttpServer(Faulty):
    """Serves a repository on a port of its own until it is stopped; as ``Server``."""

    def __init__(
        self,
        repository: Path,
        port: int = 0,
        token: tuple[str, str] | None = None,
        tls: ssl.SSLContext | None = None,
        tells_config: bool = True,
    ) -> None:
        super().__init__()
        self.calls: list[str] = []
        self.received: list[bytes] = []
        self.traceparents: list[str | None] = []
        self.trickled = 0
        self.models = Models(repository)
        self.token, self.tells_config = token, tells_config
        self._connections: set[socket.socket] = set()
        self._lock = threading.Lock()
        owner = self

        class Handler(_Handler):
            server_state = owner

        self._server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self._server.daemon_threads = False  # so that closing it waits for those that answer
        if tls is not None:
            self._server.socket = tls.wrap_socket(
                self._server.socket, server_side=True, do_handshake_on_connect=False
            )
        self.port = self._server.server_address[1]
        self.place = f"127.0.0.1:{self.port}"
        self.address = f"{'https' if tls else 'http'}://{self.place}"
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def stop(self) -> None:
        """Drop all connections, calls under way included."""
        self._server.shutdown()
        self.let_go()
        with self._lock:
            for connection in self._connections:
                _shut(connection)
        self._server.server_close()
        self.models.close()

    def open(self, connection: socket.socket) -> None:
        """Note a connection, so that it is dropped when the server stops."""
        with self._lock:
            self._connections.add(connection)
            if self._stopped:
                _shut(connection)

    def leave(self, connection: socket.socket) -> None:
        """Forget a connection that ended."""
        with self._lock:
            self._connections.discard(connection)

    def __enter__(self) -> HttpServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def find(self, name: str, version: str) -> Served:
        served = self.models.find(name, version)
        if served is None or self.fault == NO_MODEL:
            raise Failure(404, f"unknown model {name!r}, version {version}")
        return served


def _shut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


class _Handler(BaseHTTPRequestHandler):
    server_state: HttpServer
    protocol_version = "HTTP/1.1"

    def setup(self) -> None:
        super().setup()
        self.server_state.open(self.connection)

    def finish(self) -> None:
        self.server_state.leave(self.connection)
        with contextlib.suppress(OSError):
            super().finish()

    def handle(self) -> None:
        with contextlib.suppress(OSError, Dropped):  # or a client that left
            super().handle()

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._answer(self._get)

    def do_POST(self) -> None:
        self._answer(self._infer)

    def _answer(self, handle: Any) -> None:
        state, body = self.server_state, self._body()
        try:
            if state.token and self.headers.get(state.token[0]) != state.token[1]:
                raise Failure(403, "This protocol is restricted")
            self._write(200, *handle(body))
        except Failure as failure:
            self._write(failure.status, json.dumps({"error": str(failure)}).encode())

    def _body(self) -> bytes:
        data = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        return zlib.decompress(data) if "Content-Encoding" in self.headers else data

    def _get(self, _body: bytes) -> tuple[bytes]:
        state, parts = self.server_state, self.path.strip("/").split("/")
        if parts == ["v2", "health", "live"]:
            state.calls.append("ServerLive")
            return (b"",)
        version = parts[4] if len(parts) > 4 else ""
        served = state.find(parts[2], version)
        if parts[-1] == "config":
            state.calls.append("ModelConfig")
            if not state.tells_config:
                raise Failure(404, "no such path")
            build = {f"{BUILD}_{version}": {"string_value": served.build}}
            return (json.dumps({"parameters": build}).encode(),)
        state.calls.append("ModelMetadata")
        inputs, outputs = (
            [{"name": s.name, "datatype": DATATYPES[s.dtype]} for s in specs]
            for specs in (served.inputs, served.outputs)
        )
        outputs.append({"name": BUILD, "datatype": "UINT8"})
        return (json.dumps({"inputs": inputs, "outputs": outputs}).encode(),)

    def _infer(self, body: bytes) -> tuple[bytes, dict[str, str]]:
        state, length = self.server_state, int(self.headers[_LENGTH])
        state.calls.append("ModelInfer")
        self._misbehave()
        parts = self.path.strip("/").split("/")
        served = state.find(parts[2], parts[4] if len(parts) > 5 else "")
        asked, place, arrays = json.loads(body[:length]), length, {}
        for item in asked["inputs"]:
            raw = body[place : (place := place + item["parameters"]["binary_data_size"])]
            state.received.append(raw)
            arrays[item["name"]] = from_bytes(raw, DTYPES[item["datatype"]], item["shape"])
        state.traceparents.append(self.headers.get("traceparent"))
        given = asked["parameters"]
        result = state.models.run(served, Asked(arrays, given[BUILD], trace_of(given)))
        if isinstance(result, str):
            raise Failure(400, result)
        return self._reply(result)

    def _misbehave(self) -> None:
        state, fault = self.server_state, self.server_state.fault
        if fault == HANG:
            state.hang()
        if fault == CRASH:
            raise Failure(500, "the model broke")
        if fault == GARBAGE:
            self.wfile.write(b"\xff\x07\xff\r\n" * 9)
        if fault in (ABORT, GARBAGE, HANG):
            raise Dropped

    def _reply(self, result: dict[str, Any]) -> tuple[bytes, dict[str, str]]:
        state = self.server_state
        if state.fault == OTHER_BUILD:
            result = {**result, BUILD: result[BUILD][::-1]}
        outputs, data = [], b""
        for name, array in result.items():
            raw = to_bytes(array)[: -1 if state.fault == SHORT and not data else None]
            size = {"binary_data_size": len(raw)}
            datatype, shape = DATATYPES[array.dtype.name], array.shape
            outputs.append({"name": name, "datatype": datatype, "shape": shape, "parameters": size})
            data += raw
        head = json.dumps({"outputs": outputs}).encode()
        return head + data, {_LENGTH: str(len(head))}

    def _write(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        if self.headers.get("Accept-Encoding") == "deflate":
            body, headers = zlib.compress(body), {**(headers or {}), "Content-Encoding": "deflate"}
        self.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        fault = self.server_state.fault
        if fault == HEADERS_TRICKLE:
            self._trickle(b"".join(self._headers_buffer))
        with contextlib.suppress(OSError):
            self.end_headers()
            if fault == BODY_TRICKLE:
                self._trickle(body)
            self.wfile.write(body)

    def _trickle(self, data: bytes) -> None:
        """A byte each 20 ms, until the client leaves."""
        with contextlib.suppress(OSError):
            for byte in data:
                self.wfile.write(bytes([byte]))
                self.wfile.flush()
                self.server_state.trickled += 1
                time.sleep(0.02)
