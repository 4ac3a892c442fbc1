"""The timeline: every part and kernel once in a run, inside each other, and as a Chrome trace."""

import json

import numpy as np
import pytest

import hybridc as package
from hybridc.errors import UsageError
from hybridc.runtime.timeline import COPY, KERNEL, PART, Event, Timeline, trace
from tests.models import branched_model, random, run_reference
from tests.support import assert_close, hybridc

COSTS = ("--profile", "llvm:0=zen3", "--profile", "llvm:1=zen3")


@pytest.fixture(scope="module")
def halves(model_file, tmp_path_factory):
    output = tmp_path_factory.mktemp("timeline") / "halves.hyb"
    options = ("--target", "llvm:0", "--target", "llvm:1", "--pin", "right*=llvm:1", *COSTS)
    outcome = hybridc("compile", model_file, "-o", output, *options, "--no-verify")
    assert outcome.code == 0, outcome
    return output


@pytest.mark.parametrize("kernels", [False, True])
def test_events_of_a_run(halves, kernels):
    timeline = Timeline()
    arrays = {"x": random(1, 3, 8, 8)}
    with package.load(halves) as model, model.observed(timeline, kernels) as observed:
        assert_close(observed.run(arrays), run_reference(branched_model(), arrays))
        specs = {spec.name: spec for spec in model.manifest.parts}
    parts = {event.name: event for event in timeline.events if event.kind == PART}
    assert parts.keys() == specs.keys()
    assert all(event.track == specs[name].device for name, event in parts.items())
    inner = [event for event in timeline.events if event.kind == KERNEL]
    assert bool(inner) == kernels
    for event in inner:
        outer = parts[event.part]
        assert outer.begin <= event.begin <= event.end <= outer.end
        assert event.track == outer.track
    if kernels:
        assert {event.part for event in inner} == set(specs), "each part has a kernel"


def test_profile_from_the_command_line(halves, tmp_path):
    outcome = hybridc("profile", halves, "--repeat", "2", "-o", tmp_path / "t.json")
    assert outcome.code == 0, outcome
    assert "predicted / measured" in outcome.stdout
    rows = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    spans = [row for row in rows if row["ph"] == "X"]
    assert all(row["ts"] >= 0 and row["dur"] >= 0 for row in spans)
    measured = {row["name"] for row in spans if row["cat"] == PART and row["pid"] == 1}
    predicted = {row["name"]: row["dur"] for row in spans if row["pid"] == 2}
    assert measured == predicted.keys()
    as_json = hybridc("profile", halves, "--repeat", "2", "--no-kernels", "--format", "json")
    data = json.loads(as_json.stdout)
    assert data["kernels"] == []
    assert data["predicted"] * 1e6 == pytest.approx(sum(predicted.values()), rel=0.01)
    assert {row["name"] for row in data["parts"] if row["kind"] == PART} == measured


def test_profile_of_a_bundle_without_costs(bundle, tmp_path):
    np.save(tmp_path / "x.npy", random(1, 3, 8, 8))
    outcome = hybridc("profile", bundle, "-i", tmp_path / "x.npy", "--format", "json")
    assert outcome.code == 0, outcome
    data = json.loads(outcome.stdout)
    assert data["predicted"] is None
    assert data["kernels"]
    assert data["runs"] == 10


def test_a_trace_shows_copies_last():
    events = [
        Event("x to host", COPY, "copies", "", 1.0, 1.5),
        Event("a", PART, "llvm:0", "a", 1.25, 2.0),
        Event("k", KERNEL, "llvm:0", "a", 1.25, 1.75),
    ]
    rows = trace(events, {"a": 0.5})["traceEvents"]
    names = [row["args"]["name"] for row in rows if row["name"] == "thread_name"]
    assert names == ["llvm:0", "copies"] * 2
    spans = [(r["name"], r["pid"], r["tid"], r["ts"], r["dur"]) for r in rows if r["ph"] == "X"]
    assert spans == [
        ("x to host", 1, 1, 0, 0.5e6),
        ("a", 1, 0, 0.25e6, 0.75e6),
        ("a", 2, 0, 0.25e6, 0.5e6),
        ("k", 1, 0, 0.25e6, 0.5e6),
    ]


def test_a_closed_model_has_no_timeline(bundle):
    model = package.load(bundle)
    model.close()
    with pytest.raises(UsageError, match="closed"):
        model.observed(Timeline())
