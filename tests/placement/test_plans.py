"""Plans: by cost, as files, edited, explained, asked again, and compiled."""

import dataclasses
import json
import math
from importlib.metadata import version

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hybridc
from hybridc.cli.sweep import parse_sweep
from hybridc.errors import UsageError
from hybridc.placement.plan_file import plan_from_json, plan_to_json
from hybridc.placement.reconsider import Change, as_edited, reconsider
from tests.models import branched_model, make_model, node, random, run_reference, save
from tests.support import assert_close, assert_refused
from tests.support import hybridc as command

TWO = ("--target", "llvm:znver3", "--target", "llvm:znver3")
CPU = {
    "name": "slow start",
    "source": "data sheet",
    "provenance": "made up for a test",
    "peaks": {"float32": 1e9},
    "memory": [{"name": "m", "bytes": 10**10, "bytes_per_second": 1e9}],
    "launch_seconds": 1e-6,
    "watts": 1.0,
}
FAST = {**CPU, "name": "fast", "peaks": {"float32": 1e12}, "watts": 500.0, "dollars_per_hour": 9.0}
SIZE = 64


def wide_and_deep():
    """A large product, then small ones: a fast device far away should take the large one only."""
    nodes = [
        node("MatMul", "x wide", "a", "large"),
        node("ReduceMean", "a", "b", "mean", axes=[1], keepdims=1),
        node("MatMul", "b small", "y", "head"),
    ]
    weights = {"wide": random(SIZE, 4096), "small": random(1, 8)}
    return make_model(nodes, {"x": (SIZE, SIZE)}, {"y": (SIZE, 8)}, weights)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save(wide_and_deep(), tmp_path / "m.onnx")
    (tmp_path / "cpu.json").write_text(json.dumps(CPU))
    (tmp_path / "fast.json").write_text(json.dumps(FAST))
    return tmp_path


TENSOR = {"name": "t", "bytes": 1, "source": -1, "readers": [0, 1], "is_output": False}
LINKED = {"source": "near", "destination": "far", "latency_seconds": 1, "bytes_per_second": 1}
PROFILES = ("--profile", "near=cpu.json", "--profile", "far=fast.json")
LINK = ("--link", "near-far=1GB,10us")
MACHINES = ("--target", "near=llvm", "--target", "far=llvm", *PROFILES, *LINK)


def plan(*options):
    """The plan of m.onnx."""
    outcome = command("plan", "m.onnx", "-o", "plan.json", *options, "--format", "json")
    assert outcome.code == 0, outcome
    with open("plan.json", encoding="utf-8") as file:
        text = file.read()
    assert json.loads(text) == json.loads(outcome.stdout)
    return plan_from_json(text, "plan.json")


def devices(found):
    return {group.name: group.device for group in found.groups}


@pytest.mark.usefixtures("folder")
def test_a_split_by_cost():
    """The product and what shrinks its result go to the fast machine."""
    found = plan(*MACHINES)
    assert devices(found)["large"] == devices(found)["mean"] == "far"
    prediction = found.prediction
    assert prediction.gap == 0
    assert prediction.value == prediction.latency_seconds
    assert prediction.value <= min(prediction.alternatives.values())
    assert math.fsum(prediction.busy_seconds.values()) == pytest.approx(prediction.value)
    assert {t.tensor for t in found.transfers} >= {"x"}
    assert all(group.why == "cost" for group in found.groups)
    assert {cost.source for group in found.groups for cost in group.costs} == {"data sheet"}


@pytest.mark.usefixtures("folder")
def test_a_slow_link_keeps_everything_near():
    assert set(devices(plan(*MACHINES, "--link", "near-far=1kB,1s")).values()) == {"near"}


@pytest.mark.usefixtures("folder")
def test_energy_and_latency_differ():
    assert set(devices(plan(*MACHINES, "--objective", "energy")).values()) == {"near"}
    limited = plan(*MACHINES, "--objective", "energy", "--max-latency", "5ms")
    assert devices(limited)["large"] == "far"
    assert limited.prediction.latency_seconds <= 5e-3
    assert {"limit", "time", "cost"} >= {group.why for group in limited.groups}


@pytest.mark.usefixtures("folder")
def test_memory():
    weights = SIZE * 4096 * 4
    found = plan(*MACHINES, "--memory", f"far={weights // 2}")
    assert devices(found)["large"] == "near"
    assert next(g for g in found.groups if g.name == "large").why == "memory"
    assert found.prediction.memory_bytes.get("far", 0) <= weights // 2


