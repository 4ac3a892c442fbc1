from math import pi, sqrt

import numpy as np
import onnx_ir as ir
import pytest
from hybridc.passes.recognize_activations import RecognizeActivations
from onnx.shape_inference import infer_shapes

from tests.models import make_model, node, random
from tests.passes.harness import apply, assert_same_results, operators

DIMS = (2, 3, 4)
NUMBERS = {
    "half": 0.5,
    "one": 1,
    "two": 2,
    "three": 3,
    "six": 6,
    "sixth": 1 / 6,
    "zero": 0,
    "root": sqrt(2),
    "inverse": sqrt(0.5),
    "cubic": 0.044715,
    "outer": sqrt(2 / pi),
    "slope": 1.702,
}


def model_of(lines, opset=17, dtype="float32", dims=DIMS, changed=None):
    """A model of lines such as ``b = Mul a half``; the last one computes ``y``."""
    nodes = []
    for line in lines:
        output, _, right = line.partition(" = ")
        operator, *rest = right.split()
        attributes = {k: float(v) for k, v in (e.split("=") for e in rest if "=" in e)}
        inputs = " ".join(e for e in rest if "=" not in e)
        nodes.append(node(operator, inputs, output, **attributes))
    read = {name for n in nodes for name in n.input}
    numbers = NUMBERS | (changed or {})
    weights = {k: np.array(v, dtype) for k, v in numbers.items() if k in read}
    rank = max((array.ndim for array in weights.values()), default=0)
    result = (1,) * (rank - len(dims)) + dims
    model = make_model(nodes, {"x": dims}, {"y": result}, weights, opset=opset, dtype=dtype)
    return infer_shapes(model)


GELU = ["a = Div x root", "b = Erf a", "c = Add b one", "d = Mul x c", "y = Mul d half"]
TANH = [
    "a = Pow x three",
    "b = Mul cubic a",
    "c = Add x b",
    "d = Mul c outer",
    "e = Tanh d",
    "f = Add one e",
    "g = Mul half f",
    "y = Mul x g",
]
FORMS = {
    "gelu": (GELU, "Gelu"),
    "gelu, half first": (
        ["a = Mul x half", "b = Mul x inverse", "c = Erf b", "d = Add one c", "y = Mul a d"],
        "Gelu",
    ),
    "gelu, half on the sum": (
        ["b = Mul inverse x", "c = Erf b", "d = Add one c", "e = Mul half d", "y = Mul e x"],
        "Gelu",
    ),
    "gelu, divided by two": ([*GELU[:-1], "y = Div d two"], "Gelu"),
    "gelu by tanh": (TANH, "Gelu"),
    "gelu by tanh, products": (
        ["p = Mul cubic x", "q = Mul x p", "b = Mul x q", *TANH[2:]],
        "Gelu",
    ),
    "gelu by tanh, factored": (
        [
            "p = Mul x x",
            "q = Mul p cubic",
            "b = Add q one",
            "c = Mul x outer",
            "d = Mul c b",
            *TANH[4:],
        ],
        "Gelu",
    ),
    "silu": (["a = Sigmoid x", "y = Mul x a"], "QuickGelu"),
    "silu, written out": (["a = Neg x", "b = Exp a", "c = Add b one", "y = Div x c"], "QuickGelu"),
    "quick gelu": (["a = Mul x slope", "b = Sigmoid a", "y = Mul b x"], "QuickGelu"),
    "hard swish": (
        ["a = Add x three", "b = Clip a zero six", "c = Mul x b", "y = Div c six"],
        "HardSwish",
    ),
    "hard swish, gate first": (
        ["a = Add x three", "b = Clip a zero six", "c = Mul b sixth", "y = Mul x c"],
        "HardSwish",
    ),
    "hard swish by bounds": (
        ["a = Add three x", "b = Max a zero", "c = Min six b", "d = Mul c x", "y = Div d six"],
        "HardSwish",
    ),
    "hard swish of a gate": (
        ["a = HardSigmoid x alpha=0.16666667 beta=0.5", "y = Mul a x"],
        "HardSwish",
    ),
    "hard sigmoid": (["a = Add x three", "b = Clip a zero six", "y = Div b six"], "HardSigmoid"),
    "hard sigmoid of a line": (
        ["a = Mul x slope", "b = Add a half", "y = Clip b zero one"],
        "HardSigmoid",
    ),
}


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("opset", [11, 17, 20])
def test_forms(name, opset):
    lines, expected = FORMS[name]
    model = model_of(lines, opset)
    after = apply(RecognizeActivations(), model)
    assert operators(after) == [expected]
    assert_same_results(model, after, {"x": 3 * random(*DIMS)})


def test_double_precision():
    model = model_of(TANH, 17, "float64")
    after = apply(RecognizeActivations(), model)
    assert operators(after) == ["Gelu"]
    assert_same_results(model, after, {"x": 3 * random(*DIMS, dtype="float64")})


@pytest.mark.parametrize("name", ["hard swish", "hard sigmoid", "silu", "quick gelu"])
def test_what_onnx_runtime_has_for_float32_only(name):
    model = model_of(FORMS[name][0], 17, "float64")
    assert not RecognizeActivations()(ir.from_proto(model)).modified


def test_half_precision_constants_are_rounded():
    model = model_of(TANH, 17, "float16")
    assert operators(apply(RecognizeActivations(), model)) == ["Gelu"]


def test_hard_swish_with_bounds_as_attributes():
    lines = ["a = Add x three", "b = Clip a min=0 max=6", "c = Mul x b", "y = Div c six"]
    model = model_of(lines, opset=9)
    after = apply(RecognizeActivations(), model)
    assert operators(after) == ["HardSigmoid", "Mul"]  # this Clip cannot be raised
    assert_same_results(model, after, {"x": 3 * random(*DIMS)})


NOT_FORMS = {
    "another root": (GELU, {"root": 1.4143}),
    "another half": (GELU, {"half": 0.50001}),
    "another cubic factor": (TANH, {"cubic": 0.0447}),
    "another bound": (FORMS["hard swish"][0], {"six": 6.1}),
    "another shift": (FORMS["hard swish"][0], {"three": 3.01}),
    "another line": (FORMS["hard sigmoid"][0], {"zero": 0.5}),
    "a vector": (GELU, {"half": [0.5, 0.5, 0.5, 0.5]}),
    "more axes": (GELU, {"half": [[[[0.5]]]]}),
    "not the same operand": (["a = Sigmoid x", "b = Neg x", "y = Mul b a"], {}),
    "read twice": (["a = Sigmoid x", "b = Mul x a", "y = Add a b"], {}),
}


@pytest.mark.parametrize("name", NOT_FORMS)
def test_what_looks_alike_stays(name):
    lines, changed = NOT_FORMS[name]
    model = model_of(lines, changed=changed)
    result = RecognizeActivations()(ir.from_proto(model))
    assert not result.modified
    assert operators(result.model) == [n.op_type for n in model.graph.node]


def test_an_inner_value_that_is_an_output_stays():
    model = model_of(FORMS["silu"][0])
    model.graph.output.add().CopyFrom(model.graph.value_info[0])
    assert not RecognizeActivations()(ir.from_proto(model)).modified


def test_integers_stay():
    lines = ["a = Mul x two", "b = Add a one", "y = Clip b zero one"]
    assert not RecognizeActivations()(ir.from_proto(model_of(lines, 17, "int32"))).modified
