"""``--tune`` on an OpenCL device: what wins there is written, and built ever after."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hybridc.targets.tuning import TunableKernel

from hybridc.runtime.opencl import choose
from hybridc.tuning import tune as tuning
from hybridc.tuning.measure import Measured, Times
from tests.models import make_model, node, random, save
from tests.support import assert_compile_refused, hybridc
from tests.targets.test_opencl import needs_device

pytestmark = needs_device


def second_wins(kernels: Sequence[TunableKernel], _seconds: float) -> Iterator[Measured]:
    """Run two candidates of each kernel on the device, and let the second be the faster one."""
    for kernel in kernels:
        runs = {choice: kernel.build(choice) for choice in kernel.candidates[:2]}
        assert all(runs.values())
        for run in runs.values():
            run(kernel.at_once)
        _, second = runs
        yield Measured(kernel.problem, second, Times(1e-3, 1e-3), Times(2e-3, 2e-3), 2)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a model of one product."""
    monkeypatch.setattr(tuning, "measure_kernels", second_wins)
    weights = {"w": random(48, 64)}
    nodes = [node("MatMul", "x w", "p"), node("Relu", "p", "y")]
    save(make_model(nodes, {"x": (40, 48)}, {"y": (40, 64)}, weights), tmp_path / "model.onnx")
    return tmp_path


def compiled(folder: Path, name: str, *options: Any) -> tuple[bytes, str]:
    """The bundle, and what was printed."""
    target = ("--target", "opencl")
    outcome = hybridc("compile", folder / "model.onnx", "-o", folder / name, *target, *options)
    assert outcome.code == 0, outcome
    return (folder / name).read_bytes(), outcome.stdout


def test_what_wins_is_built_from_the_file_ever_after(folder: Path) -> None:
    path = folder / "t.json"
    plain, _ = compiled(folder, "plain.hyb")
    tuned, printed = compiled(folder, "tuned.hyb", "--tune", "60", "--tuning", path)
    assert "note: 1 kernels were measured, and 1 of them got another choice" in printed
    assert tuned != plain
    device = choose(()).name
    assert json.loads(path.read_text())["machine"] == device
    again, printed = compiled(folder, "again.hyb", "--tuning", path)
    assert f"note: opencl:0 gets choices measured on {device}" in printed
    assert again == tuned
    is_of_another_device(path, folder)


def is_of_another_device(path: Path, folder: Path) -> None:
    """Choices of another device are not mixed with this one's, and not for other words."""
    data = json.loads(path.read_text())
    path.write_text(json.dumps({**data, "machine": "another device"}))
    options = ("--target", "opencl", "--tuning", str(path), "--tune", "5")
    words = ("was measured on another device and this machine has", "name another --tuning")
    assert_compile_refused(folder / "model.onnx", folder, 2, *words, options=options)
    (folder / "output").rmdir()
    options = ("--target", "opencl:cpu", "--tuning", str(path))
    words = ("was measured for built for", "cpu")
    assert_compile_refused(folder / "model.onnx", folder, 2, *words, options=options)
