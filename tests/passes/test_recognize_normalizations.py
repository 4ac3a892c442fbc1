import copy

import numpy as np
import onnx_ir as ir
import pytest
from hybridc.passes.recognize_normalizations import RecognizeNormalizations
from onnx.shape_inference import infer_shapes

from tests.models import make_model, node, random
from tests.passes.harness import apply, assert_same_results, operators

DIMS = (2, 3, 4)
ROOTS = {
    "division": [node("Sqrt", "e", "r"), node("Div", "d r", "n")],
    "reciprocal": [node("Sqrt", "e", "r"), node("Reciprocal", "r", "i"), node("Mul", "i d", "n")],
    "one over": [node("Sqrt", "e", "r"), node("Div", "one r", "i"), node("Mul", "d i", "n")],
    "power": [node("Pow", "e minus_half", "i"), node("Mul", "d i", "n")],
}
SQUARES = {"power": node("Pow", "d two", "s"), "product": node("Mul", "d d", "s")}
WEIGHTS = {
    "two": np.array(2, "f"),
    "one": np.array(1, "f"),
    "minus_half": np.array(-0.5, "f"),
    "epsilon": np.array(1e-5, "f"),
    "scale": random(4, seed=1),
    "bias": random(4, seed=2),
    "all": random(3, 4, seed=3),
    "number": np.array([1.5], "f"),
    "batch": random(2, 1, 1, seed=4),
}


def layer(axes=(-1,), root="division", square="product", tail=("scale", "bias"), **options):
    """Layer normalization from its parts."""
    mean = node("ReduceMean", "x", "m", axes=list(axes), **options)
    variance = node("ReduceMean", "s", "v", axes=list(axes), **options)
    nodes = [mean, node("Sub", "x m", "d"), SQUARES[square], variance]
    return finish([*nodes, node("Add", "v epsilon", "e"), *ROOTS[root]], tail)


def root_mean(tail=("scale",), root="reciprocal"):
    """Root-mean-square normalization from its parts."""
    nodes = [
        node("Identity", "x", "d"),
        SQUARES["product"],
        node("ReduceMean", "s", "v", axes=[-1]),
        node("Add", "v epsilon", "e"),
        *ROOTS[root],
    ]
    return finish(nodes, tail, skip=1)


def finish(nodes, tail, skip=0, dims=DIMS):
    value = "n"
    for operator, operand in zip(("Mul", "Add"), tail, strict=False):
        nodes.append(node(operator, f"{value} {operand}", f"{value}_"))
        value += "_"
    nodes = [copy.deepcopy(each) for each in nodes[skip:]]
    nodes[-1].output[0] = "y"
    for each in nodes if skip else ():
        each.input[:] = ["x" if name == "d" else name for name in each.input]
    read = {name for each in nodes for name in each.input}
    weights = {name: array for name, array in WEIGHTS.items() if name in read}
    return infer_shapes(make_model(nodes, {"x": dims}, {"y": dims}, weights, opset=13))


def check(model, expected):
    after = apply(RecognizeNormalizations(), model)
    assert operators(after) == expected
    assert_same_results(model, after, {"x": random(*DIMS) + 1})
    return after


@pytest.mark.parametrize("root", ROOTS)
@pytest.mark.parametrize("square", SQUARES)
def test_layer_normalization(root, square):
    check(layer(root=root, square=square), ["LayerNormalization"])


@pytest.mark.parametrize(
    "tail", [(), ("scale",), ("number", "number"), ("all", "all"), ("scale", "number")]
)
def test_scales_and_biases(tail):
    axes = (1, 2) if "all" in tail else (-1,)
    check(layer(axes, tail=tail), ["LayerNormalization"])


def test_scales_outside_of_the_normalized_axes_stay():
    check(layer(tail=("batch",)), ["LayerNormalization", "Mul"])
    check(layer(tail=("all", "scale")), ["LayerNormalization", "Mul", "Add"])


@pytest.mark.parametrize("root", ROOTS)
def test_root_mean_square_normalization(root):
    after = check(root_mean(root=root), ["RMSNormalization"])
    assert after.graph.opset_imports[""] == 23
    check(root_mean(tail=()), ["RMSNormalization"])


def changed(index, **attributes):
    model = layer()
    target = model.graph.node[index]
    for attribute in list(target.attribute):
        if attribute.name in attributes:
            target.attribute.remove(attribute)
    for name, value in attributes.items():
        target.attribute.append(node("X", "", "", **{name: value}).attribute[0])
    return model


@pytest.mark.parametrize(
    "model",
    [
        layer(axes=(1,), tail=()),
        layer(axes=(0, 2), tail=()),
    ],
    ids=["inner axis", "axes apart"],
)
def test_what_looks_alike_stays(model):
    result = RecognizeNormalizations()(ir.from_proto(model))
    assert not result.modified
    assert operators(result.model) == [n.op_type for n in model.graph.node]


@pytest.mark.parametrize("index", [0, 3])
def test_a_mean_and_a_variance_over_different_axes(index):
    """What is left is a root-mean-square normalization of the deviations."""
    check(changed(index, axes=[1, 2]), ["ReduceMean", "Sub", "RMSNormalization", "Add"])


def test_other_deviations_stay():
    model = layer()
    model.graph.node[2].input[:] = ["x", "x"]
    assert not RecognizeNormalizations()(ir.from_proto(model)).modified


def test_a_model_that_cannot_be_raised_stays():
    model = layer()
    model.graph.node.insert(0, node("Dropout", "x", "dropped"))
    model.opset_import[0].version = 11
    assert not RecognizeNormalizations()(ir.from_proto(model)).modified
