"""Learned costs: trees evaluated by hand, held-out errors on what was not seen, and bad files."""

import copy
import dataclasses
import json
import math
import random as randomness
from pathlib import Path

import numpy as np
import pytest
from hybridc.cost_models import train as training
from hybridc.cost_models.calibrate import calibrate
from hybridc.cost_models.cost import CALIBRATED, LEARNED, MEASURED
from hybridc.cost_models.device import DeviceProfile, MemoryLevel
from hybridc.cost_models.group_work import GroupWork, NodeWork
from hybridc.cost_models.learned import (
    learned_for,
    parse_learned,
    shipped_learned,
    to_json,
)
from hybridc.cost_models.load import load_device
from hybridc.cost_models.measured import Code, Measured, Measurement
from hybridc.cost_models.operators import CONVOLUTION, PRODUCT, RECURRENT
from hybridc.cost_models.trees import NEVER, RATE, Trees, fit_trees

from hybridc.errors import UsageError
from tests.support import hybridc

DATA = Path(__file__).resolve().parents[2] / "cost_models" / "measurements"
CODE = Code("llvm", "", {"hybridc": "1"})


def device(scale=1.0):
    """A machine that is so many times as fast as another of its kind."""
    levels = (MemoryLevel("cache", 10**6, 1e10 * scale), MemoryLevel("memory", 10**9, 1e9 * scale))
    peaks = {"float32": 1e10 * scale}
    return DeviceProfile("a machine", "calibrated", "made up", peaks, levels, 1e-6 / scale)


def row(signature, operations, count, scale, kind=PRODUCT, dtype="float32"):
    """A measurement; small products take six times as long as the roofline thinks they do."""
    work = GroupWork((NodeWork("N", kind, dtype, operations),), count, count, 0, signature)
    seconds = 1e-6 + 2 * operations / 1e10 + 2 * count / (1e10 if 2 * count <= 10**6 else 1e9)
    odd = 6.0 if kind == PRODUCT and not signature.startswith("micro") and operations < 1e6 else 1.0
    return Measurement(work, CODE, odd * seconds / scale, 0.01, 30)


def machine_rows(name, scale, seed, count=40):
    """A file's measurements: the micro-kernels that all files have, and groups of its own."""
    source, rows = randomness.Random(0), []
    for number in range(20):
        size = int(10 ** source.uniform(3, 8)), int(10 ** source.uniform(2, 6))
        rows.append(row(f"micro {number}", *size, scale, (PRODUCT, CONVOLUTION)[number % 2]))
    source = randomness.Random(seed)
    for number in range(count):
        size = int(10 ** source.uniform(3, 8)), int(10 ** source.uniform(2, 6))
        rows.append(row(f"{name} {number}", *size, scale, (PRODUCT, CONVOLUTION)[number % 2]))
    return tuple(rows)


def sources(scales=(1.0, 2.0, 4.0, 8.0)):
    found = enumerate(scales)
    return [training.Source(str(n), device(s), machine_rows(str(n), s, n)) for n, s in found]


@pytest.fixture(scope="module")
def trained():
    return training.train(sources(), "llvm", "made up")


def walk(tree, inputs, node=0):
    """A tree's value, one node after the other."""
    inner = len(tree.features)
    if node >= inner:
        return tree.leaves[node - inner]
    above = inputs[tree.features[node]] > tree.thresholds[node]
    return walk(tree, inputs, 2 * node + 1 + above)


def test_trees_are_evaluated_as_they_are_written():
    """A hand-made tree of depth 2: every leaf is reached where it should be, borders included."""
    trees = Trees(
        10.0, np.array([[0, 1, 1]]), np.array([[1.0, 2.0, 3.0]]), np.array([[1.0, 2.0, 4.0, 8.0]])
    )
    for inputs, value in (
        ((1.0, 2.0), 11.0),
        ((1.0, 2.1), 12.0),
        ((1.1, 3.0), 14.0),
        ((1.1, 3.1), 18.0),
    ):
        assert trees.value(np.array(inputs)) == value


def test_stored_trees_give_the_same_numbers(trained):
    """After a round through JSON, against a walk node by node."""
    again = parse_learned(json.loads(to_json(trained)), "it")
    assert again == trained
    source = np.random.default_rng(0)
    trees = again.to_trees()
    for inputs in source.uniform(-20, 20, (50, len(again.features))):
        expected = again.start + math.fsum(walk(tree, inputs) for tree in again.trees)
        assert trees.value(inputs) == pytest.approx(expected, rel=1e-12, abs=1e-12)


