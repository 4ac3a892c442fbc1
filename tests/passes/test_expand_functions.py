import pytest
from hybridc.passes.expand_functions import ExpandFunctions
from onnx.shape_inference import infer_shapes

from tests.models import make_model, node, random
from tests.passes.harness import apply, assert_same_results, operators


def lowers_all_but(*operators):
    return lambda _domain, operator, _opset: operator not in operators


def function_model():
    nodes = [node("Softplus", "x", "s", "soft"), node("Mul", "s w", "y", "scale")]
    return make_model(nodes, {"x": (2, 3)}, {"y": (2, 3)}, {"w": random(3)}, opset=18)


def elu_model():
    return make_model([node("Elu", "x", "y", "elu")], {"x": (2, 3)}, {"y": (2, 3)}, opset=18)


def test_an_operator_without_a_converter_becomes_its_body():
    after = apply(ExpandFunctions(lowers_all_but("Softplus")), function_model())
    assert "Softplus" not in operators(after)
    assert len(operators(after)) > 2
    assert_same_results(function_model(), after, {"x": random(2, 3)})


def test_weights_stay_weights():
    after = apply(ExpandFunctions(lowers_all_but("Softplus")), function_model())
    assert [value.name for value in after.graph.inputs] == ["x"]
    assert set(after.graph.initializers) >= {"w"}


@pytest.mark.parametrize("missing", [(), ("Gelu",), ("Mul",)])
def test_what_has_a_converter_or_no_body_stays(missing):
    after = apply(ExpandFunctions(lowers_all_but(*missing)), function_model())
    assert operators(after) == ["Softplus", "Mul"]


def test_bodies_inside_bodies():
    """A body may use operators that are functions too; they are expanded in turn."""
    model = infer_shapes(elu_model())
    after = apply(ExpandFunctions(lowers_all_but("Elu", "CastLike")), model)
    assert not {"Elu", "CastLike"} & set(operators(after))
    assert_same_results(model, after, {"x": random(2, 3)})


@pytest.mark.parametrize("attributes", [{}, {"axes": [1, 2]}])
def test_attributes_that_are_left_out_have_their_defaults(attributes):
    nodes = [node("MeanVarianceNormalization", "x", "y", "mvn", **attributes)]
    dims = {"x": (1, 2, 4, 4)}
    model = infer_shapes(make_model(nodes, dims, {"y": (1, 2, 4, 4)}, opset=18))
    after = apply(ExpandFunctions(lowers_all_but("MeanVarianceNormalization")), model)
    assert "MeanVarianceNormalization" not in operators(after)
    assert_same_results(model, after, {"x": random(1, 2, 4, 4)})
