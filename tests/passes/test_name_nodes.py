import onnx_ir as ir
from hybridc.passes.name_nodes import NameNodes
from onnx import TensorProto, helper

from tests.models import make_model, node
from tests.passes.harness import apply


def names_after(*given):
    """Names that a chain of Relu nodes has after the pass."""
    nodes = [node("Relu", f"v{i}", f"v{i + 1}", name) for i, name in enumerate(given)]
    model = make_model(nodes, {"v0": (2,)}, {f"v{len(given)}": (2,)})
    return [n.name for n in apply(NameNodes(), model).graph]


def test_unique_names_stay():
    assert names_after("a", "b") == ["a", "b"]


def test_missing_names_come_from_the_operator():
    assert names_after("", "a", "") == ["Relu_0", "a", "Relu_1"]


def test_repeated_names_get_numbers():
    assert names_after("a", "a", "a") == ["a", "a_0", "a_1"]


def test_made_up_names_avoid_those_that_are_there():
    assert names_after("", "Relu_0", "a", "a", "a_0") == ["Relu_1", "Relu_0", "a", "a_1", "a_0"]


def test_says_whether_it_did_anything():
    model = ir.from_proto(make_model([node("Relu", "x", "y")], {"x": (2,)}, {"y": (2,)}))
    assert NameNodes()(model).modified
    assert not NameNodes()(model).modified


def test_subgraphs_are_named_too():
    def branch(operator):
        value = helper.make_tensor_value_info("r", TensorProto.FLOAT, (2,))
        return helper.make_graph([node(operator, "x", "r", "same")], operator, [], [value])

    choose = node("If", "c", "y", "same", then_branch=branch("Relu"), else_branch=branch("Neg"))
    compare = node("ReduceMax", "x", "m", keepdims=0)
    nodes = [compare, node("Cast", "m", "c", to=TensorProto.BOOL), choose]
    result = apply(NameNodes(), make_model(nodes, {"x": (2,)}, {"y": (2,)}))
    names = [n.name for n in ir.traversal.RecursiveGraphIterator(result.graph)]
    assert len(set(names)) == len(names) == 5
