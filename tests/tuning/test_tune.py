"""Which device a tuning file is for, and where it may grow."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from hybridc.targets.registry import parse_targets
from hybridc.targets.tuning import Problem, figures

from hybridc.errors import DeviceError, UsageError
from hybridc.runtime import cuda, opencl
from hybridc.tuning.file import TuningFile, read_file, to_json
from hybridc.tuning.measure import Measured, Times
from hybridc.tuning.tune import open_tuning

GPU = opencl.OpenclDevice(
    0, "a GPU", "gpu", "a vendor", "a platform", "3.0", "1", frozenset(), 2**30, 256, 2**15
)


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A machine with an OpenCL GPU and no NVIDIA driver."""
    monkeypatch.setattr(opencl, "devices", lambda: [GPU])
    monkeypatch.setattr(cuda, "DRIVER", "libnone.so.1")
    monkeypatch.delenv(opencl.VARIABLE, raising=False)
    return monkeypatch


@pytest.mark.parametrize(
    ("targets", "chosen"),
    [
        (["opencl", "llvm"], "opencl"),
        (["llvm", "opencl"], "llvm"),
        (["cuda:sm_90", "opencl", "llvm"], "opencl"),
        (["opencl:cpu", "llvm"], "llvm"),
        (["onnxruntime", "opencl:gpu"], "opencl"),
    ],
)
def test_a_file_is_for_the_first_device_that_is_here(
    tmp_path: Path, targets: list[str], chosen: str
) -> None:
    job = open_tuning(tmp_path / "t.json", 5.0, parse_targets(targets))
    assert job.file.code.target == chosen
    assert job.seconds == 5.0


def test_where_none_is_here(tmp_path: Path) -> None:
    targets = parse_targets(["cuda:sm_90", "opencl:cpu"])
    with pytest.raises(DeviceError, match=r"kernels for cuda:0 here: there is no NVIDIA driver"):
        open_tuning(tmp_path / "t.json", 5.0, targets)


def written(path: Path, machine: str) -> TuningFile:
    """A file with a choice for OpenCL devices, by a device of this name."""
    job = open_tuning(path, 5.0, parse_targets(["opencl"]))
    times = Times(1.0, 1.0)
    row = Measured(Problem("tiles", figures(rows=1)), figures(tile=16), times, times, 2)
    file = job.file.extended([row], machine, 1)
    path.write_text(to_json(file))
    return file


def test_a_file_grows_on_its_own_device_only(tmp_path: Path, machine: pytest.MonkeyPatch) -> None:
    targets, path = parse_targets(["opencl"]), tmp_path / "t.json"
    file = written(path, "a GPU")
    assert open_tuning(path, 5.0, targets).file == file
    other = dataclasses.replace(GPU, name="another GPU")
    machine.setattr(opencl, "devices", lambda: [other])
    with pytest.raises(UsageError, match="measured on a GPU and this machine has another GPU"):
        open_tuning(path, 5.0, targets)
    assert open_tuning(path, None, targets).file == file
    assert read_file(path) == file


def test_a_file_without_kernels_is_of_no_device(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    file = written(path, "elsewhere")
    path.write_text(to_json(dataclasses.replace(file, kernels=())))
    assert open_tuning(path, 5.0, parse_targets(["opencl"])).file.kernels == ()


def test_a_file_that_is_given_needs_no_device(tmp_path: Path, machine: pytest.MonkeyPatch) -> None:
    path = tmp_path / "t.json"
    file = written(path, "a GPU")
    machine.setattr(opencl, "devices", lambda: [])
    assert open_tuning(path, None, parse_targets(["opencl"])).file == file
    with pytest.raises(UsageError, match=r"measured for built for \+.* this compile is for gpu"):
        open_tuning(path, None, parse_targets(["opencl:gpu"]))
