"""Further models are added to a machine's file, and what it says stays."""

import json

import numpy as np
import pytest

from hybridc.bundle.read import open_bundle
from hybridc.calibration.record import CALIBRATION, from_json
from tests.calibration.devices import TARGETS
from tests.models import make_model, node, save
from tests.support import assert_refused, hybridc

RUN = ("calibrate", "run", "more.hyb", "--seconds", "0.01")


@pytest.fixture(scope="module")
def folder(calibration, tmp_path_factory):
    """A folder with a machine's file, and a bundle with a model of which it knows one group."""
    folder = tmp_path_factory.mktemp("known")
    (folder / "machine.json").write_text((calibration / "machine.json").read_text())
    nodes = [node("Softmax", "x", "s", "soft"), node("ReduceSum", "s a", "y", "sum")]
    save(
        make_model(nodes, {"x": (3, 70)}, {"y": (3, 1)}, {"a": np.array([1])}), folder / "more.onnx"
    )
    more = ("--model", folder / "more.onnx", "-o", folder / "more.hyb")
    built = hybridc("calibrate", "build", *TARGETS, *more)
    assert built.code == 0, built
    return folder


def rows_of(data, device="llvm:0"):
    """What was measured on a device, by signature."""
    return {row["work"]["signature"]: row for row in data["devices"][device]["measurements"]}


def test_only_what_is_lacking_is_measured(folder, monkeypatch):
    monkeypatch.chdir(folder)
    before = json.loads((folder / "machine.json").read_text())
    before["devices"]["llvm:1"]["learned"] = None
    before["devices"]["far"] = {**before["devices"]["llvm:0"], "specification": "neoverse-v1"}
    (folder / "own.json").write_text(json.dumps(before))
    outcome = hybridc(*RUN, "--known", "own.json", "-o", "own.json", "--format", "json")
    assert outcome.code == 0, outcome
    after = json.loads((folder / "own.json").read_text())
    record = from_json(open_bundle(folder / "more.hyb").read(CALIBRATION).tobytes(), "more")
    groups = {k.work.signature for k in record.kernels if k.purpose == "group"}
    for name in ("llvm:0", "llvm:1"):
        old, new = rows_of(before, name), rows_of(after, name)
        assert set(new) == set(old) | groups
        assert set(new) - set(old), "the model has groups of its own"
        assert all(new[key] == row for key, row in old.items() if row["spread"] < 1)
        assert after["devices"][name]["profile"] == before["devices"][name]["profile"]
        assert "learned" not in before["devices"][name] or "learned" in after["devices"][name]
    assert after["devices"]["far"] == before["devices"]["far"]
    costs = ("--costs", "own.json", "--format", "json")
    plan = json.loads(hybridc("plan", "more.onnx", *TARGETS, *costs).stdout)
    sources = {cost["source"] for group in plan["groups"] for cost in group["costs"]}
    lost = any(rows_of(after, name)[key]["spread"] >= 1 for name in TARGETS[1::2] for key in groups)
    assert lost or sources == {"measured"}


def test_times_of_other_code_are_replaced(folder, monkeypatch):
    monkeypatch.chdir(folder)
    before = json.loads((folder / "machine.json").read_text())
    record = from_json(open_bundle(folder / "more.hyb").read(CALIBRATION).tobytes(), "more")
    signature = next(k.work.signature for k in record.kernels if k.purpose == "group")
    row = rows_of(before)[signature]
    row["code"]["versions"]["tvm"], row["seconds"] = "0.1", 77.0
    (folder / "old.json").write_text(json.dumps(before))
    assert hybridc(*RUN, "--known", "old.json", "-o", "new.json").code == 0
    new = rows_of(json.loads((folder / "new.json").read_text()))[signature]
    assert new["code"]["versions"]["tvm"] != "0.1"
    assert new["seconds"] < 77
    assert json.loads((folder / "old.json").read_text()) == before


BAD = {
    "machine: llvm:0.cores is missing": ("llvm:0", {"cores": None}),
    "machine: llvm:1.figures[0].name is missing": ("llvm:1", {"figures": [{"value": 1}]}),
    "knows no llvm:1 for llvm": ("llvm:1", None),
    "knows no llvm:0 for llvm": ("llvm:0", {"specification": "znver3"}),
    "knows llvm:0 on cores [77]": ("llvm:0", {"cores": [77]}),
}
"""What a refusal says, by the device that is changed, and how; ``None`` is left out."""


def test_a_machine_that_is_another_is_refused(folder, monkeypatch):
    monkeypatch.chdir(folder)
    machine = json.loads((folder / "machine.json").read_text())
    run = (*RUN, "-o", "out.json", "--known")
    for message, (name, change) in BAD.items():
        entry = {**machine["devices"][name], **(change or {})}
        entry = {field: value for field, value in entry.items() if value is not None}
        others = {other: e for other, e in machine["devices"].items() if other != name}
        devices = {**others, name: entry} if change else others
        (folder / "bad.json").write_text(json.dumps({**machine, "devices": devices}))
        hint = ("without --known",) if message.startswith("knows") else ()
        assert_refused(hybridc(*run, "bad.json"), 2, message, "bad.json", *hint)
    for text in ("{}", "[", '{"schema": "1.0", "devices": {"llvm:0": {"kind": 1}}}'):
        (folder / "bad.json").write_text(text)
        assert_refused(hybridc(*run, "bad.json"), 2, "bad.json")
    assert_refused(hybridc(*run, "none.json"), 2, "none.json")
    assert not (folder / "out.json").exists()
