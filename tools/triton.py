"""Runs a Triton Inference Server out of Python packages, for tests and benchmarks.

``make triton`` puts into ``.cache/triton`` what this needs: the server with its Python back end,
the packages of the server's Python, and Triton's public client.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HOME = ROOT / ".cache" / "triton"

_READY_SECONDS = 120.0

_ASK = "import sys, urllib.request as r; r.urlopen(sys.argv[1], timeout=1)"


@dataclass(frozen=True)
class Triton:
    """A server that runs.

    Attributes:
        grpc: ``host:port`` of gRPC.
        http: ``host:port`` of HTTP.
        packages: What its Python imports, hybridc's loader among it.
    """

    grpc: str
    http: str
    packages: Path


def is_here() -> bool:
    """Whether ``make triton`` has been there."""
    return (HOME / "finished").exists()


def loader_packages(folder: Path) -> Path:
    """Make a folder with the loader of this source and its dependencies alone; returns it."""
    options = ("--quiet", "--no-deps", "--no-build-isolation", "--disable-pip-version-check")
    command = [sys.executable, "-m", "pip", "install", *options, "--target", folder, ROOT]
    subprocess.run(list(map(str, command)), check=True, capture_output=True)
    for child in (HOME / "packages").iterdir():
        if not (folder / child.name).exists():
            (folder / child.name).symlink_to(child)
    return folder


@contextlib.contextmanager
def serve(
    repository: Path,
    scratch: Path,
    host: str = "127.0.0.1",
    prefix: Sequence[str] = (),
    options: Sequence[str] = (),
) -> Iterator[Triton]:
    """Serve a model repository.

    Args:
        repository: The repository; its models have a link to the packages meanwhile.
        scratch: A folder for what the server writes, and for its packages.
        host: Where it listens.
        prefix: What its command starts with, such as a network namespace.
        options: More options of the server.

    Raises:
        RuntimeError: It did not start; its log follows.
    """
    packages = loader_packages(scratch / "packages")
    grpc, http = _free_ports(2)
    own = {
        "model-repository": repository,
        "backend-directory": _backends(scratch),
        "grpc-address": host,
        "grpc-port": grpc,
        "http-address": host,
        "http-port": http,
        "allow-metrics": "false",
    }
    server = HOME / "server" / "pytriton" / "tritonserver" / "bin" / "tritonserver"
    command = [*prefix, str(server), *(f"--{n}={value}" for n, value in own.items()), *options]
    log = scratch / "triton.log"
    with _linked(repository, packages), _running(command, log) as process:
        _await(process, [*prefix, sys.executable, "-c", _ASK], f"{host}:{http}", log)
        yield Triton(f"{host}:{grpc}", f"{host}:{http}", packages)


@contextlib.contextmanager
def _running(command: Sequence[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    libraries = (HOME / "server" / "nvidia_pytriton.libs", sysconfig.get_config_var("LIBDIR"))
    environment = {**os.environ, "LD_LIBRARY_PATH": ":".join(map(str, libraries))}
    with open(log, "w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
    try:
        yield process
    finally:
        process.terminate()
        process.wait(60)


@contextlib.contextmanager
def _linked(repository: Path, packages: Path) -> Iterator[None]:
    """A link to the packages in each model's folder, which its ``model.py`` looks for."""
    links = [model / "packages" for model in repository.iterdir() if model.is_dir()]
    for link in links:
        link.symlink_to(packages.resolve())
    try:
        yield
    finally:
        for link in links:
            link.unlink()


def _backends(scratch: Path) -> Path:
    """The back ends, with the Python back end's program for this version of Python."""
    package = HOME / "server" / "pytriton"
    backends = scratch / "backends"
    shutil.copytree(package / "tritonserver" / "backends", backends)
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    stub = package / "tritonserver" / "python_backend_stubs" / version
    shutil.copy(stub / "triton_python_backend_stub", backends / "python")
    return backends


def _free_ports(count: int) -> list[int]:
    """Ports that nobody has, all different."""
    with contextlib.ExitStack() as stack:
        made = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [int(listener.getsockname()[1]) for listener in made]


def _await(process: subprocess.Popen[bytes], ask: Sequence[str], place: str, log: Path) -> None:
    """Wait until the server says that it is ready."""
    command = [*ask, f"http://{place}/v2/health/ready"]
    end = time.monotonic() + _READY_SECONDS
    while process.poll() is None and time.monotonic() < end:
        if subprocess.run(command, capture_output=True, check=False).returncode == 0:
            return
        time.sleep(0.1)
    text = log.read_text(errors="replace")[-3000:]
    raise RuntimeError(f"the Triton server did not start:\n{text}")