def test_a_fit_finds_steps_and_ignores_what_is_wild():
    source = np.random.default_rng(1)
    rows = source.uniform(0, 1, (400, 5))
    wanted = np.where(rows[:, 3] > 0.4, 1.0, -1.0) + np.where(rows[:, 1] > 0.7, 0.5, 0.0)
    wanted[7] = 1e6
    trees = fit_trees(rows, wanted)
    left = np.array([trees.value(one) for one in rows]) - wanted
    assert np.median(np.abs(left)) < 0.02
    assert np.sort(np.abs(left))[-2] < 0.5, "the wild one bends nothing but its own leaf"
    used = set(trees.features[trees.thresholds < NEVER].tolist())
    assert {1, 3} <= used


def test_a_fit_of_few_rows_is_their_median():
    trees = fit_trees(np.zeros((3, 2)), np.array([1.0, 2.0, 6.0]), count=1)
    assert (trees.thresholds == NEVER).all()
    assert trees.value(np.array([5.0, 5.0])) == pytest.approx(2.0 + RATE * (-1 + 0 + 1) / 3)


def test_what_was_learned_holds_on_another_machine(trained):
    """Twenty times as fast as the slowest; nothing but the micro-kernels was measured there."""
    there, rows = device(20.0), machine_rows("new", 20.0, 77)
    micro = [one for one in rows if one.work.signature.startswith("micro")]
    model, roofline = learned_for(trained, micro, there), calibrate(micro, there)
    errors = {LEARNED: [], CALIBRATED: []}
    for one in rows[len(micro) :]:
        for found in (model.estimate(one.work, there), roofline.estimate(one.work, there)):
            errors[found.source].append(abs(found.seconds / one.seconds - 1))
    assert np.mean(errors[LEARNED]) < 0.15 < 0.3 < np.mean(errors[CALIBRATED])
    cost = model.estimate(rows[-1].work, there)
    assert cost.confidence == pytest.approx(1 - trained.held_out.error)


def test_trees_say_nothing_about_what_they_have_not_seen(trained):
    rows, here = machine_rows("0", 1.0, 0), device()
    model = learned_for(trained, rows, here)
    assert model.estimate(row("s", 100, 100, 1.0).work, here).source == LEARNED
    assert model.estimate(row("s", 100, 100, 1.0, RECURRENT).work, here) is None
    assert model.estimate(row("s", 100, 100, 1.0, dtype="int8").work, here) is None
    assert model.estimate(row("s", -1, 100, 1.0).work, here) is None
    others = [one for one in rows if not one.work.signature.startswith("micro")]
    assert learned_for(trained, others, here) is None, "without micro-kernels there is no roofline"


def test_the_error_is_that_on_groups_left_out(monkeypatch):
    """No tree judges a group that it was fitted to, also where two files share one."""
    shared = row("shared", 10_000, 1000, 1.0)
    rows = [(*machine_rows(str(n), 1.0, n), shared) for n in range(2)]
    rows.append(machine_rows("2", 1.0, 2))
    found = [training.Source(str(n), device(), own) for n, own in enumerate(rows)]
    seen, judged = [], []
    fit = training._fit
    monkeypatch.setattr(training, "_fit", lambda own: seen.append(own) or fit(own))
    value = Trees.value

    def judge(self, one):
        judged.append((len(seen), one.tobytes()))
        return value(self, one)

    monkeypatch.setattr(Trees, "value", judge)
    held_out = training.train(found, "llvm", "").held_out
    assert held_out.sources == 3
    assert held_out.groups == len(judged) == 40 * 3 + 2
    for fold, one in judged:
        assert one not in {known.features.tobytes() for known in seen[fold - 1]}


def test_the_held_out_error_grows_with_what_cannot_be_learned():
    """Times that are random by a factor of three show in the figure, which training hides."""
    source = randomness.Random(5)
    noisy = []
    for one in sources():
        rows = (
            dataclasses.replace(m, seconds=m.seconds * 3 ** source.uniform(-1, 1))
            for m in one.measurements
        )
        noisy.append(dataclasses.replace(one, measurements=tuple(rows)))
    clean, wild = (training.train(s, "llvm", "").held_out for s in (sources(), noisy))
    assert clean.error < 0.1 < 0.3 < wild.error
    assert clean.sum_error < clean.roofline_sum_error


