"""One small compiled model that many tests load; compiled once for all of them.

Tests leave the user's cache alone. ``make test`` gives them one of their own, in this folder.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hybridc.targets.llvm.object_cache import VARIABLE

from hybridc.bundle.storage import write_archive
from tests.models import branched_model, save
from tests.support import compile_to


def pytest_configure() -> None:
    """Keep no kernels unless the environment has a folder for them."""
    os.environ.setdefault(VARIABLE, "")


@pytest.fixture(scope="session")
def model_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The ONNX file of :func:`branched_model`."""
    return save(branched_model(), tmp_path_factory.mktemp("model") / "branched.onnx")


@pytest.fixture(scope="session")
def bundle(model_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The compiled model as a folder; not to be changed, but for what is put right again."""
    output = tmp_path_factory.mktemp("bundle") / "branched"
    compile_to(output, model_file, verify=True)
    return output


@pytest.fixture(scope="session")
def archive(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same as one file."""
    output = tmp_path_factory.mktemp("archive") / "branched.hyb"
    write_archive(bundle, output)
    return output
