"""A real Triton server serves the repository: to its public client, in batches, over versions."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from onnx import numpy_helper

import hybridc
from hybridc.errors import RemoteMissing
from hybridc.runtime.remote_settings import RemoteSettings
from tests.models import save
from tests.remote.conftest import SERVER, Hybrid, compile_hybrid, hybrid_model
from tests.support import hybridc as run_hybridc
from tools.triton import HOME, Triton, is_here, serve

pytestmark = pytest.mark.skipif(not is_here(), reason="there is no Triton server: make triton")

CLIENTS = 16
BATCH = ("--remote-batch", "8", "--remote-delay", "20ms", "--no-verify")


@dataclass
class Served:
    """A repository that Triton serves.

    Attributes:
        hybrid: The edge's bundle and the repository.
        triton: The server.
        x: An input for each client; batch, 3, 96, 96.
        y: What the model gives for them.
    """

    hybrid: Hybrid
    triton: Triton
    x: np.ndarray
    y: np.ndarray
    folder: Path
    model: str = "edge-remote"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("triton")
    hybrid = compile_hybrid(folder, *SERVER, *BATCH, batch="1..8")
    x = np.random.default_rng(3).standard_normal((CLIENTS, 3, 96, 96)).astype(np.float32)
    with hybridc.load(hybrid.bundle) as local:
        y = np.concatenate([local(x=own)["y"] for own in np.split(x, CLIENTS)])
    np.save(folder / "x.npy", x)
    explicit = ("--model-control-mode=explicit", "--load-model=*")
    with serve(hybrid.repository, folder, options=explicit) as triton:
        yield Served(hybrid, triton, x, y, folder)


def settings_of(served: Served, protocol: str, **others) -> dict:
    address = served.triton.grpc if protocol == "grpc" else served.triton.http
    return {
        "protocol": protocol,
        "address": address,
        "statistics": served.triton.grpc,
        "model": served.model,
        "input": "x",
        "output": "y",
        "inputs": str(served.folder / "x.npy"),
        "outputs": str(served.folder / "y.npz"),
        "clients": CLIENTS,
        "requests": 20,
        **others,
    }


@contextlib.contextmanager
def clients(settings: dict) -> Iterator[subprocess.Popen]:
    """Clients in a process of their own, which does not outlive the block."""
    script = Path(__file__).with_name("triton_client.py")
    environment = {**os.environ, "PYTHONPATH": str(HOME / "client")}
    command = [sys.executable, str(script), json.dumps(settings)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as process:
        try:
            yield process
        finally:
            process.kill()


@dataclass
class Came:
    """What clients got: counts of the server, errors, and the results by client."""

    requests: int
    errors: list[str]
    inference_count: int
    execution_count: int
    results: list[tuple[int, np.ndarray]] = field(default_factory=list)


def what_came(process: subprocess.Popen, settings: dict) -> Came:
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    came = Came(**json.loads(output))
    with np.load(settings["outputs"]) as arrays:
        came.results = [(int(key.split("/")[0]), arrays[key]) for key in arrays.files]
    return came


def close(result: np.ndarray, expected: np.ndarray) -> bool:
    return bool(np.allclose(result[0], expected, rtol=1e-4, atol=1e-5))


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_concurrent_clients_are_batched_and_each_gets_its_own_result(served, protocol):
    settings = settings_of(served, protocol)
    with clients(settings) as process:
        came = what_came(process, settings)
    assert came.errors == []
    assert came.requests == came.inference_count == CLIENTS * 20
    assert came.execution_count < 0.9 * came.inference_count
    assert {client for client, _ in came.results} == set(range(CLIENTS))
    assert all(close(result, served.y[client]) for client, result in came.results)


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_the_loader_is_served(served, protocol):
    address = f"{protocol}://{getattr(served.triton, protocol)}"
    settings = RemoteSettings((address,), plan="remote")
    with hybridc.load(served.hybrid.bundle, remote=settings) as model:
        for x, y in zip(np.split(served.x, CLIENTS), served.y, strict=True):
            assert close(model(x=x)["y"], y)
        assert (model.status.plan, model.status.fallbacks) == ("remote", 0)


def second_version(served: Served) -> tuple[Path, np.ndarray]:
    """Compile other weights as version 2 into the repository; the edge's bundle and its results."""
    changed = hybrid_model()
    for tensor in changed.graph.initializer:
        if tensor.name == "w4":
            tensor.CopyFrom(numpy_helper.from_array(-numpy_helper.to_array(tensor), "w4"))
    model = save(changed, served.folder / "changed.onnx")
    bundle = served.folder / "second" / "edge.hyb"  # its name is that of the models
    bundle.parent.mkdir()
    place = ("-o", bundle, "--repository", served.hybrid.repository, "--remote-version", "2")
    done = run_hybridc("compile", model, "--shape", "batch=1..8", *place, *SERVER, *BATCH)
    assert done.code == 0, done.stderr
    return bundle, -served.y


def load_model(served: Served) -> None:
    """Ask Triton to take the model's folder as it is now."""
    from urllib.request import Request, urlopen

    url = f"http://{served.triton.http}/v2/repository/models/{served.model}/load"
    with urlopen(Request(url, b"{}", method="POST"), timeout=60) as answer:
        assert answer.status == 200


@contextlib.contextmanager
def edge_calls(served: Served) -> Iterator[list[str]]:
    """The first bundle calls the server all the time; what went wrong."""
    wrong: list[str] = []
    done = threading.Event()
    settings = RemoteSettings((served.triton.grpc,), plan="remote")

    def call() -> None:
        with hybridc.load(served.hybrid.bundle, remote=settings) as model:
            while not done.is_set():
                try:
                    if not close(model(x=served.x[:1])["y"], served.y[0]):
                        wrong.append("wrong")
                except RemoteMissing as error:
                    wrong.append(str(error))
            wrong.extend(["fell back"] * model.status.fallbacks)

    thread = threading.Thread(target=call)
    thread.start()
    try:
        yield wrong
    finally:
        done.set()
        thread.join(60)


def test_a_version_goes_live_and_is_rolled_back_under_load(served):
    """Clients that name no version get the newest; a bundle gets the one that it was made with."""
    stop = served.folder / "stop"
    under_load = settings_of(served, "grpc", requests=10**9, stop=str(stop), clients=4)
    once = settings_of(served, "http", requests=1, outputs=str(served.folder / "once.npz"))

    def newest() -> list[tuple[int, np.ndarray]]:
        with clients(once) as process:
            return what_came(process, once).results

    with clients(under_load) as process, edge_calls(served) as wrong:
        second, y = second_version(served)
        load_model(served)
        assert all(close(result, y[client]) for client, result in newest())
        settings = RemoteSettings((served.triton.grpc,), plan="remote")
        with hybridc.load(second, remote=settings) as model:
            assert close(model(x=served.x[:1])["y"], y[0])
            (served.hybrid.repository / served.model / "2").rename(served.folder / "2")
            load_model(served)
            with pytest.raises(RemoteMissing, match="version 2"):
                model(x=served.x[:1])
        with hybridc.load(second, remote=served.triton.grpc) as model:
            assert close(model(x=served.x[:1])["y"], y[0]), "this end computed it"
        assert all(close(result, served.y[client]) for client, result in newest())
        stop.touch()
        came = what_came(process, under_load)
    assert wrong == []
    assert came.errors == []
    for client, result in came.results:
        assert close(result, served.y[client]) or close(result, y[client])
    both = [any(close(r, own[c]) for c, r in came.results) for own in (served.y, y)]
    assert both == [True, True], "the load saw both versions"
