"""Connections of the HTTP transport: all steps of a call share its time."""

from __future__ import annotations

import socket
import ssl
import time
from types import SimpleNamespace

import pytest

from hybridc.runtime import remote_http
from hybridc.runtime.remote_http import HttpTransport
from hybridc.runtime.remote_settings import RemoteSettings
from hybridc.runtime.remote_transport import Lost
from tests.remote.http_server import HttpServer


class Clock:
    """A clock that the test moves, in place of the module ``time``."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


class Handshake(ssl.SSLContext):
    """TLS over a :class:`Silent` socket."""

    def wrap_socket(self, own, *_, **__):
        own.wait()


class Silent:
    """A socket to a host that never answers: each wait takes all the time that it is given."""

    def __init__(self, clock: Clock, waits: list[float]) -> None:
        self._clock, self._waits, self._timeout = clock, waits, 0.0

    def settimeout(self, seconds: float) -> None:
        self._timeout = seconds

    def wait(self, *_: object, **__: object) -> None:
        self._waits.append(self._timeout)
        self._clock.now += self._timeout
        raise TimeoutError

    connect = wait

    def close(self) -> None:
        pass


def addresses(*ports: int):
    """What a look-up of a host gives that has several addresses."""
    return lambda *_, **__: [
        (socket.AF_INET, socket.SOCK_STREAM, 0, "", ("127.0.0.1", port)) for port in ports
    ]


def transport(address: str) -> HttpTransport:
    return HttpTransport(RemoteSettings((address,)), address)


def use_sockets(monkeypatch: pytest.MonkeyPatch, clock: Clock, make, ports) -> None:
    """Give the transport another clock and other sockets."""
    names = ("IPPROTO_TCP", "TCP_NODELAY", "SOCK_STREAM")
    own = SimpleNamespace(
        socket=lambda *_: make(),
        getaddrinfo=addresses(*ports),
        **{name: getattr(socket, name) for name in names},
    )
    monkeypatch.setattr(remote_http, "time", clock)
    monkeypatch.setattr(remote_http, "socket", own)


def test_several_addresses_share_the_time_of_a_call(monkeypatch):
    clock, waits = Clock(), []
    use_sockets(monkeypatch, clock, lambda: Silent(clock, waits), (1, 2, 3))
    with pytest.raises(Lost, match="deadline exceeded"):
        transport("http://somewhere:8000").ask_live(clock.now + 3.0)
    assert waits == pytest.approx([1.0, 1.0, 1.0])


def test_a_handshake_gets_what_the_connection_left(monkeypatch):
    clock, waits = Clock(), []

    class Slow(Silent):
        def connect(self, _address: object) -> None:
            clock.now += 2.0

        def setsockopt(self, *_: object) -> None:
            pass

    use_sockets(monkeypatch, clock, lambda: Slow(clock, waits), (1,))
    opened = transport("https://somewhere:8000")
    opened._tls = Handshake(ssl.PROTOCOL_TLS_CLIENT)
    with pytest.raises(Lost, match="deadline exceeded"):
        opened.ask_live(clock.now + 3.0)
    assert waits == pytest.approx([1.0])


def test_the_next_address_is_tried_where_one_takes_no_connection(hybrid, monkeypatch):
    with HttpServer(hybrid.repository) as server, socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        ports = (taken.getsockname()[1], server.port)
        monkeypatch.setattr(socket, "getaddrinfo", addresses(*ports))
        opened = transport(server.address)
        opened.ask_live(time.monotonic() + 20)
        opened.close()
        assert server.calls == ["ServerLive"]
        monkeypatch.setattr(socket, "getaddrinfo", addresses(ports[0]))
        with pytest.raises(Lost, match="refused"):
            opened.ask_live(time.monotonic() + 20)
