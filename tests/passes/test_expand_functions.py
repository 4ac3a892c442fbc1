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


@pytest.mark.parametrize("causal", [0, 1])
@pytest.mark.parametrize("names", ["q k v - pk pv", "q k v mask pk pv", "q k v"])
def test_inputs_that_are_left_out(names, causal):
    """Its body depends on the types of the inputs, those left out too."""
    sizes = {"q": 3, "k": 3, "v": 3, "pk": 2, "pv": 2}
    dims = {name: (2, 4, size, 8) for name, size in sizes.items()}
    dims["mask"] = (3, 5)
    dims = {name: dims[name] for name in names.split() if name != "-"}
    results = {"y": (2, 4, 3, 8)}
    if "pk" in dims:
        results |= {"k2": (2, 4, 5, 8), "v2": (2, 4, 5, 8)}
    nodes = [node("Attention", names, " ".join(results), "attention", is_causal=causal)]
    model = infer_shapes(make_model(nodes, dims, results, opset=23))
    after = apply(ExpandFunctions(lowers_all_but("Attention")), model)
    assert "Attention" not in operators(after)
    inputs = {name: random(*shape, seed=i) for i, (name, shape) in enumerate(dims.items())}
    assert_same_results(model, after, inputs)
