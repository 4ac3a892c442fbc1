"""Whatever the server does, a call gives the right result or one clear error, in its time."""

from __future__ import annotations

import dataclasses
import logging
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import hybridc
from hybridc.bundle.manifest import MANIFEST, from_json, to_json
from hybridc.bundle.storage import write_archive
from hybridc.errors import RemoteMissing, UsageError
from hybridc.runtime.remote_settings import RemoteSettings
from tests.remote.certificates import secure
from tests.remote.conftest import Hybrid
from tests.remote.http_server import BODY_TRICKLE, HEADERS_TRICKLE, HttpServer
from tests.remote.server import (
    ABORT,
    CRASH,
    GARBAGE,
    HANG,
    NO_MODEL,
    OTHER_BUILD,
    SHORT,
    Server,
)
from tests.support import assert_refused
from tests.support import hybridc as run_hybridc

FAULTS = {
    "garbage": (GARBAGE, "pars|no sense"),
    "crash": (CRASH, "the model broke"),
    "abort": (ABORT, "Socket closed|closed connection"),
    "other build": (OTHER_BUILD, "another build"),
    "no model": (NO_MODEL, "unknown model"),
    "short": (SHORT, "bytes"),
}


@pytest.fixture(params=[Server, HttpServer], ids=["grpc", "http"])
def server(hybrid: Hybrid, request):
    with request.param(hybrid.repository) as running:
        yield running


def settings(*addresses: str, **changes) -> RemoteSettings:
    return RemoteSettings(addresses, **{"plan": "cut1", "deadline": 20.0, **changes})


def load(hybrid: Hybrid, *addresses: str, **changes):
    return hybridc.load(hybrid.bundle, remote=settings(*addresses, **changes))


def test_the_cut_runs_on_the_server(hybrid, server):
    with load(hybrid, server.address) as model:
        for _ in range(3):
            assert hybrid.is_right(model(x=hybrid.x))
        assert model.status.runs == {"cut1": 3}
        assert model.status.connected
    assert server.calls.count("ModelInfer") == 3 + 1  # and a look at the link
    assert server.calls.count("ModelMetadata") == 1


@pytest.mark.parametrize("name", FAULTS)
def test_without_a_local_plan_a_fault_is_an_error(hybrid, server, name):
    fault, word = FAULTS[name]
    with load(hybrid, server.address) as model:
        server.fault = fault
        with pytest.raises(RemoteMissing, match=word):
            model(x=hybrid.x)
        server.fault = None
        assert hybrid.is_right(model(x=hybrid.x))


@pytest.mark.parametrize("name", FAULTS)
def test_with_a_local_plan_a_fault_is_a_detour(hybrid, server, name, caplog):
    fault, word = FAULTS[name]
    with load_on_server(hybrid, server) as model:
        server.fault = fault
        with caplog.at_level(logging.WARNING, "hybridc.remote"):
            assert hybrid.is_right(model(x=hybrid.x))
        assert model.status.fallbacks == 1
        assert re.search(word, model.status.trouble)
        assert model.status.plan == "local"
        assert "the server failed" in caplog.text


def load_on_server(hybrid: Hybrid, server: Server, **changes):
    """A model with all plans that has settled on the one with the server."""
    quiet = {"plan": None, "probe_seconds": 1e9, **changes}
    model = load(hybrid, server.address, **quiet)
    plans = {plan.name: plan for plan in model.manifest.plans}
    model.probe()
    model._chooser.current = plans["cut1"]
    assert hybrid.is_right(model(x=hybrid.x))
    assert model.status.runs["cut1"] == 1
    model._chooser.current = plans["cut1"]
    return model


def test_a_server_that_hangs_costs_no_more_than_the_deadline(hybrid, server):
    with load_on_server(hybrid, server, deadline=0.5) as model:
        server.fault = HANG
        assert hybrid.is_right(model(x=hybrid.x))
        assert "deadline exceeded" in model.status.trouble
        assert model.status.fallbacks == 1