@pytest.mark.parametrize(
    ("options", "words", "not_words"),
    [
        (("--max-latency", "1us"), ["--max-latency 1us cannot be kept", "fastest"], ["memory"]),
        (
            ("--memory", "near=1kB", "--memory", "far=1kB", "--max-latency", "1s"),
            ["--memory near=1kB and --memory far=1kB cannot be kept"],
            ["--max-latency"],
        ),
        (
            ("--memory", "far=1kB", "--pin", "large=far", "--forbid", "head=far"),
            ["--pin large=far and --memory far=1kB cannot be kept"],
            ["--forbid"],
        ),
    ],
)
@pytest.mark.usefixtures("folder")
def test_budgets_that_cannot_be_kept(options, words, not_words):
    outcome = command("plan", "m.onnx", *MACHINES, *options)
    assert_refused(outcome, 5, *words)
    assert not any(word in outcome.stderr for word in not_words)


@pytest.mark.usefixtures("folder")
def test_pins_forbids_and_kept_tensors_hold():
    assert devices(plan(*MACHINES, "--pin", "head=far"))["head"] == "far"
    found = plan(*MACHINES, "--forbid", "large=far")
    assert devices(found)["large"] == "near"
    assert next(g for g in found.groups if g.name == "large").why == "rule"
    kept = plan(*MACHINES, "--keep-on", "near", "x", "--release", "b")
    assert (devices(kept)["large"], devices(kept)["mean"]) == ("near", "near")


@pytest.mark.usefixtures("folder")
def test_rules_out_of_a_file(folder):
    (folder / "rules.toml").write_text('forbid = ["large=far"]\nmemory = ["near=1GiB"]\n')
    assert devices(plan(*MACHINES, "--rules", "rules.toml"))["large"] == "near"
    outcome = command("plan", "m.onnx", *MACHINES, "--rules", "none.toml")
    assert_refused(outcome, 2, "cannot read the rules")


@pytest.mark.usefixtures("folder")
def test_a_plan_needs_profiles():
    outcome = command("plan", "m.onnx", "--target", "llvm")
    assert_refused(outcome, 2, "give a --profile for llvm:0")


@pytest.mark.usefixtures("folder")
def test_files_round_trip():
    found = plan(*MACHINES)
    assert plan_from_json(plan_to_json(found), "p") == found
    assert as_edited(found) is found


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"schema": "2.0"}, "its schema is '2.0'"),
        ({"groups": 3}, "plan.groups is not a list"),
        ({"devices": []}, "is on device 'far'"),
        ({"tensors": [TENSOR]}, None),
        ({"tensors": [{**TENSOR, "source": 9}]}, "tensors.0. does not fit"),
        ({"tensors": [{**TENSOR, "readers": [0, 0]}]}, "tensors.0. does not fit"),
        ({"tensors": [{**TENSOR, "bytes": -1}]}, "tensors.0. does not fit"),
        ({"links": [{**LINKED, "latency_seconds": -1}]}, "below zero"),
        ({"links": [{**LINKED, "bytes_per_second": 0}]}, "not above zero"),
    ],
)
@pytest.mark.usefixtures("folder")
def test_wrong_files(change, words):
    data = json.loads(plan_to_json(plan(*MACHINES)))
    text = json.dumps({**data, **change})
    if words is None:
        assert plan_from_json(text, "p.json")
        return
    with pytest.raises(UsageError, match=words):
        plan_from_json(text, "p.json")
    with pytest.raises(UsageError, match="it has no groups"):
        plan_from_json("{}", "p.json")


@pytest.mark.usefixtures("folder")
def test_an_edited_plan_is_compiled_as_edited(folder):
    found = plan(*MACHINES)
    groups = [
        dataclasses.replace(group, device="near" if group.name == "mean" else group.device)
        for group in found.groups
    ]
    edited = dataclasses.replace(found, groups=tuple(groups))
    (folder / "edited.json").write_text(plan_to_json(edited))
    again = as_edited(edited)
    assert again.prediction.value > found.prediction.value
    assert again.prediction.bound == found.prediction.bound
    assert again.prediction.gap > 0
    mean = next(group for group in again.groups if group.name == "mean")
    assert (mean.why, mean.placed) == ("plan", "far")
    assert mean.reason.startswith("moved by hand from far: ")
    assert all(group.why == "cost" for group in again.groups if group is not mean)
    outcome = command("compile", "m.onnx", "-o", "m.hyb", "--plan", "edited.json")
    assert outcome.code == 0, outcome
    with hybridc.load("m.hyb") as model:
        assert {"mean", "large"} - set(model.plan["far"]) == {"mean"}
        x = {"x": random(SIZE, SIZE) / 99}
        assert_close(model.run(x), run_reference(wide_and_deep(), x))
    kept = command("explain", "m.hyb", "mean").stdout
    assert "mean runs on near: plan" in kept


