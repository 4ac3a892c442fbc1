"""``hybridc doctor``: which devices are here, and what each one can do."""

from __future__ import annotations

import dataclasses
import importlib.util
from typing import Any

import pytest
from hybridc.targets.cuda import probe as cuda
from hybridc.targets.llvm import probe as llvm
from hybridc.targets.opencl import probe as opencl

from hybridc.runtime.cuda import GpuInfo
from hybridc.runtime.opencl import OpenclDevice
from tests.support import hybridc

GPUS = [
    GpuInfo(0, "a new one", (9, 0), 80 * 2**30),
    GpuInfo(1, "one without bfloat16", (7, 5), 16 * 2**30),
    GpuInfo(2, "an old one", (6, 1), 8 * 2**30),
]

OPENCL = OpenclDevice(
    0,
    "a device",
    "gpu",
    "a vendor",
    "a platform",
    "OpenCL 3.0",
    "1.0",
    frozenset({"cl_khr_fp16"}),
    2**30,
    256,
    32 * 2**10,
)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(cuda, "devices", lambda: GPUS)
    monkeypatch.setattr(cuda, "driver_version", lambda: (13, 0))
    monkeypatch.setattr(cuda, "find_runtime", lambda: "libcudart.so.13")
    return monkeypatch


def test_gpus(gpus: pytest.MonkeyPatch) -> None:
    new, older, old = (found.details for found in cuda.probe())
    assert new["floats"] == "fp32, fp64, fp16, bf16"
    assert "tf32" in new["tensor cores"]
    assert new["runs bundles"] == "yes"
    assert new["compile for it with"] == "--target cuda:sm_90"
    assert older["floats"] == "fp32, fp64, fp16"
    assert older["tensor cores"] == "not used"
    assert older["compile for it with"] == "--target cuda:sm_75"
    assert old["runs bundles"] == "no: it is older than sm_75"
    assert "compile for it with" not in old
    shown = hybridc("doctor").stdout
    assert all(f"target cuda: {gpu.name}" in shown for gpu in GPUS)


def test_a_gpu_without_the_runtime_library(gpus: pytest.MonkeyPatch) -> None:
    gpus.setattr(cuda, "find_runtime", lambda: None)
    details = cuda.probe()[0].details
    assert details["runs bundles"] == "no: pip install 'hybridc[cuda]'"
    assert details["runtime library"] == "none"


@pytest.mark.parametrize(
    ("changes", "runs", "target"),
    [
        ({}, "yes", "--target opencl:gpu,fp16"),
        ({"kind": "other"}, "yes", "--target opencl:fp16"),
        ({"extensions": frozenset({"cl_khr_fp64"})}, "yes", "--target opencl:gpu,fp64"),
        ({"extensions": frozenset()}, "yes", "--target opencl:gpu"),
        ({"work_group": 128}, "not all: it lacks work-groups of 256", "--target opencl:gpu,fp16"),
        (
            {"work_group": 1, "local_bytes": 2**14},
            "not all: it lacks work-groups of 256 and 32 KiB of local memory",
            "--target opencl:gpu,fp16",
        ),
    ],
)
def test_opencl_devices(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], runs: str, target: str
) -> None:
    device = dataclasses.replace(OPENCL, **changes)
    monkeypatch.setattr(opencl, "devices", lambda: [device])
    (found,) = opencl.probe()
    assert found.details["runs bundles"] == runs
    assert found.details["compile for it with"] == target


def test_the_cpu_is_shown_without_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = frozenset({"avx2", "asimd", "avx512_vnni", "asimddp", "hypervisor"})
    monkeypatch.setattr(llvm, "cpu_flags", lambda: flags)
    (whole,) = llvm.probe()
    assert whole.details["compile for it with"] == "--target llvm:host"
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    (found,) = llvm.probe()
    assert found.details["instruction sets"] in ("avx2 avx512_vnni", "asimd asimddp")
    assert set(found.details) < set(whole.details)
    assert found.missing == ()
