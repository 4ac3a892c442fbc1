"""A proxy between a client and a server: it records what the client sends, and breaks the link."""

from __future__ import annotations

import contextlib
import socket
import threading

STALL, CUT = "stall", "cut"
"""The link takes bytes and delivers none; connections are dropped and none is made."""

_CHUNK = 1 << 16


class Proxy:
    """Carries bytes to a server and back, each way in a thread of its own.

    Attributes:
        address: ``host:port`` to connect to.
        sent: All bytes that clients sent so far, connection by connection.
    """

    def __init__(self, server: str) -> None:
        host, _, port = server.rpartition(":")
        self._server = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.sent: list[bytearray] = []
        self._fault: str | None = None
        self._open: set[socket.socket] = set()
        self._flows = threading.Event()
        self._flows.set()
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def fault(self) -> str | None:
        """What is wrong with the link; nothing if it is ``None``."""
        return self._fault

    @fault.setter
    def fault(self, fault: str | None) -> None:
        self._fault = fault
        if fault == STALL:
            self._flows.clear()
        else:
            self._flows.set()
        if fault == CUT:
            self._drop()

    def close(self) -> None:
        """Drop all connections and take no more."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # closing alone does not end an accept
        self._listener.close()
        self._flows.set()
        self._drop()

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _drop(self) -> None:
        with self._lock:
            for one in self._open:
                with contextlib.suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)
            self._open.clear()

    def _accept(self) -> None:
        while True:
            try:
                here, _ = self._listener.accept()
            except OSError:
                return
            with contextlib.suppress(OSError):
                self._join(here)

    def _join(self, here: socket.socket) -> None:
        if self._fault == CUT:
            here.close()
            return
        try:
            there = socket.create_connection(self._server)
        except OSError:
            here.close()
            raise
        record = bytearray()
        self.sent.append(record)
        with self._lock:
            self._open |= {here, there}
        for source, destination, own in ((here, there, record), (there, here, None)):
            source.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            copy = threading.Thread(target=self._copy, args=(source, destination, own), daemon=True)
            copy.start()

    def _copy(
        self, source: socket.socket, destination: socket.socket, record: bytearray | None
    ) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(_CHUNK):
                if record is not None:
                    record += data
                self._flows.wait()
                destination.sendall(data)
        for one in (source, destination):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        with self._lock:
            self._open -= {source, destination}