@pytest.mark.usefixtures("folder")
def test_a_plan_of_another_model(folder):
    plan(*MACHINES)
    save(branched_model(), folder / "other.onnx")
    outcome = command("compile", "other.onnx", "-o", "o.hyb", "--plan", "plan.json")
    assert_refused(outcome, 2, "the plan has no node", "another model")


@pytest.mark.usefixtures("folder")
def test_a_plan_against_its_own_rules(folder):
    found = plan(*MACHINES, "--forbid", "large=far")
    groups = tuple(dataclasses.replace(group, device="far") for group in found.groups)
    (folder / "edited.json").write_text(plan_to_json(dataclasses.replace(found, groups=groups)))
    outcome = command("compile", "m.onnx", "-o", "o.hyb", "--plan", "edited.json")
    assert outcome.code == 3
    assert "the plan and --forbid large=far contradict each other" in outcome.stderr


@pytest.mark.usefixtures("folder")
def test_compile_places_by_cost():
    outcome = command("compile", "m.onnx", "-o", "m.hyb", *MACHINES)
    assert outcome.code == 0, outcome
    with hybridc.load("m.hyb") as model:
        assert {"large", "mean"} <= set(model.plan["far"])
        x = {"x": random(SIZE, SIZE) / 99}
        assert_close(model.run(x), run_reference(wide_and_deep(), x))


@pytest.mark.usefixtures("folder")
def test_memory_is_checked_again_when_code_is_there():
    """Weights are known before; what a part needs inside is not."""
    limit = ("--memory", f"near={SIZE * 8}", "--pin", "head=near")
    outcome = command("compile", "m.onnx", "-o", "m.hyb", *MACHINES, *limit)
    assert outcome.code == 5, outcome
    assert "--memory" in outcome.stderr


@pytest.mark.usefixtures("folder")
def test_unknown_costs_are_said(folder):
    options = ("--target", "llvm", "--target", "llvm", "--no-verify", "--format", "json")
    outcome = command("compile", "m.onnx", "-o", "m.hyb", *options)
    assert any("costs are not known" in note for note in json.loads(outcome.stdout)["notes"])
    assert "llvm:0 is the first device that can run it" in command("explain", "m.hyb").stdout


@pytest.mark.usefixtures("folder")
def test_explain():
    plan(*MACHINES)
    text = command("explain", "plan.json").stdout
    assert "no plan is better; solver: minimum cut" in text
    assert "groups by reason: cost 3" in text
    one = command("explain", "plan.json", "large").stdout
    assert "large runs on far: cost" in one
    assert "data sheet" in one
    data = json.loads(command("explain", "plan.json", "head", "--format", "json").stdout)
    assert data["name"] == "head"
    assert {cost["device"] for cost in data["costs"]} == {"near", "far", "onnxruntime:0"}
    assert_refused(command("explain", "plan.json", "lrage"), 2, "did you mean 'large'")
    assert_refused(command("explain", "nothing.json"), 2, "cannot read the plan")


@pytest.mark.parametrize(("seconds", "places"), [(0.97, {"near"}), (0.5, {"near", "far"})])
def test_a_measured_plan_that_is_asked_again_is_the_same(folder, seconds, places):
    """Also where a split would be a little faster, which is not worth it."""
    versions = {"hybridc": hybridc.__version__, "tvm": version("apache-tvm")}
    code = {"kind": "llvm", "specification": "", "versions": versions}
    works = [dataclasses.asdict(group.work) for group in plan(*MACHINES).groups]
    own = {"near": (1.0, 1.0, 1.0), "far": (seconds, 2.0, 2.0)}
    for name, times in own.items():
        rows = [
            {"work": work, "code": code, "seconds": time, "spread": 0.0, "runs": 9}
            for work, time in zip(works, times, strict=True)
        ]
        (folder / f"{name}.json").write_text(json.dumps({**CPU, "measurements": rows}))
    measured = ("--profile", "near=near.json", "--profile", "far=far.json")
    found = plan("--target", "near=llvm", "--target", "far=llvm", *measured, *LINK)
    assert set(devices(found).values()) == places
    assert reconsider(found, Change()) == found


