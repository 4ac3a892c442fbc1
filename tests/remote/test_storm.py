"""A short storm of faults: no result is wrong, and with a local plan none is missing."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

import hybridc
from hybridc.errors import RemoteMissing
from hybridc.runtime.remote_settings import RemoteSettings
from tests.remote.http_server import HttpServer
from tests.remote.proxy import CUT, STALL, Proxy
from tests.remote.server import HANG, Server
from tests.remote.storm import storm

CALLS = 120


@pytest.mark.parametrize("kind", [Server, HttpServer])
def test_no_result_is_wrong_or_lost(hybrid, kind):
    toll = storm(hybrid, kind, CALLS, seed=4, local=True)
    assert (toll.right, toll.wrong, toll.errors) == (CALLS, 0, 0)
    assert toll.runs["cut1"] > 0  # the server did answer between its faults
    assert len(toll.episodes) > 4


def test_without_a_local_plan_no_result_is_wrong(hybrid):
    toll = storm(hybrid, Server, CALLS // 2, seed=5, local=False)
    assert toll.wrong == 0
    assert toll.right + toll.errors == CALLS // 2
    assert min(toll.right, toll.errors) > 0


@pytest.mark.parametrize("kind", [Server, HttpServer])
def test_nothing_is_left_of_a_server_that_stops(hybrid, kind):
    before = set(threading.enumerate())
    with kind(hybrid.repository) as server, Proxy(server.place) as proxy:
        place = server.address.replace(server.place, proxy.address)
        remote = RemoteSettings((place,), plan="cut1", deadline=0.2, attempts=1)
        with hybridc.load(hybrid.bundle, remote=remote) as model, ThreadPoolExecutor(4) as pool:
            for fault, link in ((HANG, None), (None, STALL), (None, CUT), (HANG, STALL)):
                server.fault, proxy.fault = fault, link
                for call in [pool.submit(model, x=hybrid.x) for _ in range(8)]:
                    assert isinstance(call.exception(), RemoteMissing)
            server.stop()
            proxy.fault = None
    for thread in set(threading.enumerate()) - before:
        thread.join(20)
        assert not thread.is_alive(), thread.name


@pytest.mark.parametrize("kind", [Server, HttpServer])
def test_calls_that_hang_are_let_go_when_the_server_is_mended(hybrid, kind):
    with kind(hybrid.repository) as server:
        remote = RemoteSettings((server.address,), plan="cut1", deadline=20.0, attempts=1)
        with hybridc.load(hybrid.bundle, remote=remote) as model, ThreadPoolExecutor(16) as pool:
            asked, server.fault = server.calls.count("ModelInfer"), HANG
            calls = [pool.submit(model, x=hybrid.x) for _ in range(16)]
            while server.calls.count("ModelInfer") < asked + 16:
                pass
            server.fault = None
            assert all(isinstance(call.exception(), RemoteMissing) for call in calls)
            assert hybrid.is_right(model(x=hybrid.x))
