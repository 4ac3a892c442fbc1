"""Sizes computed inside a branch are constants when the branch is lowered."""

import numpy as np
import pytest
from onnx import TensorProto, helper

from hybridc import onnx_backend
from tests.models import node, random


def branch(name, nodes):
    output = helper.make_tensor_value_info("out", TensorProto.FLOAT, None)
    return helper.make_graph(nodes, name, [], [output])


def constant(name, value):
    return helper.make_node("Constant", [], [name], value_ints=value)


def model_of(then_nodes, other_nodes):
    """``y = then(x) if flag else other(x)``."""
    choice = helper.make_node(
        "If",
        ["flag"],
        ["y"],
        "choice",
        then_branch=branch("then", then_nodes),
        else_branch=branch("other", other_nodes),
    )
    inputs = [
        helper.make_tensor_value_info("flag", TensorProto.BOOL, ()),
        helper.make_tensor_value_info("x", TensorProto.FLOAT, (2, 6)),
    ]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)]
    graph = helper.make_graph([choice], "graph", inputs, outputs)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


RESHAPE = [
    constant("three", [3]),
    constant("four", [4]),
    node("Concat", "three four", "shape", axis=0),
    node("Reshape", "x shape", "out"),
]
PAD = [
    constant("some", [0, 1]),
    constant("none", [0, 1]),
    node("Concat", "some none", "pads", axis=0),
    node("Pad", "x pads", "wide"),
    constant("shape", [2, -1]),
    node("Reshape", "wide shape", "out"),
]
SLICE = [
    constant("begin", [1]),
    constant("length", [3]),
    node("Add", "begin length", "end"),
    constant("axis", [1]),
    node("Slice", "x begin end axis", "out"),
]


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        (RESHAPE, lambda x: x.reshape(3, 4)),
        (PAD, lambda x: np.pad(x, [(0, 0), (1, 1)])),
        (SLICE, lambda x: x[:, 1:4]),
    ],
    ids=["reshape", "pad", "slice"],
)
def test_sizes_in_a_branch(nodes, expected):
    x = random(2, 6)
    other = [node("Neg", "x", "negative"), *nodes[:-1]]
    last = helper.make_node(nodes[-1].op_type, ["negative", *nodes[-1].input[1:]], ["out"])
    if nodes is PAD:
        other = [node("Neg", "x", "negative"), *nodes]
        other[4] = node("Pad", "negative pads", "wide")
    else:
        other.append(last)
    compiled = onnx_backend.prepare(model_of(nodes, other), fallback=False)
    for flag in (True, False):
        (result,) = compiled.run([np.array(flag), x])
        np.testing.assert_array_equal(result, expected(x if flag else -x))
