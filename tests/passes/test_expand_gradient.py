"""Gradients beside differences of the function itself."""

import numpy as np
import pytest
from onnx import helper

from hybridc import onnx_backend
from hybridc.errors import UnsupportedError
from tests.models import node


def model_of(nodes, shape=(), opset=17, **attributes):
    """A model of the scalars a and b, with the value z and its derivatives."""
    attributes = {"xs": ["a", "b"], "y": "z"} | attributes
    gradient = helper.make_node(
        "Gradient", ["a", "b"], ["za", "zb"], "gradient", None, "ai.onnx.preview.training",
        **attributes,
    )  # fmt: skip
    inputs = [helper.make_tensor_value_info(name, 1, shape) for name in "ab"]
    outputs = [helper.make_tensor_value_info(name, 1, shape) for name in ("z", "za", "zb")]
    graph = helper.make_graph([*nodes, gradient], "g", inputs, outputs)
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid("ai.onnx.preview.training", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8)


FUNCTIONS = {
    "a tanh(b) / sigmoid(a - b)": (
        ["Tanh b t", "Mul a,t m", "Sub a,b s", "Sigmoid s g", "Div m,g z"],
        lambda a, b: a * np.tanh(b) * (1 + np.exp(b - a)),
    ),
    "log(a) + sqrt(b) exp(-a)": (
        ["Log a l", "Sqrt b r", "Neg a n", "Exp n e", "Mul r,e m", "Add l,m z"],
        lambda a, b: np.log(a) + np.sqrt(b) * np.exp(-a),
    ),
    "sin(a b) cos(a b) + b": (
        ["Mul a,b p", "Identity p q", "Sin p s", "Cos q c", "Mul s,c m", "Add m,b z"],
        lambda a, b: np.sin(a * b) * np.cos(a * b) + b,
    ),
}


def nodes_of(texts):
    parts = [text.split(" ") for text in texts]
    return [node(kind, inputs.replace(",", " "), output) for kind, inputs, output in parts]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_derivatives(name):
    texts, function = FUNCTIONS[name]
    compiled = onnx_backend.prepare(model_of(nodes_of(texts)), fallback=False)
    a, b, step = 0.7, 1.3, 1e-5
    results = compiled.run([np.float32(a), np.float32(b)])
    expected = [
        function(a, b),
        (function(a + step, b) - function(a - step, b)) / (2 * step),
        (function(a, b + step) - function(a, b - step)) / (2 * step),
    ]
    np.testing.assert_allclose(np.array(results, np.float64), expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (model_of(nodes_of(["Pow a,b z"])), "an operator without a rule"),
        (model_of(nodes_of(["Mul a,b z"]), shape=(3,)), "no scalar"),
        (model_of(nodes_of(["Exp a z"])), "no path from one of the variables"),
        (model_of(nodes_of(["Mul a,b z"]), y="none"), "no such value"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_stays_is_refused(model, why):
    with pytest.raises(UnsupportedError, match="Gradient"):
        onnx_backend.prepare(model, fallback=False)


def test_a_branch_that_looks_at_a_variable_is_no_constant():
    def branch(operator):
        output = [helper.make_tensor_value_info("r", 1, ())]
        return helper.make_graph([node(operator, "a", "r")], "branch", [], output)

    choice = node("If", "c", "k", then_branch=branch("Neg"), else_branch=branch("Exp"))
    model = model_of([node("Less", "a b", "c"), choice, *nodes_of(["Mul k,b m", "Mul m,a z"])])
    with pytest.raises(UnsupportedError, match="Gradient"):
        onnx_backend.prepare(model, fallback=False)
