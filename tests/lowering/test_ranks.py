"""Ifs whose branches give results of different ranks: what follows goes into both branches."""

import itertools

import numpy as np
import pytest
from onnx import TensorProto, helper

from hybridc.errors import UnsupportedError
from hybridc.lowering.scope import MAX_SPLITS
from tests.lowering.test_control import assert_right, compiled, typed, value
from tests.models import make_model, node, random

AXIS = {"first": np.array([0])}


def branch(nodes, output):
    return helper.make_graph(nodes, f"{output}.graph", [], [value(output, None)])


def split(condition, source, output):
    """``source``, or the same with an axis more."""
    same = branch([node("Identity", source, f"{output}.same")], f"{output}.same")
    more = branch([node("Unsqueeze", f"{source} first", f"{output}.more")], f"{output}.more")
    return node("If", condition, output, f"{output}.if", then_branch=same, else_branch=more)


def flat_sum(source):
    """What follows: a scalar whatever the rank is."""
    return [
        node("Add", f"{source} {source}", "double"),
        node("ReduceSum", "double", "y", keepdims=0),
    ]


def model_of(nodes, flags):
    inputs = {"x": (2, 3)} | dict.fromkeys(flags, ())
    model = make_model(nodes, inputs, {"y": ()}, AXIS)
    return typed(model, **dict.fromkeys(flags, TensorProto.BOOL))


def assert_all_right(model, flags, folder):
    with compiled(model, folder) as loaded:
        for choice in itertools.product([True, False], repeat=len(flags)):
            given = {flag: np.array(way) for flag, way in zip(flags, choice, strict=True)}
            assert_right(model, loaded, x=random(2, 3), **given)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_one_after_another(tmp_path, count):
    flags = [f"f{i}" for i in range(count)]
    names = ["x", *(f"s{i}" for i in range(count))]
    nodes = [split(f, names[i], names[i + 1]) for i, f in enumerate(flags)]
    assert_all_right(model_of([*nodes, *flat_sum(names[-1])], flags), flags, tmp_path)


@pytest.mark.parametrize("where", ["then", "else"])
def test_one_inside_another(tmp_path, where):
    """The inner one alone makes the ranks of the outer one's branches differ."""
    inner = branch([split("f1", "x", "deep"), node("Neg", "deep", "inner.y")], "inner.y")
    plain = branch([node("Abs", "x", "plain.y")], "plain.y")
    ways = (inner, plain) if where == "then" else (plain, inner)
    outer = node("If", "f0", "s", "outer", then_branch=ways[0], else_branch=ways[1])
    assert_all_right(model_of([outer, *flat_sum("s")], ["f0", "f1"]), ["f0", "f1"], tmp_path)


def test_results_beside_the_one_that_differs(tmp_path):
    """The inner If's other results, and those of the outer one, are there for what follows."""
    same = helper.make_graph(
        [node("Identity", "x", "a1"), node("Neg", "x", "b1")],
        "same",
        [],
        [value("a1", None), value("b1", None)],
    )
    nodes = [split("f1", "x", "a2"), node("Abs", "x", "b2")]
    more = helper.make_graph(nodes, "more", [], [value("a2", None), value("b2", None)])
    outer = node("If", "f0", "a b", "outer", then_branch=same, else_branch=more)
    nodes = [outer, node("Mul", "a b", "c"), *flat_sum("c")]
    assert_all_right(model_of(nodes, ["f0", "f1"]), ["f0", "f1"], tmp_path)


def test_too_many_are_refused(tmp_path):
    """Each doubles the code."""
    flags = [f"f{i}" for i in range(MAX_SPLITS + 1)]
    names = ["x", *(f"s{i}" for i in range(len(flags)))]
    nodes = [split(f, names[i], names[i + 1]) for i, f in enumerate(flags)]
    with pytest.raises(UnsupportedError, match=f"{MAX_SPLITS} deep"):
        compiled(model_of([*nodes, *flat_sum(names[-1])], flags), tmp_path)