@pytest.mark.usefixtures("folder")
def test_what_if_is_what_a_new_plan_says():
    """A plan asked about other hardware says what a plan made for that hardware says."""
    first = plan(*MACHINES)
    slow = ("--profile", "near=cpu.json", "--profile", "far=cpu.json")
    outcome = command("explain", "plan.json", "--profile", "far=cpu.json", "--format", "json")
    answer = json.loads(outcome.stdout)
    fresh = plan(*MACHINES, *slow)
    assert answer["plan"]["prediction"]["value"] == fresh.prediction.value
    assert {row["group"] for row in answer["moved"]} >= {"large", "mean"}
    assert set(devices(fresh).values()) == {"near"}
    text = command("explain", "plan.json", "--link", "near-far=1kB,1s").stdout
    assert "no group would move" in text
    back = reconsider(fresh, Change(models={}))
    assert devices(back) == devices(fresh) != devices(first)
    assert_refused(command("explain", "plan.json", "--profile", "moon=l4"), 2, "moon")


def test_a_sweep_finds_the_cross_over(folder):
    """Ever larger products: at first the copies cost more than the fast machine saves."""
    nodes = [node("MatMul", "x w", "y", "product")]
    save(
        make_model(nodes, {"x": ("n", 64)}, {"y": ("n", 64)}, {"w": random(64, 64)}),
        folder / "m.onnx",
    )
    options = ("plan", "m.onnx", *MACHINES, "--sweep", "n=1..256")
    data = json.loads(command(*options, "--format", "json").stdout)
    assert [point["value"] for point in data["points"]] == [1, 2, 4, 8, 16, 32, 64, 128, 256]
    (row,) = data["crossovers"]
    assert (row["group"], row["from"], row["to"]) == ("product", "near", "far")
    for point in data["points"]:
        shape = ("--shape", f"n={point['value']}")
        (group,) = plan(*MACHINES, *shape).groups
        assert group.device == ("far" if point["value"] >= row["at"] else "near")
        assert point["groups"] == {group.device: 1}
    text = command(*options).stdout
    assert f"from n={row['at']} on: product near -> far" in text
    assert_refused(command(*options, "-o", "p.json"), 2, "leave --output")


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("n=1,2,3", [1, 2, 3]),
        ("n=1,4..32", [1, 4, 8, 16, 32]),
        ("n=3..10,20", [3, 6, 20]),
        ("n=1", None),
        ("n", None),
        ("n=2,1", None),
        ("n=0..4", None),
        ("n=1..99999999999999999999999999999999999999", None),
    ],
)
def test_values_of_a_sweep(text, values):
    if values is None:
        with pytest.raises(UsageError, match="--sweep"):
            parse_sweep(text)
    else:
        found = parse_sweep(text)
        assert (found.name, list(found.values)) == ("n", values)


@pytest.mark.parametrize(
    ("text", "labels", "values"),
    [
        ("link.bandwidth=1gbit,8gbit", ["1gbit", "8gbit"], [1.25e8, 1e9]),
        ("link.bandwidth=500MB..2GB", ["500MB", "1000MB", "2000MB"], [5e8, 1e9, 2e9]),
        ("link.latency=1.5us..4us,1ms", ["1.5us", "3us", "1ms"], [1.5e-6, 3e-6, 1e-3]),
        ("link.latency=1,2", None, None),
        ("link.latency=1gbit,2gbit", None, None),
        ("link.bandwidth=2gbit,1gbit", None, None),
        ("link.bandwidth=0gbit,1gbit", None, None),
        ("link.bandwidth=1gbit..", None, None),
    ],
)
def test_figures_of_links_in_a_sweep(text, labels, values):
    if values is None:
        with pytest.raises(UsageError, match="--sweep"):
            parse_sweep(text)
    else:
        found = parse_sweep(text)
        assert list(found.labels) == labels
        assert list(found.values) == pytest.approx(values)


@pytest.mark.parametrize(
    ("sweep", "first", "last"),
    [("link.bandwidth=1kB..1GB", "near", "far"), ("link.latency=1us..1s", "far", "near")],
)
def test_a_sweep_over_links(folder, sweep, first, last):
    """The large product goes to the fast machine if the link lets it."""
    options = ("plan", "m.onnx", *MACHINES, "--sweep", sweep)
    data = json.loads(command(*options, "--format", "json").stdout)
    (row,) = [row for row in data["crossovers"] if row["group"] == "large"]
    assert (row["from"], row["to"]) == (first, last)
    assert row["at"] in [point["value"] for point in data["points"]]
    name = data["dimension"]
    assert f"from {name}={row['label']} on: large {first} -> {last}" in command(*options).stdout
    for point in data["points"]:
        figures = {"link.bandwidth": "1GB", "link.latency": "10us", name: point["label"]}
        link = f"near-far={figures['link.bandwidth']},{figures['link.latency']}"
        (group, *_) = plan(*MACHINES[:-2], "--link", link).groups
        assert group.device == (last if point["value"] >= row["at"] else first)
    alone = ("--target", "llvm:znver3")
    assert_refused(command("plan", "m.onnx", *alone, "--sweep", sweep), 2, "share one memory")


