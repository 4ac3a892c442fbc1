"""The small graphs of :mod:`tests.cases` and real models give the same on AArch64."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

from hybridc.errors import HybridcError
from hybridc.runtime.samples import relative_error
from tests.arm import emulator
from tests.cases.test_cases import CASES, DATA, set_shapes
from tests.support import compile_to

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(emulator.why_not() is not None, reason=str(emulator.why_not())),
]
TARGET = "llvm:aarch64"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """All cases, built here and run in one emulated process."""
    path = tmp_path_factory.mktemp("arm")
    for name in CASES:
        try:
            build(name, path / f"{name}.bundle")
        except HybridcError as error:
            (path / f"{name}.error").write_text(str(error))
    emulator.run_all(path)
    return path


def build(name: str, bundle: Path) -> None:
    model = onnx.load(DATA / name / "model.onnx")
    inputs = dict(np.load(DATA / name / "inputs.npz", allow_pickle=False))
    set_shapes(model, inputs)
    compile_to(bundle, model, targets=(TARGET,), fallback=False)
    weights = {tensor.name for tensor in model.graph.initializer}
    np.savez(bundle.with_suffix(".npz"), **{n: x for n, x in inputs.items() if n not in weights})


@pytest.mark.parametrize("name", sorted(CASES))
def test_case(name: str, folder: Path) -> None:
    expected = dict(np.load(DATA / name / "outputs.npz", allow_pickle=False))
    results = emulator.outputs_of(folder / f"{name}.bundle")
    for output, actual in results.items():
        assert relative_error(actual, expected[output]) <= 1e-4, CASES[name]["label"]
