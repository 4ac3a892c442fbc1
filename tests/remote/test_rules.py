"""Nothing computed from a private input reaches the server, but through a release."""

from __future__ import annotations

import json

import networkx
import onnx_ir as ir
import pytest
from hybridc.targets.protocol import Device
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridc.bundle.read import open_bundle
from hybridc.errors import InternalError
from hybridc.placement.group import make_groups
from hybridc.placement.plan import make_plan
from hybridc.placement.rules import RuleTexts, exclude, parse_rules
from hybridc.remote.audit import audit
from tests.models import save
from tests.remote.conftest import SERVER, hybrid_model
from tests.support import assert_compile_refused, assert_refused
from tests.support import hybridc as run_hybridc

EDGE, SERVER_DEVICE = Device("edge", "llvm"), Device("server", "llvm")


@st.composite
def graphs(draw):
    """A random graph of one- and two-input nodes over a few inputs, with rules and placements."""
    inputs = [ir.val(f"x{i}", ir.DataType.FLOAT, [2]) for i in range(draw(st.integers(1, 3)))]
    values, nodes = list(inputs), []
    for index in range(draw(st.integers(1, 12))):
        count = draw(st.integers(1, 2))
        read = [draw(st.sampled_from(values)) for _ in range(count)]
        kinds = ("Relu", "ReduceSum") if count == 1 else ("Add", "MatMul")
        made = ir.node(draw(st.sampled_from(kinds)), read, name=f"n{index}")
        made.outputs[0].name = f"v{index}"
        made.outputs[0].type, made.outputs[0].shape = (
            ir.TensorType(ir.DataType.FLOAT),
            ir.Shape([2]),
        )
        nodes.append(made)
        values.append(made.outputs[0])
    outputs = [value for value in values[len(inputs) :] if not value.uses()]
    graph = ir.Graph(inputs, outputs, nodes=nodes, opset_imports={"": 17}, name="g")
    private = draw(st.sets(st.sampled_from([value.name for value in inputs]), min_size=1))
    releases = draw(st.sets(st.sampled_from([value.name for value in values]), max_size=3))
    wish = draw(st.lists(st.booleans(), min_size=len(nodes), max_size=len(nodes)))
    return graph, sorted(private), sorted(releases), wish


def place(graph, private, releases, wish):
    """A placement that puts on the server what is wished there, as far as the rules allow it."""
    texts = RuleTexts(private=tuple(private), release=tuple(releases))
    rules = parse_rules(texts, ["edge", "server"], "server")
    groups = make_groups(list(graph))
    taken = exclude(graph, groups, rules, ["edge", "server"]).by_group
    devices = [
        SERVER_DEVICE if wish[index] and "server" not in own else EDGE
        for index, own in enumerate(taken)
    ]
    return rules, groups, devices


def sent_values(plan):
    """Values that the server reads and does not compute."""
    own = {v for part in plan.parts if part.device == SERVER_DEVICE for v in part.outputs}
    read = {v for part in plan.parts if part.device == SERVER_DEVICE for v in part.inputs}
    return read - own


def paths_without_release(graph, private, releases):
    """Names that a private input reaches along edges, where a released value ends the way."""
    flow = networkx.DiGraph()
    flow.add_nodes_from(str(value.name) for value in graph.inputs)
    for node in graph:
        for value in node.inputs:
            flow.add_edge(str(value.name), str(node.outputs[0].name))
    kept = flow.subgraph([name for name in flow if name not in releases])
    sources = [name for name in private if name in kept]
    return set(sources).union(*(networkx.descendants(kept, name) for name in sources))


@given(graphs())
@settings(max_examples=300, deadline=None)
def test_no_path_from_private_to_the_server_without_release(case):
    graph, private, releases, _ = case
    rules, groups, devices = place(*case)
    plan = make_plan(graph, groups, devices, EDGE, "server")
    secret = paths_without_release(graph, private, releases)
    assert not secret & {str(value.name) for value in sent_values(plan)}
    crossings = audit(graph, plan, rules, "server", {})
    sent = {crossing.tensor for crossing in crossings if crossing.destination == "server"}
    assert sent == {str(value.name) for value in sent_values(plan)}
    for crossing in crossings:
        if crossing.destination == "server" and crossing.reason.startswith("released by"):
            named = crossing.reason.removeprefix("released by ").split(", ")
            assert {name.removeprefix("--release ") for name in named} <= set(releases)


@given(graphs())
@settings(max_examples=300, deadline=None)
def test_the_audit_does_not_trust_the_placement(case):
    """A placement that ignores the rules is refused exactly if a secret would cross."""
    graph, private, releases, wish = case
    rules, groups, _ = place(*case)
    devices = [SERVER_DEVICE if wish[index] else EDGE for index in range(len(groups))]
    plan = make_plan(graph, groups, devices, EDGE, "server")
    secret = paths_without_release(graph, private, releases)
    leaks = secret & {str(value.name) for value in sent_values(plan)}
    if leaks:
        with pytest.raises(InternalError, match="private input"):
            audit(graph, plan, rules, "server", {})
    else:
        audit(graph, plan, rules, "server", {})


