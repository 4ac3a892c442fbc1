"""Calibration from the command line: build, run with the loader alone, and plans by the figures."""

import json
import os

import onnx_ir as ir
import pytest
from hybridc.cost_models.cost import CALIBRATED, LEARNED, MEASURED
from hybridc.cost_models.group_work import describe_group
from hybridc.cost_models.learned import shipped_learned
from hybridc.cost_models.link import Route
from hybridc.cost_models.load import load_device
from hybridc.cost_models.measured import Code
from hybridc.cost_models.operators import (
    CONVOLUTION,
    DEPTHWISE,
    ELEMENTWISE,
    MOVEMENT,
    PRODUCT,
    VIEW,
)

from hybridc.bundle.manifest import DeviceSpec
from hybridc.bundle.read import open_bundle
from hybridc.calibration.micro import micro_model
from hybridc.calibration.record import CALIBRATION, from_json
from hybridc.calibration.timing import FEWEST, Timing
from hybridc.errors import BundleError, UsageError
from hybridc.runtime import opencl
from tests.calibration.devices import TARGETS
from tests.models import make_model, node, save
from tests.support import assert_refused, hybridc


def nodes_of(record, signatures):
    """The nodes of groups, by their signatures."""
    works = {kernel.work.signature: kernel.work for kernel in record.kernels}
    return [works[signature].nodes for signature in signatures]


def test_every_group_is_measured_on_every_device(calibration):
    machine = json.loads((calibration / "machine.json").read_text())
    record = from_json(open_bundle(calibration / "cal.hyb").read(CALIBRATION).tobytes(), "cal")
    assert set(machine["devices"]) == {"llvm:0", "llvm:1"}
    assert machine["notes"] == []
    (whole,) = (k for k in record.kernels if k.purpose == "whole")
    computing = [one for one in whole.work.nodes if one.kind != VIEW]
    assert len(computing) == sum(map(len, nodes_of(record, whole.groups)))
    wanted = {
        k.work.signature for k in record.kernels if k.purpose not in ("call", "launch", "whole")
    }
    for device in machine["devices"].values():
        assert {row["work"]["signature"] for row in device["measurements"]} == wanted
        assert all(row["seconds"] > 0 and row["runs"] >= 5 for row in device["measurements"])
        names = {figure["name"] for figure in device["figures"]}
        assert names >= {"launch_seconds", "peaks.float32", "memory.memory", "handoff_seconds"}
        assert names >= {"run_seconds", "split_seconds"}
        assert all(figure["source"] == MEASURED for figure in device["figures"])
        assert all(0 <= figure["confidence"] <= 1 for figure in device["figures"])
        assert device["profile"]["source"] == CALIBRATED
        assert device["cores"]
        (run,) = (f for f in device["figures"] if f["name"] == "run_seconds")
        assert run["value"] == device["profile"]["run_seconds"]
        assert run["runs"] >= 4 * FEWEST, "before, between and after both devices, and at the end"
        for ratio in (f for f in device["figures"] if f["name"].startswith("in_place.")):
            assert ratio["value"] > 0, "none, if so small a model is lost in a run's time"
    if len(os.sched_getaffinity(0)) > 1:
        first, second = (set(device["cores"]) for device in machine["devices"].values())
        assert not first & second, "each half has cores of its own"


@pytest.mark.parametrize("how", ["costs", "profile"])
def test_a_plan_by_measured_costs(calibration, monkeypatch, how):
    monkeypatch.chdir(calibration)
    options = ("--costs", "machine.json")
    if how == "profile":
        pairs = (f"{name}=machine.json" for name in ("llvm:0", "llvm:1"))
        options = tuple(word for pair in pairs for word in ("--profile", pair))
    outcome = hybridc("plan", "m.onnx", *TARGETS, *options, "--format", "json")
    assert outcome.code == 0, outcome
    plan = json.loads(outcome.stdout)
    machine = json.loads((calibration / "machine.json").read_text())
    for group in plan["groups"]:
        if all(one["kind"] == VIEW for one in group["work"]["nodes"]):
            continue
        costs = {cost["device"]: cost for cost in group["costs"]}
        for name in ("llvm:0", "llvm:1"):
            rows = machine["devices"][name]["measurements"]
            by_signature = {row["work"]["signature"]: row for row in rows}
            row = by_signature[group["work"]["signature"]]
            if row["spread"] >= 1:  # lost, on a machine that has much else to do
                assert costs[name]["source"] != MEASURED
                continue
            assert costs[name]["seconds"] == row["seconds"]
            assert costs[name]["source"] == MEASURED


