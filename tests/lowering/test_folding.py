"""Sizes computed inside a branch are constants when the branch is lowered."""

import contextlib

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from hybridc.targets.protocol import Section
from onnx import TensorProto, helper, numpy_helper

from hybridc import onnx_backend
from hybridc.errors import UnsupportedError
from hybridc.lowering.lower import lower
from hybridc.lowering.ops import default_table
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


@pytest.mark.parametrize("kind", [np.float32, np.int64])
def test_constants_without_elements(kind):
    """They are given to kernels and to the caller like others."""
    none = numpy_helper.from_array(np.zeros((0, 6), kind), "none")
    element = helper.np_dtype_to_tensor_dtype(np.dtype(kind))
    nodes = [node("Concat", "x none", "y", axis=0), node("Identity", "none", "z")]
    inputs = [helper.make_tensor_value_info("x", element, (2, 6))]
    outputs = [helper.make_tensor_value_info(name, element, None) for name in "yz"]
    graph = helper.make_graph(nodes, "graph", inputs, outputs, [none])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    x = random(2, 6).astype(kind)
    y, z = onnx_backend.prepare(model, fallback=False).run([x])
    np.testing.assert_array_equal(y, x)
    assert z.shape == (0, 6)
    assert z.dtype == kind


@pytest.mark.parametrize(
    "nodes",
    [
        [node("ConstantOfShape", "size", "out")],
        [node("Expand", "one size", "out")],
        [node("Tile", "row size", "out")],
        [node("Reshape", "x column", "c"), node("Mul", "c row", "out")],
    ],
    ids=["fill", "expand", "tile", "broadcast"],
)
def test_a_huge_constant_is_not_computed(nodes, monkeypatch):
    """Evaluating it would take more memory than there is."""
    seen = []
    monkeypatch.setattr(onnx.reference.ReferenceEvaluator, "run", lambda *_: seen.append(nodes))
    weights = {
        "size": np.array([2**31, 2], np.int64),
        "one": np.ones((1, 1), np.float32),
        "row": np.ones((1, 2**15), np.float32),
        "x": np.ones(2**15, np.float32),
        "column": np.array([-1, 1], np.int64),
    }
    graph = branch("graph", nodes)
    graph.initializer.extend(numpy_helper.from_array(a, name) for name, a in weights.items())
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    inner = ir.from_proto(model).graph
    section = Section(list(inner), [], list(inner.outputs), {"": 17})
    with contextlib.suppress(UnsupportedError):
        lower(section, default_table())
    assert seen in ([], [nodes]), seen
    assert not seen or nodes[0].op_type == "Reshape"