def test_an_output_that_is_an_input_stays_here():
    x, y = (ir.val(name, ir.DataType.FLOAT, [2]) for name in "xy")
    node = ir.node("Relu", [y], name="n")
    graph = ir.Graph([x, y], [node.outputs[0], x], nodes=[node], opset_imports={"": 17})
    first = ir.node("Abs", [x], name="first")
    first.outputs[0].name, node.outputs[0].name = "a", "b"
    graph.insert_before(node, first)
    graph.outputs.append(first.outputs[0])
    rules, groups, devices = place(graph, ["x"], [], [True, True])
    plan = make_plan(graph, groups, devices, EDGE, "server")
    assert {str(value.name) for value in sent_values(plan)} == {"y"}
    audit(graph, plan, rules, "server", {})


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save(hybrid_model(), tmp_path_factory.mktemp("rules") / "model.onnx")


def test_without_a_release_nothing_may_run_there(model, tmp_path):
    options = ("--shape", "batch=1", *SERVER, "--private", "x")
    words = ("--private x leaves nothing", "--release")
    assert_compile_refused(model, tmp_path, 3, *words, options=options)


def test_rules_that_contradict_each_other_are_named(model, tmp_path):
    options = ("--shape", "batch=1", *SERVER, "--private", "x", "--pin", "wide=server")
    words = ("--private x", "--pin wide=server", "contradict")
    assert_compile_refused(model, tmp_path, 3, *words, options=options)


@pytest.mark.parametrize(
    ("options", "code", "word"),
    [
        (("--private", "x"), 2, "--remote"),
        (("--residency", "eu"), 2, "--remote"),
        ((*SERVER, "--residency", "eu"), 2, "--region server=REGION"),
        ((*SERVER, "--residency", "eu", "--region", "eu"), 2, "server=REGION"),
        ((*SERVER, "--residency", "eu", "--region", "server=us"), 3, "--residency eu leaves"),
        ((*SERVER, "--residency", "x=eu", "--region", "server=us"), 3, "--residency x=eu leaves"),
        ((*SERVER, "--residency", "y=eu", "--region", "server=us"), 2, "its inputs are x"),
        (("--remote-batch", "2"), 2, "--remote"),
        (("--remote", "server=llvm"), 2, "--link"),
        (("--remote", "llvm", "--link", "llvm:0=1gbit,1ms"), 2, "NAME=KIND"),
        (("--remote", "server=onnxruntime", "--link", "server=1gbit,1ms"), 2, "compiled"),
        ((*SERVER, "--private", "picture"), 2, "its inputs are x"),
        ((*SERVER, "--private", "map"), 2, "no such input"),
        ((*SERVER, "--private", "x", "--release", "maps"), 2, "did you mean 'map'"),
        ((*SERVER, "--objective", "energy"), 2, "latency"),
        ((*SERVER, "--remote-delay", "soon"), 2, "--remote-delay"),
        ((*SERVER, "--precision", "fp16"), 2, "--keep-model"),
        (("--remote", "server=llvm", "--link", "server=1mbit,10s"), 3, "worth running"),
    ],
)
def test_refused(model, tmp_path, options, code, word):
    shape = ("--shape", "batch=1", "--no-verify")
    assert_compile_refused(model, tmp_path, code, word, options=(*shape, *options))


@pytest.mark.parametrize(
    ("rules", "reason"),
    [
        (("--residency", "eu", "--region", "server=eu"), "no input is private"),
        (("--residency", "eu", "--region", "server=us", "--release", "map"), "released by"),
    ],
)
def test_a_residency_keeps_inputs_from_servers_elsewhere(model, tmp_path, rules, reason):
    options = ("--shape", "batch=1", *SERVER, "--format", "json", "--no-verify", *rules)
    done = run_hybridc("compile", model, "-o", tmp_path / "edge.hyb", *options)
    assert done.code == 0, done.stderr
    plans = json.loads(done.stdout)["manifest"]["plans"]
    reasons = {c["reason"] for p in plans for c in p["crossings"] if c["destination"] == "server"}
    assert all(text.startswith(reason) for text in reasons)
    assert ("remote" in {plan["name"] for plan in plans}) == (reason == "no input is private")


def test_the_plan_has_the_audit(model, tmp_path):
    options = ("--shape", "batch=1", *SERVER, "--private", "x", "--release", "map")
    done = run_hybridc("plan", model, *options, "-o", tmp_path / "plan.json")
    assert done.code == 0, done.stderr
    assert "released by --release map" in done.stdout
    refused = run_hybridc("compile", model, "-o", tmp_path / "b", "--plan", tmp_path / "plan.json")
    assert_refused(refused, 2, "server")
    slower = run_hybridc("explain", tmp_path / "plan.json", "--link", "llvm:0-server=1mbit,10s")
    assert slower.code == 0, slower.stderr
    assert "wide" in slower.stdout


def test_the_bundle_has_the_audit(hybrid):
    manifest = open_bundle(hybrid.bundle).manifest
    assert [plan.name for plan in manifest.plans] == ["cut1", "local"]
    (sent, back) = manifest.plans[0].crossings
    assert (sent.tensor, sent.source, sent.destination) == ("map", "llvm:0", "server")
    assert sent.bytes == 8 * 24 * 24 * 4
    assert sent.share == sent.bytes / hybrid.x.nbytes
    assert sent.reason == "released by --release map"
    assert (back.tensor, back.destination) == ("y", "output")
    shown = run_hybridc("inspect", hybrid.bundle).stdout
    assert "released by --release map" in shown
    assert run_hybridc("verify", hybrid.bundle).code == 0
    assert run_hybridc("explain", hybrid.bundle).code == 0
