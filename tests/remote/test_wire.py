"""What crosses, byte by byte: nothing of a private input, or of what comes before the release."""

from __future__ import annotations

import pytest

import hybridc
from hybridc.runtime.remote_settings import RemoteSettings
from tests.remote.certificates import secure
from tests.remote.http_server import HttpServer
from tests.remote.proxy import Proxy
from tests.remote.server import CRASH, GARBAGE, Server

RUN = 64
"""Bytes in a row that would give something away."""


def leaks(secret: bytes, captured: bytes, known: bytes = b"") -> list[int]:
    """Where runs of a secret begin that were captured, and that are no part of what is known.

    A run of ``RUN`` bytes at any place has a whole block of half of them in it.
    """
    half = RUN // 2
    starts = range(0, len(secret) - half + 1, half)
    return [s for s in starts if (b := secret[s : s + half]) in captured and b not in known]


@pytest.mark.parametrize("kind", [Server, HttpServer])
def test_nothing_private_is_on_the_wire(hybrid, tensors, kind):
    with kind(hybrid.repository) as server, Proxy(server.place) as proxy:
        address = server.address.replace(server.place, proxy.address)
        with hybridc.load(hybrid.bundle, remote=address) as model:
            plans = {plan.name: plan for plan in model.manifest.plans}
            for fault in (None, GARBAGE, CRASH, None):
                model.probe()
                model._chooser.current = plans["cut1"]
                server.fault = fault
                assert hybrid.is_right(model(x=hybrid.x))
                server.fault = None
            assert model.status.fallbacks == 2
    captured = b"\0".join(map(bytes, proxy.sent))
    assert tensors["map"] in server.received
    assert leaks(tensors["x"], captured) == []
    assert leaks(tensors["a"], captured, known=tensors["map"]) == []
    blocks = len(tensors["map"]) // (RUN // 2)
    assert len(leaks(tensors["map"], captured)) > 0.9 * blocks  # the capture would have shown it


def test_a_leak_would_be_found(tensors):
    secret = tensors["x"]
    for start in (0, 1, 17, len(secret) - RUN):
        assert leaks(secret, b"head" + secret[start : start + RUN] + b"tail")


@pytest.mark.parametrize("kind", [Server, HttpServer])
def test_tls_hides_what_is_released(hybrid, tensors, kind, certificates):
    with (
        secure(kind, hybrid, certificates, mutual=False) as server,
        Proxy(server.place) as proxy,
    ):
        address = server.address.replace(server.place, proxy.address)
        remote = RemoteSettings((address,), ca=str(certificates / "authority.pem"), plan="cut1")
        with hybridc.load(hybrid.bundle, remote=remote) as model:
            assert hybrid.is_right(model(x=hybrid.x))
    captured = b"\0".join(map(bytes, proxy.sent))
    assert len(captured) > len(tensors["map"])
    assert leaks(tensors["map"], captured, known=bytes(RUN)) == []
