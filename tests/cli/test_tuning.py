"""``--tune`` and ``--tuning``: measured once, and built the same ever after."""

from __future__ import annotations

import json
import platform
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from hybridc.runtime import cuda, opencl
from tests.models import save
from tests.support import assert_compile_refused, hybridc

OTHER = "llvm:aarch64" if platform.machine() == "x86_64" else "llvm:x86-64-v3"
"""A target whose code this machine cannot run."""

MEASURED = ["--tune", "5", "--tuning", "t.json"]

DEVICE = opencl.OpenclDevice(
    0, "a device", "gpu", "a vendor", "a platform", "3.0", "1", frozenset(), 2**30, 256, 2**15
)
"""What a machine may have."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model of a convolution and a product, tuned, and what that gave."""
    folder = tmp_path_factory.mktemp("tuned")
    text = """<ir_version: 8, opset_import: ["": 17]>
        net (float[1,5,4,3] x) => (float[1,16] y)
        <float[12,5,3,3] a = {%s}, float[12,16] b = {%s}> {
            h = Conv<pads = [1, 1, 1, 1]>(x, a)
            p = GlobalMaxPool(h)
            f = Flatten(p)
            y = MatMul(f, b)
        }"""
    random = np.random.default_rng(0)
    weights = (random.standard_normal(size).astype("float32") for size in (12 * 5 * 9, 12 * 16))
    model = onnx.parser.parse_model(text % tuple(", ".join(map(str, w)) for w in weights))
    save(model, folder / "model.onnx")
    done = compiled(folder, "tuned.hyb", "--tune", "600", "--tuning", folder / "tuning.json")
    assert "note: 2 kernels were measured" in done
    return folder


def compiled(folder: Path, name: str, *options: Any) -> str:
    outcome = hybridc("compile", folder / "model.onnx", "-o", folder / name, *options)
    assert outcome.code == 0, outcome
    return outcome.stdout


def test_the_file_gives_the_same_bundle(folder: Path) -> None:
    for name in ("first.hyb", "second.hyb"):
        compiled(folder, name, "--tuning", folder / "tuning.json")
        assert (folder / name).read_bytes() == (folder / "tuned.hyb").read_bytes()


def test_what_is_in_the_file_is_not_measured_again(folder: Path) -> None:
    before = (folder / "tuning.json").read_text()
    options = ("--tune", "600", "--tuning", folder / "tuning.json")
    assert "note: 0 kernels were measured" in compiled(folder, "again.hyb", *options)
    assert (folder / "tuning.json").read_text() == before


def test_a_file_of_another_machine(folder: Path, tmp_path: Path) -> None:
    """It is taken, with a note, and nothing is measured for it here."""
    data = json.loads((folder / "tuning.json").read_text())
    data["machine"] = "a CPU of another maker"
    path = tmp_path / "t.json"
    path.write_text(json.dumps(data))
    done = compiled(folder, "foreign.hyb", "--tuning", path)
    assert "note: llvm:0 gets choices measured on a CPU of another maker" in done
    assert (folder / "foreign.hyb").read_bytes() == (folder / "tuned.hyb").read_bytes()
    options = ["--tune", "5", "--tuning", path]
    refused(folder, tmp_path, 2, "was measured on a CPU of another maker", options=options)
    assert json.loads(path.read_text()) == data


def test_time_that_is_up_at_once(folder: Path, tmp_path: Path) -> None:
    done = compiled(folder, "hasty.hyb", "--tune", "1e-9", "--tuning", tmp_path / "t.json")
    assert "2 kernels were not: time was up" in done
    assert json.loads((tmp_path / "t.json").read_text())["kernels"] == []
    compiled(folder, "plain.hyb")
    assert (folder / "hasty.hyb").read_bytes() == (folder / "plain.hyb").read_bytes()


def changed(folder: Path, path: Path, change: dict[str, Any]) -> Path:
    """The tuning file with another choice for its convolution."""
    data = json.loads((folder / "tuning.json").read_text())
    (entry,) = (one for one in data["kernels"] if one["sizes"]["kernel_rows"] == 3)
    entry["choice"].update(change)
    path.write_text(json.dumps(data))
    return path


def test_another_choice_gives_another_kernel(folder: Path, tmp_path: Path) -> None:
    bundles = set()
    for width in (1, 2, 3):
        choice = {"vectors": 1, "tile_rows": 1, "tile_columns": width}
        path = changed(folder, tmp_path / "t.json", choice)
        # The compile compares results with the reference itself.
        compiled(folder, "other.hyb", "--tuning", path)
        bundles.add((folder / "other.hyb").read_bytes())
    assert len(bundles) == 3


def refused(folder: Path, tmp_path: Path, code: int, *words: str, options: list[Any]) -> None:
    texts = tuple(map(str, options))
    assert_compile_refused(folder / "model.onnx", tmp_path, code, *words, options=texts)


def test_a_choice_that_is_no_candidate_is_refused(folder: Path, tmp_path: Path) -> None:
    path = changed(folder, tmp_path / "t.json", {"tile_columns": 50})
    refused(folder, tmp_path, 2, "tile_columns=50", "none of its", options=["--tuning", path])


def test_a_file_for_another_target_is_refused(folder: Path, tmp_path: Path) -> None:
    options = ["--tuning", folder / "tuning.json", "--target", OTHER]
    refused(folder, tmp_path, 2, "tuning.json was measured for", options=options)


def test_a_file_of_another_version_is_refused(folder: Path, tmp_path: Path) -> None:
    data = json.loads((folder / "tuning.json").read_text())
    data["code"]["hybridc"] = "0.0.1"
    (tmp_path / "t.json").write_text(json.dumps(data))
    options = ["--tuning", tmp_path / "t.json"]
    refused(folder, tmp_path, 2, "measured for hybridc 0.0.1", options=options)
    assert json.loads((tmp_path / "t.json").read_text()) == data


@pytest.mark.parametrize(
    ("code", "word", "options"),
    [
        (2, "--tune needs a --tuning file", ["--tune", "5"]),
        (2, "cannot read the tuning", ["--tuning", "none.json"]),
        (2, "not for onnxruntime", [*MEASURED, "--target", "onnxruntime"]),
        (7, "cannot measure", [*MEASURED, "--target", OTHER]),
        (7, "there is no NVIDIA driver", [*MEASURED, "--target", "cuda:sm_90"]),
        (7, "no OpenCL device is called 'nobody'", [*MEASURED, "--target", "opencl:nobody"]),
    ],
)
def test_what_cannot_be_tuned_is_refused(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    code: int,
    word: str,
    options: list[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cuda, "DRIVER", "libnone.so.1")
    monkeypatch.delenv(opencl.VARIABLE, raising=False)
    monkeypatch.setattr(opencl, "devices", lambda: [DEVICE])
    refused(folder, tmp_path, code, word, options=options)
    assert not (tmp_path / "t.json").exists()