def test_a_bundle_without_costs_is_explained_too(bundle):
    outcome = command("explain", bundle)
    assert outcome.code == 0
    assert "llvm:0 is the only device" in outcome.stdout
    assert_refused(command("explain", bundle, "--objective", "energy"), 2, "made without costs")


@pytest.mark.usefixtures("folder")
def test_what_a_target_refuses_is_explained(folder):
    """Strings are left to ONNX Runtime, and the plan says why."""
    from tests.placement.test_fallback import strings_between

    save(strings_between(), folder / "m.onnx")
    found = plan(*MACHINES)
    same = next(group for group in found.groups if group.name == "same")
    assert (same.device, same.why) == ("onnxruntime:0", "unsupported")
    assert "holds strings" in same.reason
    assert set(same.refused) == {"near", "far"}


NAMES = ("stem", "left", "right", "pool", "flatten", "head")


@settings(max_examples=6, deadline=None)
@given(st.sets(st.sampled_from(NAMES)))
def test_random_plans_give_the_unsplit_result(tmp_path_factory, there):
    folder = tmp_path_factory.mktemp("plans")
    path = save(branched_model(), folder / "m.onnx")
    options = ("--target", "llvm:znver3", "--target", "llvm:znver3")
    assert command("plan", path, "-o", folder / "p.json", *options).code == 0
    found = plan_from_json((folder / "p.json").read_text(), "p.json")
    groups = [
        dataclasses.replace(group, device=f"llvm:{int(group.name in there)}")
        for group in found.groups
    ]
    edited = dataclasses.replace(
        found,
        groups=tuple(groups),
        devices=tuple(
            dataclasses.replace(d, specification="") if d.kind == "llvm" else d
            for d in found.devices
        ),
    )
    (folder / "p.json").write_text(plan_to_json(edited))
    outcome = command("compile", path, "-o", folder / "m.hyb", "--plan", folder / "p.json")
    assert outcome.code == 0, outcome.stderr
    feeds = {"x": random(1, 3, 8, 8)}
    with hybridc.load(folder / "m.hyb") as loaded:
        assert there & {"stem", "head"} <= set(loaded.plan.get("llvm:1", ()))
        assert_close(loaded.run(feeds), run_reference(branched_model(), feeds))


def test_bundles_hold_no_paths_of_bindings(tmp_path):
    model = make_model([node("Mul", "x s", "y", "mul")], {"x": (2,), "s": (2,)}, {"y": (2,)})
    path = save(model, tmp_path / "m.onnx")
    np.save(tmp_path / "secret.npy", np.ones(2, np.float32))
    bind = f"s=@{tmp_path / 'secret.npy'}"
    assert command("compile", path, "-o", tmp_path / "b", "--bind", bind).code == 0
    assert "secret" not in (tmp_path / "b" / "plan.json").read_text()


def test_what_a_gpu_refuses_goes_to_the_cpu_and_not_to_the_fallback(tmp_path):
    """Whether two sizes are equal is checked while running, which a GPU's kernel cannot do."""
    nodes = [node("MatMul", "a w", "p", "product"), node("Add", "p b", "y", "add")]
    dims = {"a": ("n", 256), "b": ("m", 256)}
    path = save(
        make_model(nodes, dims, {"y": (None, 256)}, {"w": random(256, 256)}), tmp_path / "m"
    )
    targets = ("--target", "cuda:sm_90", "--target", "llvm:znver3")
    ranges = ("--shape", "n=1..4096", "--shape", "m=1..4096")
    outcome = command("plan", path, *targets, *ranges, "-o", tmp_path / "p.json")
    assert outcome.code == 0, outcome
    found = plan_from_json((tmp_path / "p.json").read_text(), "p.json")
    assert devices(found) == {"product": "cuda:0", "add": "llvm:0"}
    add = next(group for group in found.groups if group.name == "add")
    assert add.why == "unsupported"
    assert "cuda:0 cannot compile it: it checks sizes while the model runs" in add.reason
    assert found.sizes == {"n": 4096, "m": 4096}
