import numpy as np
import onnx_ir as ir
from hybridc.passes.share_subexpressions import ShareSubexpressions

from tests.models import make_model, node, random
from tests.passes.harness import apply, assert_same_results, operators

DIMS = (2, 3)


def check(nodes, outputs, expected, weights=None, opset=17):
    model = make_model(nodes, {"x": DIMS}, dict.fromkeys(outputs, DIMS), weights, opset=opset)
    after = apply(ShareSubexpressions(), model)
    assert operators(after) == expected
    assert_same_results(model, after, {"x": random(*DIMS)})


def test_equal_chains_become_one():
    nodes = [
        node("Relu", "x", "a"),
        node("Relu", "x", "b"),
        node("Add", "a one", "c"),
        node("Add", "b other", "d"),
        node("Mul", "c d", "y"),
    ]
    weights = {"one": np.array([1], "f"), "other": np.array([1], "f")}
    check(nodes, ["y"], ["Relu", "Add", "Mul"], weights)


def test_different_constants_types_attributes_and_order_stay():
    nodes = [
        node("Add", "x one", "a"),
        node("Add", "x two", "b"),
        node("LeakyRelu", "a", "c", alpha=0.1),
        node("LeakyRelu", "a", "d", alpha=0.2),
        node("Sub", "c d", "e"),
        node("Sub", "d c", "f"),
        node("Max", "b e f", "y"),
    ]
    weights = {"one": np.array([1], "f"), "two": np.array([2], "f")}
    check(nodes, ["y"], [n.op_type for n in nodes], weights)


def test_a_shared_output_keeps_its_name():
    nodes = [node("Relu", "x", "a"), node("Neg", "a", "z"), node("Relu", "x", "y")]
    check(nodes, ["z", "y"], ["Relu", "Neg"])


def test_two_outputs_are_both_computed():
    nodes = [node("Relu", "x", "y"), node("Relu", "x", "z")]
    check(nodes, ["y", "z"], ["Relu", "Relu"])


def test_random_numbers_are_not_shared():
    nodes = [node("RandomNormalLike", "x", n, n) for n in "ab"]
    nodes += [node("Bernoulli", "x", n, n) for n in "cd"]
    nodes += [node("Sum", "a b c d", "y")]
    model = make_model(nodes, {"x": DIMS}, {"y": DIMS})
    after = apply(ShareSubexpressions(), model)
    assert operators(after) == [n.op_type for n in nodes]


def test_operators_of_unknown_domains_are_not_shared():
    nodes = [node("Own", "x", "a"), node("Own", "x", "b"), node("Add", "a b", "y")]
    for each in nodes[:2]:
        each.domain = "own"
    model = make_model(nodes, {"x": DIMS}, {"y": DIMS})
    model.opset_import.add(domain="own", version=1)
    assert len(operators(ShareSubexpressions()(ir.from_proto(model)).model)) == 3


def test_results_left_out_are_not_handed_on():
    nodes = [
        node("MaxPool", "x", "a", kernel_shape=[1]),
        node("MaxPool", "x", "b i", kernel_shape=[1]),
        node("Cast", "i", "j", to=1),
        node("Sum", "a b j", "y"),
    ]
    dims = (1, 2, 3)
    model = make_model(nodes, {"x": dims}, {"y": dims})
    after = apply(ShareSubexpressions(), model)
    assert operators(after) == [n.op_type for n in nodes]


def test_a_value_that_a_subgraph_reads_is_replaced_there_too():
    from onnx import TensorProto, helper

    def branch(name):
        info = helper.make_tensor_value_info(name, TensorProto.FLOAT, DIMS)
        return helper.make_graph([node("Add", "a b", name)], name, [], [info])

    nodes = [
        node("Relu", "x", "a"),
        node("Relu", "x", "b"),
        helper.make_node("If", ["t"], ["y"], then_branch=branch("p"), else_branch=branch("q")),
    ]
    check(nodes, ["y"], ["Relu", "If"], {"t": np.array(True)})