def test_too_little_to_learn_from_is_refused():
    with pytest.raises(UsageError, match="2 devices of kind llvm are too few"):
        training.train(sources()[:2], "llvm", "")
    alone = [dataclasses.replace(s, measurements=s.measurements[20:]) for s in sources()]
    with pytest.raises(UsageError, match="have 0 groups in common"):
        training.train(alone, "llvm", "")
    micro = [dataclasses.replace(s, measurements=s.measurements[:20]) for s in sources()]
    with pytest.raises(UsageError, match="nothing but micro-kernels"):
        training.train(micro, "llvm", "")


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda d: d.update(schema="1.0"), "its schema is '1.0'"),
        (lambda d: d.pop("trees"), "trees"),
        (lambda d: d.update(trees=[]), "it has no trees"),
        (lambda d: d.update(features=["bytes"]), "train them anew"),
        (lambda d: d["trees"][3]["leaves"].pop(), "tree 3 is not as large"),
        (lambda d: d["trees"][0]["features"].pop(), "no 14 inner nodes"),
        (lambda d: d["trees"][1]["features"].__setitem__(0, 99), "tree 1 names a feature"),
        (lambda d: d["trees"][2]["leaves"].__setitem__(0, math.inf), "tree 2 has a number"),
        (lambda d: d["trees"][2]["leaves"].__setitem__(0, "1"), r"leaves\[0\] is not float"),
        (lambda d: d["held_out"].update(error=-1.0), "an error"),
        (lambda d: d.update(start=math.nan), "an error or its start"),
    ],
)
def test_bad_files_are_refused_with_a_sentence(trained, change, text):
    data = copy.deepcopy(json.loads(to_json(trained)))
    change(data)
    with pytest.raises(UsageError, match=f"x.json holds no learned costs: .*{text}"):
        parse_learned(data, "x.json")


def test_what_is_shipped_comes_of_the_measurements_that_are_shipped():
    """Trained anew it predicts the same, and its error is as the file says on each group."""
    shipped = shipped_learned("llvm")
    found = training.read_sources(sorted(DATA.glob("llvm-*.json")), "llvm")
    assert shipped.held_out.sources == len(found) == 15
    assert shipped.held_out.error < 0.25 < shipped.held_out.roofline_error
    anchors = set(shipped.anchors)
    assert anchors == set.intersection(*({m.work.signature for m in s.measurements} for s in found))
    rows = [r for source in found for r in training._rows(source, anchors)]
    rows = [r for r in rows if training._is_within(r, set(shipped.kinds), set(shipped.dtypes))]
    again, trees = training._fit(rows), shipped.to_trees()
    changes = [abs(again.value(r.features) - trees.value(r.features)) for r in rows]
    assert np.median(changes) < 1e-3, "hybridc calibrate train makes the file anew"


def test_a_drowned_time_counts_as_not_measured():
    lost = dataclasses.replace(row("s", 10**6, 10, 1.0), spread=1.5)
    assert Measured([lost], CODE).estimate(lost.work, device()) is None
    rows = [*machine_rows("0", 1.0, 0)[:20], *(lost for _ in range(200))]
    clean = calibrate(rows[:20], device())
    assert calibrate(rows, device()) == clean


def machine_file(path, source, **more):
    entry = {
        "kind": "llvm",
        "specification": "",
        "profile": dataclasses.asdict(source.profile),
        "measurements": [dataclasses.asdict(one) for one in source.measurements],
        **more,
    }
    path.write_text(json.dumps({"schema": "1.1", "devices": {"llvm:0": entry}}))
    return path


def test_train_from_the_command_line(tmp_path):
    """Trees go into a machine's file, and a device there is estimated by them."""
    paths = [machine_file(tmp_path / f"{s.name}.json", s) for s in sources()]
    new = training.Source("new", device(3.0), machine_rows("new", 3.0, 9)[:30])
    into = machine_file(tmp_path / "new.json", new)
    outcome = hybridc("calibrate", "train", *paths, "-o", tmp_path / "t.json", "--into", into)
    assert outcome.code == 0, outcome
    assert "160 groups of 4 files, each left out once" in outcome.stdout
    trees = parse_learned(json.loads((tmp_path / "t.json").read_text()), "t.json")
    assert parse_learned(json.loads(into.read_text())["devices"]["llvm:0"]["learned"], "") == trees
    model = load_device(str(into), CODE, "llvm:0")
    assert model.estimate(new.measurements[-1].work).source == MEASURED
    cost = model.estimate(row("unseen", 10**5, 100, 3.0).work)
    assert (cost.source, cost.confidence) == (LEARNED, 1 - trees.held_out.error)


def test_files_that_teach_nothing_are_refused(tmp_path):
    path = machine_file(tmp_path / "m.json", sources()[0])
    for options, text in (
        (("-o", tmp_path / "t"), "1 devices of kind llvm are too few"),
        (("-o", tmp_path / "t", "--kind", "cuda"), "no device of kind cuda that was measured"),
        ((), "say where the trees go"),
    ):
        outcome = hybridc("calibrate", "train", path, *options)
        assert (outcome.code, text in outcome.stderr) == (2, True), outcome
    bad = machine_file(tmp_path / "b.json", sources()[0], learned={"schema": "1.0"})
    with pytest.raises(UsageError, match=r"b.json holds no learned costs"):
        load_device(str(bad), CODE, "llvm:0")
