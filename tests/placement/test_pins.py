"""--pin: what it matches and what it refuses; and pins that hold in the bundle."""

import numpy as np
import onnx_ir as ir
import pytest

import hybridc
from hybridc.errors import UsageError
from hybridc.placement.group import make_groups
from hybridc.placement.rules import NodeRule, Rules, RuleTexts, exclude, parse_rules
from tests.models import branched_model, make_model, node, random, run_reference
from tests.support import assert_close, assert_compile_refused, compile_to

BOTH = ("llvm:0", "llvm:1")
TWO = ("--target", "llvm:0", "--target", "llvm:1")


def placed(*pins):
    """Names of the anchors that the pins put on device b."""
    return {name for name, devices in left(branched_model(), *pins).items() if devices == {"b"}}


def left(model, *pins):
    """Devices that pins leave to each group, by its anchor."""
    graph = ir.from_proto(model).graph
    groups = make_groups(list(graph))
    rules = Rules(tuple(NodeRule("pin", *pin) for pin in pins))
    taken = exclude(graph, groups, rules, ["a", "b"]).by_group
    return {g.name: {"a", "b"} - set(away) for g, away in zip(groups, taken, strict=True)}


@pytest.mark.parametrize(
    ("pins", "expected"),
    [
        ([], set()),
        ([("left", "b")], {"left"}),
        ([("join", "b")], {"left"}),
        ([("stem.y", "b")], {"stem"}),
        ([("left.y", "b"), ("join", "b")], {"left"}),
        ([("*.sigmoid", "b")], {"right"}),
        ([("?????", "b")], {"right"}),
        ([("head", "b"), ("pool", "b")], {"head", "pool"}),
        ([("*", "b")], {"stem", "left", "right", "pool", "flatten", "head"}),
    ],
)
def test_matches(pins, expected):
    got = placed(*pins)
    assert got >= expected if pins == [("?????", "b")] else got == expected


def test_brackets_in_names_are_no_patterns():
    """PyTorch names values like ``conv[0]``; given literally they match."""
    nodes = [node("MatMul", "x x", "a[0]", "m[0]"), node("MatMul", "a[0] x", "y", "m0")]
    model = make_model(nodes, {"x": (2, 2)}, {"y": (2, 2)})
    assert left(model, ("m[0]", "b")) == {"m[0]": {"b"}, "m0": {"a", "b"}}


@pytest.mark.parametrize("option", ["left", "=llvm:0", "", "left="])
def test_syntax(option):
    with pytest.raises(UsageError, match="--pin"):
        parse_rules(RuleTexts(pin=(option,)), BOTH)


def test_equals_signs_in_names():
    rules = parse_rules(RuleTexts(pin=("a=b=llvm:1",)), BOTH).rules
    assert rules == (NodeRule("pin", "a=b", "llvm:1"),)


@pytest.mark.parametrize(
    ("code", "pins", "words"),
    [
        (2, ["lefft=llvm:1"], ["lefft", "did you mean 'left'"]),
        (2, ["nothing*=llvm:1"], ["no node", "nothing*"]),
        (2, ["left=llvm:2"], ["names device 'llvm:2'", "llvm:0, llvm:1"]),
        (3, ["left=llvm:0", "join=llvm:1"], ["contradict each other", "left, join"]),
        (3, ["*=llvm:0", "head=llvm:1"], ["contradict each other", "head"]),
    ],
)
def test_refused(model_file, tmp_path, code, pins, words):
    options = (*TWO, *(text for pin in pins for text in ("--pin", pin)))
    assert_compile_refused(model_file, tmp_path, code, *words, options=options)


@pytest.mark.parametrize(
    ("targets", "words"),
    [
        (["cuda9"], ["there is no target 'cuda9'", "llvm"]),
        (["llvm:pentium9"], ["'pentium9'", "x86-64-v3"]),
        (["a=llvm", "a=llvm"], ["two targets are called 'a'"]),
        (["LLVM"], ["not of the form"]),
    ],
)
def test_targets_refused(model_file, tmp_path, targets, words):
    options = tuple(text for target in targets for text in ("--target", target))
    assert_compile_refused(model_file, tmp_path, 2, *words, options=options)


def test_pins_hold_in_the_bundle(tmp_path):
    report = compile_to(
        tmp_path / "b.hyb",
        branched_model(),
        targets=("main=llvm", "side=llvm"),
        pins=("right=side", "head=side"),
        verify=True,
    )
    manifest = report.manifest
    assert [part.device for part in manifest.parts] == ["main", "side", "main", "side"]
    moved = {(t.tensor, t.source, t.destination) for t in manifest.transfers}
    assert moved >= {("x", "input", "main"), ("stem.y", "main", "side")}
    inputs = {"x": random(1, 3, 8, 8)}
    with hybridc.load(tmp_path / "b.hyb") as model:
        assert {"right", "head"} <= set(model.plan["side"])
        assert_close(model.run(inputs), run_reference(branched_model(), inputs))


def test_an_input_as_output_and_a_constant_as_output(tmp_path):
    """Outputs that no node computes are given too, in whatever part."""
    weights = {"w": random(2, 2)}
    nodes = [node("MatMul", "x w", "m", "first"), node("MatMul", "m w", "y", "second")]
    model = make_model(nodes, {"x": (2, 2)}, dict.fromkeys("yxw", (2, 2)), weights)
    compile_to(tmp_path / "b.hyb", model, targets=BOTH, pins=("second=llvm:1",), verify=True)
    inputs = {"x": np.eye(2, dtype="f")}
    with hybridc.load(tmp_path / "b.hyb") as loaded:
        assert_close(loaded.run(inputs), {"y": weights["w"] @ weights["w"], **inputs, **weights})


def test_a_model_without_nodes(tmp_path):
    model = make_model([], {"x": (2, 2)}, {"x": (2, 2)})
    compile_to(tmp_path / "b.hyb", model, verify=True)
    with hybridc.load(tmp_path / "b.hyb") as loaded:
        np.testing.assert_array_equal(loaded(x=np.eye(2, dtype="f"))["x"], np.eye(2))
