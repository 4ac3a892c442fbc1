"""Bundles for OpenCL in processes of their own: choice of the device, caches, threads, memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hybridc.targets.opencl.plugin import built_path, plugin

import hybridc.runtime.opencl as opencl
from hybridc.bundle.read import open_bundle
from hybridc.errors import DeviceError
from hybridc.runtime.opencl import OpenclDevice, OpenclError, choose
from tests.gpu.models import SMALL
from tests.models import branched_model
from tests.support import compile_to, hybridc
from tests.targets.test_opencl import needs_device

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def branched(tmp_path_factory):
    output = tmp_path_factory.mktemp("opencl") / "branched"
    compile_to(output, branched_model(), targets=("opencl",))
    return output


@pytest.fixture(scope="module")
def softmax(tmp_path_factory):
    output = tmp_path_factory.mktemp("opencl") / "softmax"
    compile_to(output, SMALL["softmax"](), targets=("opencl",))
    return output


def in_loader(check, *paths, **environment):
    """What a check of ``opencl_loader.py`` finds in a process without the compiler."""
    result = subprocess.run(
        [sys.executable, "-m", "tests.targets.opencl_loader", check, *map(str, paths)],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env={**os.environ, **environment},
    )
    assert result.returncode == 0, result.stderr[-2000:]
    return json.loads(result.stdout)


COMPILE_AND_LOAD = """
import os, sys
cache = os.environ.pop("XDG_CACHE_HOME", None)
os.environ["XDG_CACHE_HOME"] = sys.argv[1]
import tvm
del os.environ["XDG_CACHE_HOME"]
os.environ.update({"XDG_CACHE_HOME": cache} if cache else {})
from hybridc.compiler import build, load_built
from hybridc.frontend.read import source_of
from hybridc.runtime.arrays import random_inputs
from tests.models import branched_model
from tests.support import make_options
with load_built(build(source_of(branched_model()), make_options(("opencl",)))[0]) as model:
    print(all(abs(y).max() > 0 for y in model.run(random_inputs(model, 0)).values()))
