"""Bundles on this machine's GPU; on another machine, tests/gpu/run.sh does the same."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from hybridc.runtime.cuda import DriverError, devices
from tests.gpu import check, loader
from tests.gpu.bundles import LIGHT, build
from tests.gpu.models import SMALL


def _missing() -> str | None:
    try:
        devices()
    except DriverError as error:
        return str(error)
    return None


pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(_missing() is not None, reason=f"no GPU: {_missing()}"),
]

TIMEOUT = 120
"""Seconds after which a kernel is taken to hang."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bundles")
    for name in SMALL:
        build(name, path, "cuda")
    return path


def run(script: object, *arguments: str) -> None:
    command = [sys.executable, str(script.__file__), *arguments]  # type: ignore[attr-defined]
    result = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("name", SMALL)
def test_a_kind_of_kernel(folder: Path, name: str) -> None:
    run(check, str(folder / name))


@pytest.mark.slow
@pytest.mark.parametrize("name", LIGHT)
def test_a_classic_topology(tmp_path: Path, name: str) -> None:
    build(name, tmp_path, "cuda")
    run(check, str(tmp_path / name))


@pytest.mark.parametrize("name", [function.__name__ for function in loader.CHECKS])
def test_the_loader(folder: Path, name: str) -> None:
    run(loader, str(folder), name)