def test_a_server_that_hangs_without_a_local_plan(hybrid, server):
    with load(hybrid, server.address, deadline=0.5) as model:
        server.fault = HANG
        with pytest.raises(RemoteMissing, match="deadline exceeded"):
            model(x=hybrid.x)


def test_killed_in_mid_call_and_back(hybrid, server):
    with load_on_server(hybrid, server) as model:
        server.fault = HANG
        with ThreadPoolExecutor(1) as pool:
            before = server.calls.count("ModelInfer")
            call = pool.submit(model, x=hybrid.x)
            while server.calls.count("ModelInfer") == before:
                pass
            server.stop()
            assert hybrid.is_right(call.result())
        assert model.status.plan == "local"
        with type(server)(hybrid.repository, server.port):
            for _ in range(200):
                model.probe()
                if model.status.connected:
                    break
                threading.Event().wait(0.05)
            assert model.status.connected
            model._chooser.current = next(p for p in model.manifest.plans if p.name == "cut1")
            assert hybrid.is_right(model(x=hybrid.x))
            assert model.status.runs["cut1"] == 2


def test_the_next_endpoint_takes_over_and_stays(hybrid, server):
    with type(server)(hybrid.repository) as other:
        with load(hybrid, server.address, other.address) as model:
            assert server.address.endswith(model.status.endpoint)
            server.fault = CRASH
            assert hybrid.is_right(model(x=hybrid.x))
            assert other.address.endswith(model.status.endpoint)
            calls = len(server.calls)
            assert hybrid.is_right(model(x=hybrid.x))
            assert len(server.calls) == calls
        with load(hybrid, "127.0.0.1:1", other.address) as model:
            assert hybrid.is_right(model(x=hybrid.x))


def test_an_endpoint_that_hangs_leaves_time_for_the_next(hybrid, server):
    with Server(hybrid.repository) as other:
        model = load(hybrid, server.address, other.address, deadline=2.0)
        server.fault = HANG
        assert hybrid.is_right(model(x=hybrid.x))


def test_a_lost_call_is_sent_again_but_a_refused_one_is_not(hybrid, server):
    with load(hybrid, server.address, attempts=3) as model:
        for fault, count in ((ABORT, 3), (CRASH, 1)):
            server.fault = fault
            before = server.calls.count("ModelInfer")
            with pytest.raises(RemoteMissing):
                model(x=hybrid.x)
            assert server.calls.count("ModelInfer") - before == count


def test_nobody_there(hybrid):
    with pytest.raises(RemoteMissing, match=r"127\.0\.0\.1:1"):
        load(hybrid, "127.0.0.1:1", deadline=1.0)
    with load(hybrid, "127.0.0.1:1", plan=None, deadline=1.0) as model:
        for _ in range(3):
            assert hybrid.is_right(model(x=hybrid.x))
        assert model.status.runs["local"] == 3


@pytest.mark.parametrize("tells_config", [True, False])
def test_another_build_is_found_out_on_both_sides(hybrid, tmp_path, tells_config):
    bundle = with_other_build(hybrid, tmp_path)
    with Server(hybrid.repository, tells_config=tells_config) as server:
        remote = settings(server.address)
        with pytest.raises(RemoteMissing, match="another build"):
            hybridc.load(bundle, remote=remote)(x=hybrid.x)
        assert ("ModelInfer" in server.calls) != tells_config


def with_other_build(hybrid: Hybrid, folder: Path) -> Path:
    """The edge bundle, asking for a build that no server has."""
    import zipfile

    place = folder / "content"
    with zipfile.ZipFile(hybrid.bundle) as archive:
        archive.extractall(place)
    manifest = from_json((place / MANIFEST).read_bytes(), "")
    plans = []
    for plan in manifest.plans:
        parts = [
            dataclasses.replace(p, remote=dataclasses.replace(p.remote, build="ab" * 32))
            if p.remote
            else p
            for p in plan.parts
        ]
        plans.append(dataclasses.replace(plan, parts=tuple(parts)))
    (place / MANIFEST).write_bytes(to_json(dataclasses.replace(manifest, plans=tuple(plans))))
    write_archive(place, folder / "other.hyb")
    return folder / "other.hyb"


