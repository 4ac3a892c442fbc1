"""Nodes that simplifying took away: each is led to one that stands for it."""

import numpy as np
import onnx_ir as ir

from hybridc.placement.merged import merged_nodes, trace
from tests.models import make_model, node, random, save
from tests.support import hybridc


def scaled_model():
    """A convolution whose scaling is folded, a sum of constants, and a node that nobody reads."""
    nodes = [
        node("Conv", "x w", "c", "conv"),
        node("Mul", "c two", "m", "scale"),
        node("Add", "two two", "four", "sum"),
        node("Mul", "m four", "n", "again"),
        node("Relu", "n", "y", "relu"),
        node("Neg", "c", "unread", "dead"),
    ]
    constants = {"w": random(4, 3, 3, 3), "two": np.float32([2.0])}
    return make_model(nodes, {"x": (1, 3, 8, 8)}, {"y": (1, 4, 6, 6)}, constants)


def test_every_node_of_the_file_is_answered(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save(scaled_model(), tmp_path / "m.onnx")
    profile = ("--target", "llvm", "--profile", "llvm:0=zen3")
    outcome = hybridc("plan", "m.onnx", *profile, "-o", "plan.json")
    assert outcome.code == 0, outcome
    for name in ("conv", "scale", "sum", "again", "relu"):
        outcome = hybridc("explain", "plan.json", name)
        assert outcome.code == 0, outcome
        assert "runs on llvm:0" in outcome.stdout
    outcome = hybridc("explain", "plan.json", "sum")
    first = "sum was merged when the model was simplified; its result goes to this group:"
    assert outcome.stdout.splitlines()[0] == first
    outcome = hybridc("explain", "plan.json", "dead")
    assert (outcome.code, "the plan has no node 'dead'" in outcome.stderr) == (2, True)


def test_a_result_is_followed_to_what_is_left():
    """By the value where somebody still computes it, else by the nodes that read it."""
    before = trace(ir.from_proto(scaled_model()).graph)
    nodes = [node("Conv", "x w2", "n", "fused"), node("Relu", "n", "y", "relu")]
    after = make_model(nodes, {"x": (1, 3, 8, 8)}, {"y": (1, 4, 6, 6)}, {"w2": random(4, 3, 3, 3)})
    assert merged_nodes(before, ir.from_proto(after).graph) == {
        "conv": "fused",
        "scale": "fused",
        "sum": "fused",
        "again": "fused",
    }