def test_a_group_that_was_not_measured_is_learned(calibration):
    """By the trees that come with hybridc: their anchors are the micro-kernels of this version."""
    machine = json.loads((calibration / "machine.json").read_text())
    entry = machine["devices"]["llvm:0"]
    code = Code("llvm", "", entry["measurements"][0]["code"]["versions"])
    model = load_device(str(calibration / "machine.json"), code, "llvm:0")
    other = make_model([node("MatMul", "x w", "y", "n")], {"x": (9, 77)}, {"y": (9, 55)}, {})
    other.graph.input.append(make_model([], {"w": (77, 55)}, {}).graph.input[0])
    cost = model.estimate(describe_group(list(ir.from_proto(other).graph)))
    assert (cost.source, cost.confidence) == (LEARNED, 1 - shipped_learned("llvm").held_out.error)
    assert cost.seconds > 0
    measured = {row["work"]["signature"] for row in entry["measurements"]}
    assert set(shipped_learned("llvm").anchors) <= measured


def test_compile_takes_the_costs(calibration, monkeypatch):
    monkeypatch.chdir(calibration)
    outcome = hybridc(
        *("compile", "m.onnx", "-o", "m.hyb", *TARGETS, "--costs", "machine.json", "--no-verify")
    )
    assert outcome.code == 0, outcome
    assert MEASURED in hybridc("explain", "m.hyb", "stem").stdout


def test_refusals(calibration, monkeypatch, tmp_path):
    monkeypatch.chdir(calibration)
    run = ("calibrate", "run")
    assert_refused(hybridc(*run, "none", "-o", "x.json"), 2, "none")
    compiled = hybridc("compile", "m.onnx", "-o", tmp_path / "m.hyb", "--no-verify")
    assert compiled.code == 0
    assert_refused(hybridc(*run, tmp_path / "m.hyb", "-o", "x"), 2, "is no calibration bundle")
    build = ("calibrate", "build", "-o", tmp_path / "cal")
    assert_refused(hybridc(*build, "--shape", "n=1"), 2, "--model")
    dynamic = make_model([node("Relu", "x", "y", "r")], {"x": ("n", 4)}, {"y": ("n", 4)})
    save(dynamic, tmp_path / "d.onnx")
    options = ("--model", tmp_path / "d.onnx", "--shape", "n=1..4")
    outcome = hybridc(*build, *options)
    assert outcome.code == 2
    assert "n is 1..4" in outcome.stderr
    for text in ("{}", '{"devices": {}}', '{"schema": "1.0", "devices": {"llvm:0": {"kind": 1}}}'):
        (tmp_path / "machine.json").write_text(text)
        outcome = hybridc("plan", "m.onnx", "--costs", tmp_path / "machine.json")
        assert_refused(outcome, 2, "machine.json")
    with pytest.raises(UsageError, match="has no device for cuda:sm_90; it has llvm:"):
        load_device(str(calibration / "machine.json"), Code("cuda", "sm_90", {}))
    with pytest.raises(BundleError, match="describes no calibration"):
        from_json(b'{"schema": "2.0"}', "cal")


def test_micro_kernels_are_of_all_common_classes():
    works = [describe_group([one]) for one in ir.from_proto(micro_model()).graph]
    assert all(work.is_known for work in works)
    kinds = {work.nodes[0].kind for work in works}
    assert kinds >= {CONVOLUTION, DEPTHWISE, ELEMENTWISE, MOVEMENT, PRODUCT}


@pytest.mark.parametrize(
    ("code", "name"), [(("opencl_1.2",), "Adreno, by OpenCL"), (("device=cpu",), ", 2 cores")]
)
def test_opencl_devices_are_described_as_their_driver_does(monkeypatch, code, name):
    from hybridc.calibration.profile import device_name, memory_bytes

    kinds = {"Adreno": ("gpu", 4 << 30), "PoCL": ("cpu", 1 << 30)}
    devices = [
        opencl.OpenclDevice(i, n, kind, "", "", "", "", frozenset(), memory, 256, 32768)
        for i, (n, (kind, memory)) in enumerate(kinds.items())
    ]
    monkeypatch.setattr(opencl, "devices", lambda: devices)
    spec = DeviceSpec("opencl:0", "opencl", "", "x86_64", device_code=code)
    assert device_name(spec, (0, 1)).endswith(name)
    assert memory_bytes(spec) == (1 << 30 if "cpu" in code[0] else 4 << 30)


def test_routes_are_found_from_copies():
    from hybridc.calibration.profile import _route

    exact = Route(1e-5, 2e9)
    times = {n: Timing(exact.seconds(n), 0.02, 9) for n in (2**12, 2**20, 2**26)}
    route, figures = _route("to_host", times)
    assert route.bytes_per_second == pytest.approx(exact.bytes_per_second)
    assert route.latency_seconds == pytest.approx(exact.latency_seconds, rel=0.3)
    assert {figure.name for figure in figures} == {
        "to_host.latency_seconds",
        "to_host.bytes_per_second",
    }