def test_many_callers_at_once(hybrid, server):
    with load(hybrid, server.address) as model:
        with ThreadPoolExecutor(6) as pool:
            results = [pool.submit(model, x=hybrid.x) for _ in range(24)]
            assert all(hybrid.is_right(result.result()) for result in results)
        assert model.status.runs == {"cut1": 24}


def test_streams_use_the_server(hybrid, server):
    with load(hybrid, server.address) as model:
        results = list(model.stream({"x": hybrid.x} for _ in range(3)))
        assert all(map(hybrid.is_right, results))
        assert model.status.runs == {"cut1": 3}


def test_private_bytes_do_not_reach_the_server(hybrid, server):
    with load(hybrid, server.address) as model:
        model(x=hybrid.x)
    sent = b"\0".join(server.received)
    raw = hybrid.x.tobytes()
    assert server.received
    assert not any(raw[start : start + 64] in sent for start in range(0, len(raw) - 64, 64))


def test_compressed_tensors_take_fewer_bytes(hybrid):
    """What crosses is the output of a Relu, half of it zeros."""
    with HttpServer(hybrid.repository) as server:
        crossed = []
        for compression in (False, True):
            with load(hybrid, server.address, compression=compression) as model:
                assert hybrid.is_right(model(x=hybrid.x))
                (plan,) = [plan for plan in model.manifest.plans if plan.name == "cut1"]
                crossed.append(model._chooser._times["cut1"].bytes[0])
        assert 0 < crossed[0] - plan.bytes < 1000
        assert crossed[1] < 0.7 * plan.bytes
        assert sum(map(len, server.received)) == 2 * (plan.bytes - 40)


@pytest.mark.parametrize("trickle", [HEADERS_TRICKLE, BODY_TRICKLE])
def test_an_answer_that_trickles_costs_no_more_than_the_deadline(hybrid, trickle):
    with HttpServer(hybrid.repository) as server, load(hybrid, server.address) as model:
        server.fault = trickle
        model._settings = dataclasses.replace(model._settings, deadline=0.5)
        with pytest.raises(RemoteMissing, match="deadline exceeded"):
            model(x=hybrid.x)
        assert server.trickled < 60


def test_the_command_line_names_the_server(hybrid, server, monkeypatch):
    done = run_hybridc("run", hybrid.bundle, "--remote", server.address, "--repeat", "2")
    assert done.code == 0, done.stderr
    assert "plans that ran" in done.stdout
    monkeypatch.setenv("HYBRIDC_REMOTE_DEADLINE", "soon")
    refused = run_hybridc("run", hybrid.bundle, "--remote", server.address)
    assert_refused(refused, 2, "HYBRIDC_REMOTE_DEADLINE")


@pytest.mark.parametrize("kind", [Server, HttpServer])
def test_a_token_is_needed(hybrid, kind):
    with kind(hybrid.repository, token=("authorization", "Bearer secret")) as server:
        with load(hybrid, server.address, token="secret") as model:
            assert hybrid.is_right(model(x=hybrid.x))
        for token in (None, "guess"):
            with pytest.raises(RemoteMissing, match="restricted"):
                load(hybrid, server.address, token=token)
    with pytest.raises(UsageError, match="in the clear"):
        RemoteSettings(("example.org:8001",), token="secret")
    assert "secret" not in repr(RemoteSettings(("localhost:8001",), token="secret"))


