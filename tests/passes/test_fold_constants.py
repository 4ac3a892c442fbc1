import numpy as np
import pytest
from hybridc.passes.fold_constants import FoldConstants
from onnx import TensorProto, helper

from tests.models import make_model, node, random
from tests.passes.harness import apply, assert_same_results, operators


def used(graph):
    """Contents of the initializers that nodes read, by name."""
    return {
        value.name: value.const_value.numpy()
        for n in graph
        for value in n.inputs
        if value is not None and value.const_value is not None
    }


def live(model):
    """Operators of nodes that the outputs depend on."""
    from onnx_ir.passes.common import RemoveUnusedNodesPass

    return operators(RemoveUnusedNodesPass()(model).model)


def test_a_chain_of_constants_becomes_one():
    nodes = [
        node("Add", "a b", "c"),
        node("Mul", "c c", "d"),
        node("Transpose", "d", "e"),
        node("Add", "x e", "y"),
    ]
    weights = {"a": random(3, 2, seed=1), "b": random(3, 2, seed=2)}
    model = make_model(nodes, {"x": (2, 3)}, {"y": (2, 3)}, weights)
    after = apply(FoldConstants(), model)
    np.testing.assert_allclose(used(after.graph)["e"], ((weights["a"] + weights["b"]) ** 2).T)
    assert live(after) == ["Add"]
    assert_same_results(model, after, {"x": random(2, 3)})


@pytest.mark.parametrize(
    ("attributes", "expected"),
    [
        ({}, [2, 3, 4]),
        ({"start": 1}, [3, 4]),
        ({"end": -1}, [2, 3]),
        ({"start": -2, "end": 2}, [3]),
    ],
)
def test_shape_of_a_static_value(attributes, expected):
    nodes = [
        node("Shape", "x", "s", **attributes),
        node("ReduceProd", "s", "p", keepdims=0),
        node("Cast", "p", "f", to=TensorProto.FLOAT),
        node("Mul", "x f", "y"),
    ]
    model = make_model(nodes, {"x": (2, 3, 4)}, {"y": (2, 3, 4)})
    after = apply(FoldConstants(), model)
    assert live(after) == ["Mul"]
    assert used(after.graph)["f"] == np.prod(expected)
    assert_same_results(model, after, {"x": random(2, 3, 4)})


def test_size_of_a_static_value():
    nodes = [node("Size", "x", "s"), node("Cast", "s", "f", to=TensorProto.FLOAT)]
    model = make_model([*nodes, node("Mul", "x f", "y")], {"x": (2, 3)}, {"y": (2, 3)})
    assert used(apply(FoldConstants(), model).graph)["f"] == 6


def test_a_dynamic_shape_stays():
    nodes = [node("Shape", "x", "s"), node("Reshape", "x s", "y")]
    model = make_model(nodes, {"x": ("n", 3)}, {"y": ("n", 3)})
    assert operators(apply(FoldConstants(), model)) == ["Shape", "Reshape"]


@pytest.mark.parametrize("operator", ["RandomNormalLike", "RandomUniformLike", "Bernoulli"])
def test_what_is_random_stays(operator):
    nodes = [node(operator, "a", "r"), node("Add", "x r", "y")]
    weights = {"a": np.full((2,), 0.5, "f")}
    model = make_model(nodes, {"x": (2,)}, {"y": (2,)}, weights)
    assert live(apply(FoldConstants(), model)) == [operator, "Add"]


def test_inputs_with_a_default_stay():
    """An initializer that a caller may overwrite is no constant."""
    model = make_model(
        [node("Neg", "a", "n"), node("Add", "x n", "y")],
        {"x": (2,), "a": (2,)},
        {"y": (2,)},
        {"a": random(2)},
    )
    assert live(apply(FoldConstants(), model)) == ["Neg", "Add"]


def test_an_output_keeps_its_name():
    nodes = [node("Neg", "a", "z"), node("Add", "x z", "y")]
    model = make_model(nodes, {"x": (2,)}, {"y": (2,), "z": (2,)}, {"a": random(2)})
    assert_same_results(model, apply(FoldConstants(), model), {"x": random(2)})


def test_an_operator_that_cannot_be_run_stays():
    strange = helper.make_node("Frob", ["a"], ["f"], domain="com.example")
    model = make_model(
        [strange, node("Add", "x f", "y")], {"x": (2,)}, {"y": (2,)}, {"a": random(2)}
    )
    model.opset_import.append(helper.make_opsetid("com.example", 1))
    assert live(apply(FoldConstants(), model)) == ["Frob", "Add"]


def test_subgraphs_are_left_alone():
    value = helper.make_tensor_value_info("r", TensorProto.FLOAT, (2,))
    branch = [helper.make_graph([node(op, "a", "r")], op, [], [value]) for op in ("Neg", "Abs")]
    choose = node("If", "c", "i", then_branch=branch[0], else_branch=branch[1])
    weights = {"a": random(2), "c": np.array(True)}
    model = make_model([choose, node("Add", "x i", "y")], {"x": (2,)}, {"y": (2,)}, weights)
    after = apply(FoldConstants(), model)
    assert operators(after) == ["If", "Add"]
    assert_same_results(model, after, {"x": random(2)})