"""


@needs_device
def test_the_first_compile_on_a_machine_loads_what_it_built(tmp_path):
    """The plug-in was not there yet when ``tvm`` was imported."""
    words = [sys.executable, "-c", COMPILE_AND_LOAD, str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, check=False, cwd=ROOT)
    assert (done.stdout, done.returncode) == ("True\n", 0), done.stderr[-2000:]


@needs_device
def test_four_threads(branched):
    found = in_loader("threads", branched)
    assert found == {"calls": 200, "same": 200, "distinct": True}


@needs_device
def test_two_bundles_at_once(branched, softmax):
    assert in_loader("two_models", branched, softmax) == {"calls": 10, "same": 10}


@needs_device
def test_loading_and_closing_leaves_no_memory_behind(branched):
    found = in_loader("cycles", branched)
    assert found["late"] - found["early"] < 4 << 10


@needs_device
def test_kernels_are_timed_on_demand(branched):
    found = in_loader("times", branched, HYBRIDC_OPENCL_PROFILE="1")
    assert found["times"]
    assert all(calls % 3 == 0 and spent > 0 for calls, spent in found["times"].values())
    assert found["left"] == 0
    assert in_loader("times", branched, HYBRIDC_OPENCL_PROFILE="0")["times"] == {}


@needs_device
def test_binaries_are_kept_and_used_again(softmax, tmp_path):
    expected = in_loader("outputs", softmax, HYBRIDC_OPENCL_CACHE=str(tmp_path))
    (kept,) = tmp_path.iterdir()
    assert kept.stat().st_mode & 0o077 == 0
    before = kept.stat().st_ino
    assert in_loader("outputs", softmax, HYBRIDC_OPENCL_CACHE=str(tmp_path)) == expected
    assert [path.stat().st_ino for path in tmp_path.iterdir()] == [before]


@needs_device
@pytest.mark.parametrize("damage", ["cut", "changed", "empty", "another key"])
def test_damaged_binaries_are_replaced(softmax, tmp_path, damage):
    expected = in_loader("outputs", softmax, HYBRIDC_OPENCL_CACHE=str(tmp_path))
    (kept,) = tmp_path.iterdir()
    right = kept.read_bytes()
    place = len(right) // 2 if damage == "changed" else 40
    changed = right[:place] + bytes([right[place] ^ 1]) + right[place + 1 :]
    kept.write_bytes({"cut": right[:-9], "empty": b""}.get(damage, changed))
    assert in_loader("outputs", softmax, HYBRIDC_OPENCL_CACHE=str(tmp_path)) == expected
    assert len(kept.read_bytes()) == len(right)
    assert len(list(tmp_path.iterdir())) == 1


@needs_device
def test_the_cache_can_be_off_or_of_no_use(softmax, tmp_path):
    file = tmp_path / "file"
    file.write_bytes(b"")
    expected = in_loader("outputs", softmax, HYBRIDC_OPENCL_CACHE="")
    assert in_loader("outputs", softmax, HYBRIDC_OPENCL_CACHE=str(file / "no folder")) == expected


def test_without_a_driver_the_loader_says_so(branched, tmp_path):
    """Also a user of the command line, who gets the exit code for a missing device."""
    environment = {"OCL_ICD_VENDORS": str(tmp_path), "OCL_ICD_FILENAMES": ""}
    script = "import sys; from hybridc.cli import main; sys.exit(main())"
    result = subprocess.run(
        [sys.executable, "-c", script, "run", str(branched)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **environment},
    )
    assert result.returncode == 7, result.stderr
    assert "device opencl:0 cannot run here" in result.stderr
    assert "Traceback" not in result.stderr


def test_without_the_icd_loader(monkeypatch):
    monkeypatch.setattr(opencl, "LOADERS", ("libno-such-opencl.so.1",))
    with pytest.raises(OpenclError, match="apt-get install ocl-icd-libopencl1"):
        choose(("opencl_1.2",))


GPU = OpenclDevice(
    0, "Quick 9000", "gpu", "Maker Corp", "Maker CL", "OpenCL 3.0", "1", frozenset(), 1, 1024, 1
)
CPU = replace(GPU, index=1, name="Slow", kind="cpu", extensions=frozenset({"cl_khr_fp64"}))
SECOND = replace(GPU, index=2, name="Other", vendor="Someone Else", platform="Their CL")


@pytest.fixture
def three(monkeypatch):
    monkeypatch.setattr(opencl, "devices", lambda: [CPU, GPU, SECOND])
    monkeypatch.delenv("HYBRIDC_OPENCL_DEVICE", raising=False)
    return monkeypatch


@pytest.mark.parametrize(
    ("code", "variable", "chosen"),
    [
        ((), "", GPU),
        (("device=cpu",), "", CPU),
        (("cl_khr_fp64",), "", CPU),
        (("device=cpu",), "gpu", GPU),
        (("device=someone",), "", SECOND),
        (("device=their cl",), "", SECOND),
        ((), "2", SECOND),
        ((), "opencl:1=cpu, opencl:0=2", SECOND),
        ((), "opencl:1=cpu", GPU),
    ],
)
def test_which_device_is_taken(three, code, variable, chosen):
    three.setenv("HYBRIDC_OPENCL_DEVICE", variable)
    assert choose(("opencl_1.2", *code), "opencl:0") == chosen


@pytest.mark.parametrize(
    ("code", "variable", "words"),
    [
        ((), "accelerator", "no OpenCL device is called 'accelerator'"),
        ((), "7", "no OpenCL device is called '7'"),
        (("device=gpu", "cl_khr_fp64"), "", "Quick 9000 lacks cl_khr_fp64"),
        (("cl_khr_fp16",), "", "lacks cl_khr_fp16"),
    ],
)
def test_no_device_fits(three, code, variable, words):
    three.setenv("HYBRIDC_OPENCL_DEVICE", variable)
    with pytest.raises(OpenclError, match=words) as caught:
        choose(("opencl_1.2", *code), "opencl:0")
    assert caught.value.exit_code == 7


@needs_device
def test_the_doctor_lists_devices():
    outcome = hybridc("doctor")
    assert outcome.code == 0
    assert f"target opencl: {opencl.devices()[0].name}" in outcome.stdout


def test_a_bundle_brings_the_plug_in(branched):
    bundle = open_bundle(branched)
    (device,) = bundle.manifest.devices
    assert device.device_code == ("opencl_1.2",)
    names = bundle.manifest.runtime[device.architecture]
    assert [name.rpartition("/")[2] for name in names] == [
        "libtvm_runtime.so",
        "libhybridc_opencl.so",
    ]
    assert bundle.read_code(names[1]) == built_path(device.architecture).read_bytes()


def test_without_a_compiler_for_the_host_the_plug_in_is_not_built(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(DeviceError, match="no C\\+\\+ compiler"):
        plugin("aarch64")


USER = """
import numpy as np
import tvm
from hybridc.targets.opencl.backend import register
from tvm import te

register()  # what the entry point does, should the package have been installed without it
device = tvm.device("opencl", 0)
assert device.exist and not tvm.device("opencl", 99).exist
x = te.placeholder((70,), name="x")
schedule = tvm.s_tir.Schedule(
    te.create_prim_func([x, te.compute((70,), lambda i: x[i] * 2 + 1, "y")])
)
(loop,) = schedule.get_loops(schedule.get_sblock("y"))
outer, inner = schedule.split(loop, [None, 64])
schedule.bind(outer, "blockIdx.x")
schedule.bind(inner, "threadIdx.x")
target = tvm.target.Target({"kind": "opencl", "host": {"kind": "llvm"}})
compiled = tvm.compile(schedule.mod, target=target)
compiled.export_library("PATH")
data = np.arange(70, dtype="float32")
for module in (compiled, tvm.runtime.load_module("PATH")):
    source = tvm.runtime.tensor(data, device)
    result = tvm.runtime.tensor(np.zeros(70, "float32"), device)
    module["main"](source, result)
    stream = device.create_raw_stream()
    device.sync(stream)
    device.free_raw_stream(stream)
    np.testing.assert_array_equal(result.numpy(), data * 2 + 1)
    np.testing.assert_array_equal(source.copyto(device).numpy(), data)
print("right")
"""


@needs_device
def test_users_of_tvm_itself(branched, tmp_path):
    script = USER.replace("PATH", str(tmp_path / "kernel.so"))
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert (result.returncode, result.stdout) == (0, "right\n"), result.stderr[-2000:]