@pytest.mark.parametrize("kind", [Server, HttpServer])
def test_tls(hybrid, certificates, kind):
    ca = str(certificates / "authority.pem")
    with secure(kind, hybrid, certificates, mutual=False) as server:
        with load(hybrid, server.address, ca=ca) as model:
            assert hybrid.is_right(model(x=hybrid.x))
        stranger = str(certificates / "stranger.pem")
        for changes in ({"ca": stranger}, {}):
            with pytest.raises(RemoteMissing, match=server.place):
                load(hybrid, server.address, deadline=2.0, **changes)


@pytest.mark.parametrize("kind", [Server, HttpServer])
def test_mutual_tls(hybrid, certificates, kind):
    files = {
        "ca": str(certificates / "authority.pem"),
        "certificate": str(certificates / "client.pem"),
        "key": str(certificates / "client.key"),
    }
    with secure(kind, hybrid, certificates, mutual=True) as server:
        with load(hybrid, server.address, **files) as model:
            assert hybrid.is_right(model(x=hybrid.x))
        with pytest.raises(RemoteMissing):
            load(hybrid, server.address, deadline=2.0, ca=files["ca"])


def test_settings_out_of_the_environment(tmp_path):
    from hybridc.runtime.remote_settings import settings_from

    (tmp_path / "token").write_text("secret\n")
    values = {
        "HYBRIDC_REMOTE": "a:1, grpcs://b:2",
        "HYBRIDC_REMOTE_CA": "ca.pem",
        "HYBRIDC_REMOTE_TOKEN_FILE": str(tmp_path / "token"),
        "HYBRIDC_REMOTE_DEADLINE": "2.5",
    }
    packed = {"HYBRIDC_REMOTE": "http://a:1", "HYBRIDC_REMOTE_COMPRESSION": "deflate"}
    assert settings_from(packed).compression
    with pytest.raises(UsageError, match="must be deflate"):
        settings_from({**packed, "HYBRIDC_REMOTE_COMPRESSION": "brotli"})
    found = settings_from(values)
    assert found is not None
    assert (found.endpoints, found.token, found.deadline) == (("a:1", "grpcs://b:2"), "secret", 2.5)
    assert settings_from({}) is None
    assert settings_from(values, "c:3").endpoints == ("c:3",)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"endpoints": ()}, "no endpoint"),
        ({"endpoints": ("host",)}, "host:port"),
        ({"endpoints": ("host:99999",)}, "host:port"),
        ({"key": "a.key"}, "both"),
        ({"deadline": 0}, "deadline"),
        ({"attempts": 0}, "attempts"),
        ({"compression": True}, "http://"),
        ({"endpoints": ("http://example.org:80",), "token": "secret"}, "https://example.org"),
    ],
)
def test_wrong_settings(changes, word):
    with pytest.raises(UsageError, match=word):
        RemoteSettings(**{"endpoints": ("host:1",), **changes})


def test_a_plan_that_is_not_there(hybrid, server):
    with pytest.raises(UsageError, match="cut1"):
        load(hybrid, server.address, plan="cut9")


def test_the_server_gets_what_the_local_plan_leaves_of_the_deadline(hybrid, server):
    with load(hybrid, server.address, plan=None, deadline=1.0) as model:
        local = next(plan for plan in model.manifest.plans if plan.name == "local")
        slack = 0.05
        for seconds, spare in ((0.2, 0.3 + slack), (5.0, slack)):
            for own in (seconds / 10, seconds, seconds / 10):  # the slowest counts
                model._chooser.note_run(local, own, 0.0)
            assert model._spare() == pytest.approx(spare)


def test_closed(hybrid, server):
    model = load(hybrid, server.address)
    model.close()
    with pytest.raises(UsageError, match="closed"):
        model(x=hybrid.x)


def test_results_are_the_callers(hybrid, server):
    with load(hybrid, server.address) as model:
        first = model(x=hybrid.x)["y"]
        kept = first.copy()
        model(x=np.zeros_like(hybrid.x))
        assert np.array_equal(first, kept)
