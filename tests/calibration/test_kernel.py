"""Kernels as they are timed: weights that take turns, changes of layout apart."""

import dataclasses

import numpy as np
import pytest
from hybridc.targets.registry import parse_targets

from hybridc.calibration import kernel as kernels
from hybridc.calibration import run, session
from hybridc.calibration.kernel import Steps, ready
from hybridc.calibration.passing import SIZES, End, Passing, placed
from hybridc.calibration.timing import Timing
from hybridc.compiler import Options, build, describe, part_files
from hybridc.frontend.read import read_model
from hybridc.runtime.parts import load_part
from hybridc.runtime.tensors import HOST, to_tensor
from tests.calibration.devices import CPU
from tests.models import make_model, node, save

MEGABYTE = 2**20


def load(model, folder):
    """The only part of a model that was compiled in memory, with all that a kernel needs."""
    save(model, folder / "m.onnx")
    options = Options(devices=parse_targets(["llvm"]), verify=False)
    built, _ = build(read_model(folder / "m.onnx"), options)
    manifest = describe(built)
    weights = {name: to_tensor(array) for name, array in built.weights.items()}
    (spec,) = manifest.parts
    return manifest, spec, load_part(manifest, spec, part_files(built).__getitem__, weights)


@pytest.fixture(scope="module")
def convolution(tmp_path_factory):
    """A convolution that is computed in blocks of channels."""
    filters = np.random.RandomState(0).standard_normal((128, 64, 3, 3)).astype(np.float32)
    nodes = [node("Conv", "x w", "c", "conv", pads=[1] * 4), node("Relu", "c", "y", "relu")]
    model = make_model(nodes, {"x": (1, 64, 14, 14)}, {"y": (1, 128, 14, 14)}, {"w": filters})
    return load(model, tmp_path_factory.mktemp("convolution"))


@pytest.fixture(scope="module")
def halves(tmp_path_factory):
    """A manifest with two CPU devices that share out the cores, and these with their kernels."""
    parts = {}
    for count in SIZES[:2]:
        model = make_model(
            [node("Relu", "x", "y", "n")], {"x": (count // 4,)}, {"y": (count // 4,)}
        )
        manifest, _, parts[count] = load(model, tmp_path_factory.mktemp("relu"))
    names = ("llvm:0", "llvm:1")
    specs = [dataclasses.replace(manifest.devices[0], name=name) for name in names]
    ends = [
        End(name, CPU, {n: placed(p, name) for n, p in parts.items()}, dict.fromkeys(parts, 0.0))
        for name in names
    ]
    return dataclasses.replace(manifest, devices=tuple(specs)), ends


def test_layouts_at_borders_are_noted_apart(convolution, tmp_path):
    steps = ready(*convolution, 0).step_times()
    assert steps.layout > 0
    assert steps.own.seconds > 0
    plain = make_model([node("Sigmoid", "x", "y", "n")], {"x": (8, 8)}, {"y": (8, 8)})
    assert ready(*load(plain, tmp_path), 0).step_times() is None


def test_each_kernel_counts_where_it_belongs():
    """Of a clock that goes on by one at each look; builtins of the machine are not looked at."""
    watch = kernels._Watch(iter(range(100)).__next__)
    for name in ("vm.builtin.alloc_storage", "block", "conv_relu", "unblock_add"):
        for is_before in (True, False):
            assert watch.step(None, name, is_before) == 0
    assert (watch.layout, watch.own) == (2, 1)


@pytest.mark.parametrize(
    ("layout", "expected"), [(None, 8e-4), (3e-4, 5e-4), (6e-4, 1e-4), (2e-3, 1e-4)]
)
def test_a_small_group_with_large_borders_is_timed_by_its_own_kernels(layout, expected):
    steps = None if layout is None else Steps(layout, Timing(1e-4, 0.1, 9))
    timed = run._Timed(None, HOST, Timing(1e-3, 0.1, 9), steps)
    assert timed.alone(2e-4, 1e-6).seconds == pytest.approx(expected)


def test_weights_take_turns(convolution):
    """With as many copies as a footprint takes, and the same results by each."""
    size = sum(np.from_dlpack(weight).nbytes for weight in convolution[2].weights)
    assert len(ready(*convolution, 0).trailing) == 1
    assert len(ready(*convolution, size).trailing) == 1
    found = ready(*convolution, 3 * size)
    assert len(found.trailing) == 3
    pointers = {np.from_dlpack(weights[0]).ctypes.data for (weights,) in found.trailing}
    assert len(pointers) == 3
    machine = found.part.machine()["main"]
    results = [np.from_dlpack(machine(*found.inputs, *turn)[0]) for turn in found.trailing]
    assert all(np.array_equal(results[0], other) for other in results[1:])
    seen = []
    found._function = lambda *arguments: seen.append(arguments[-1])
    found.run(6)
    assert all(seen[i].same_as(seen[i + 3]) and not seen[i].same_as(seen[i + 1]) for i in range(3))


def test_copies_of_weights_are_limited(convolution, monkeypatch):
    monkeypatch.setattr(kernels, "MOST_COPIES", 5)
    assert len(ready(*convolution, 2**40).trailing) == 6
    monkeypatch.setattr(kernels, "MOST_BYTES", 0)
    assert len(ready(*convolution, 2**40).trailing) == 1


def test_passing_is_measured_between_two_devices(halves):
    """Each way, with tensors of each size that both have a kernel for."""
    manifest, ends = halves
    found = Passing(manifest, 0.02)
    found.time_run()
    found.time_run()
    assert found.run.seconds > 0
    assert found.run.runs == sum(time.runs for time in found.runs)
    first, second = ends
    for source, destination in ((first, second), (second, first)):
        times = found.handoffs(source, destination)
        assert list(times) == sorted(first.parts)
        assert all(time.seconds > 0 and time.runs >= 5 for time in times.values())


def test_libraries_of_devices_that_are_missing_are_not_loaded(convolution, monkeypatch):
    """A machine without a GPU lacks what the CUDA runtime links to."""
    (cpu,) = convolution[0].devices
    gpu = dataclasses.replace(cpu, name="cuda:0", kind="cuda")
    runtime = {cpu.architecture: ("lib/libtvm_runtime.so", "lib/libtvm_runtime_cuda.so")}
    manifest = dataclasses.replace(convolution[0], devices=(cpu, gpu), runtime=runtime)
    for reason, count in (("no GPU", 1), (None, 2)):
        monkeypatch.setattr(session, "why_not", lambda spec, r=reason: r if spec is gpu else None)
        assert len(session.loadable(manifest, cpu.architecture)) == count
