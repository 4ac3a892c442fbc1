"""Bundles with several ways to run their model: the first that the machine can run is taken."""

from __future__ import annotations

import json
import logging

import numpy as np
import pytest
from hybridc.targets.registry import parse_targets

import hybridc
from hybridc.bundle.read import open_bundle
from hybridc.errors import DeviceError
from hybridc.runtime import machine
from tests.models import branched_model, save
from tests.support import assert_refused, compile_to
from tests.support import hybridc as command
from tests.targets.test_cuda import needs_nvcc, without_gpu

FIRST, SECOND, THIRD = "llvm:x86-64-v3", "llvm:x86-64-v2", "llvm:x86-64"
ALTERNATIVES = parse_targets([SECOND, THIRD])


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    path = tmp_path_factory.mktemp("alternatives") / "b.hyb"
    model = branched_model()
    report = compile_to(path, model, targets=(FIRST,), alternatives=ALTERNATIVES, verify=True)
    return path, report


def lacking(monkeypatch, *flags: str) -> None:
    """Let this machine be one whose CPU lacks some instructions."""
    have = machine.cpu_flags() - set(flags)
    monkeypatch.setattr(machine, "cpu_flags", lambda: have)


def results(path) -> tuple[dict, hybridc.runtime.loader.Model]:
    with hybridc.load(path) as model:
        arrays = {spec.name: np.full(spec.shape, 0.5, np.float32) for spec in model.inputs}
        return model.run(arrays), model


def test_each_way_is_checked_when_it_is_built(bundle):
    _, report = bundle
    assert {error["plan"] for error in report.errors} == {"llvm:0", "llvm:1"}
    assert len(report.errors) == 3 * len(report.manifest.outputs)
    assert all(error["within"] for error in report.errors)


def test_the_first_is_taken_where_it_runs(bundle, caplog):
    path, _ = bundle
    _, model = results(path)
    assert model.missed == ()
    assert model.manifest.devices[0].built_for == "x86-64-v3"
    assert not caplog.records


def test_the_next_is_taken_where_the_first_cannot_run(bundle, monkeypatch, caplog):
    path, _ = bundle
    expected, _ = results(path)
    lacking(monkeypatch, "avx2")
    with caplog.at_level(logging.WARNING, "hybridc.loader"):
        found, model = results(path)
    assert model.manifest.devices[0].built_for == "x86-64-v2"
    (reason,) = model.missed
    assert "this CPU lacks avx2" in reason
    assert [reason in record.getMessage() for record in caplog.records] == [True]
    for name, array in expected.items():
        np.testing.assert_allclose(found[name], array, rtol=1e-5)


def test_all_that_were_missed_are_named(bundle, monkeypatch):
    path, _ = bundle
    lacking(monkeypatch, "avx2", "sse4_2")
    _, model = results(path)
    assert model.manifest.devices[0].built_for == "x86-64"
    assert len(model.missed) == 2


def test_no_way_runs(bundle, monkeypatch):
    path, _ = bundle
    monkeypatch.setattr(machine.platform, "machine", lambda: "riscv64")
    with pytest.raises(DeviceError, match=r"(riscv64.*){3}") as caught:
        hybridc.load(path)
    assert caught.value.exit_code == 7


def test_the_command_line_says_what_ran(bundle, monkeypatch):
    path, _ = bundle
    lacking(monkeypatch, "avx2")
    outcome = command("run", path, "--format", "json")
    data = json.loads(outcome.stdout)
    assert len(data["missed"]) == 1
    assert "this CPU lacks avx2" in command("run", path).stdout
    assert command("inspect", path).stdout.count("or else: ") == 2
    assert command("verify", path).code == 0


def test_a_file_of_another_way_that_is_missing_is_found(bundle, tmp_path):
    path = tmp_path / "folder"
    compile_to(path, branched_model(), targets=(FIRST,), alternatives=ALTERNATIVES[:1])
    assert len(open_bundle(path).manifest.ways()) == 2
    (path / "parts" / "alternative1-part0.so").unlink()
    outcome = command("verify", path, "--no-run")
    assert outcome.code == 6
    assert "alternative1-part0.so" in outcome.stderr


def test_the_same_model_gives_the_same_bytes(bundle, tmp_path):
    path, _ = bundle
    again = tmp_path / "b.hyb"
    compile_to(again, branched_model(), targets=(FIRST,), alternatives=ALTERNATIVES, verify=True)
    assert again.read_bytes() == path.read_bytes()


def test_a_server_makes_its_own_plans(tmp_path):
    model = save(branched_model(), tmp_path / "m.onnx")
    options = ("--remote", "server=llvm", "--link", "server=20mbit,15ms", "--alternative", "llvm")
    outcome = command("compile", model, "-o", tmp_path / "b", *options)
    assert_refused(outcome, 2, "--alternative", "--remote")


@needs_nvcc
@without_gpu
def test_a_cpu_stands_in_for_a_gpu(tmp_path):
    path = tmp_path / "b"
    options = {"targets": ("cuda:sm_90",), "alternatives": parse_targets(["llvm"]), "verify": True}
    report = compile_to(path, branched_model(), **options)
    assert any("the bundle was not run: cuda:0" in note for note in report.notes)
    assert {error["plan"] for error in report.errors} == {"llvm:0"}
    _, model = results(path)
    assert list(model.plan) == ["llvm:0"]
    assert "device cuda:0 cannot run here" in model.missed[0]
