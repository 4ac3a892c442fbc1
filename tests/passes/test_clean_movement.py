import numpy as np
import onnx_ir as ir
import pytest
from hybridc.passes.clean_movement import CleanMovement
from onnx.shape_inference import infer_shapes

from tests.models import make_model, node, random
from tests.passes.harness import apply, assert_same_results, operators

DIMS = (2, 3, 4)
WEIGHTS = {
    "to_6_4": np.array([6, 4]),
    "to_24": np.array([-1]),
    "to_2_12": np.array([0, -1]),
    "to_2_3_4": np.array([2, 3, 4]),
    "to_2_1_4": np.array([2, 1, 4]),
    "0": np.array([0]),
    "1": np.array([1]),
    "-1": np.array([-1]),
    "scalar": np.array(1),
    "end": np.array([2**31 - 1]),
    "3": np.array([3]),
    "ones": np.array([1, 1, 1]),
    "zeros": np.array([0] * 6),
    "one": np.array(1, "f"),
    "row_of_one": np.array([[[[1]]]], "f"),
    "-inf": np.array(-np.inf, "f"),
    "inf": np.array(np.inf, "f"),
    "1_2": np.array([1, 2]),
    "-2_-1": np.array([-2, -1]),
    "0_2": np.array([0, 2]),
    "2_1": np.array([2, 1]),
    "false": np.array(False),
    "true": np.array(True),
    "ratio": np.array(0.5, "f"),
}


def model_of(nodes, result, opset=13, outputs=("y",), dims=DIMS):
    read = {name for n in nodes for name in n.input}
    weights = {name: array for name, array in WEIGHTS.items() if name in read}
    shapes = dict.fromkeys(outputs, result)
    return infer_shapes(make_model(nodes, {"x": dims}, shapes, weights, opset=opset))


def check(nodes, expected, result=DIMS, **options):
    model = model_of(nodes, result, **options)
    after = apply(CleanMovement(), model)
    assert operators(after) == expected.split()
    assert_same_results(model, after, {"x": random(*options.get("dims", DIMS))})


RELU = node("Relu", "x", "a")
NOTHING = {
    "Identity": [node("Identity", "a", "b")],
    "Dropout": [node("Dropout", "a ratio false", "b")],
    "Cast": [node("Cast", "a", "b", to=1)],
    "Expand": [node("Expand", "a to_2_1_4", "b")],
    "Tile": [node("Tile", "a ones", "b")],
    "Pad": [node("Pad", "a zeros", "b")],
    "Mul": [node("Mul", "one a", "b")],
    "Div": [node("Div", "a one", "b")],
    "Max": [node("Max", "-inf a", "b")],
    "Min": [node("Min", "a inf", "b")],
    "Concat": [node("Concat", "a", "b", axis=1)],
    "Split": [node("Split", "a", "b", axis=0)],
    "Slice": [node("Slice", "a 0 end 1", "b")],
    "Slice by size": [node("Slice", "a 0 3 1", "b")],
    "Reshape": [node("Reshape", "a to_2_3_4", "b")],
    "Reshapes": [node("Reshape", "a to_24", "c"), node("Reshape", "c to_2_3_4", "b")],
    "Unsqueeze and Squeeze": [node("Unsqueeze", "a 1", "c"), node("Squeeze", "c 1", "b")],
    "Split and Concat": [
        node("Split", "a", "c d", axis=0),
        node("Concat", "c d", "b", axis=-3),
    ],
}


@pytest.mark.parametrize("name", NOTHING)
def test_what_does_nothing_goes(name):
    check([RELU, *NOTHING[name], node("Neg", "b", "y")], "Relu Neg")


SOMETHING = {
    "Dropout in training": node("Dropout", "x ratio true", "y"),
    "Cast": [node("Cast", "x", "c", to=11), node("Cast", "c", "y", to=1)],
    "Slice backwards": node("Slice", "x -1 min 1 -1", "y"),
    "Mul that adds an axis": node("Mul", "x row_of_one", "y"),
    "Div of one": node("Div", "one x", "y"),
    "Max of another": node("Max", "x one", "y"),
    "Gather apart": node("Gather", "x 0_2", "y", axis=1),
    "Gather backwards": node("Gather", "x 2_1", "y", axis=1),
    "Reductions elsewhere": [
        node("ReduceMax", "x", "r", axes=[1], keepdims=0),
        node("Unsqueeze", "r 0", "y"),
    ],
    "Concat in another order": [
        node("Split", "x", "c d", axis=0),
        node("Concat", "d c", "y", axis=0),
    ],
    "Concat along another axis": [
        node("Split", "x", "c d", axis=0),
        node("Concat", "c d", "y", axis=1),
    ],
}


@pytest.mark.parametrize("name", SOMETHING)
def test_what_does_something_stays(name):
    WEIGHTS.setdefault("min", np.array([-(2**31)]))
    nodes = SOMETHING[name] if isinstance(SOMETHING[name], list) else [SOMETHING[name]]
    read = {each for n in nodes for each in n.input}
    weights = {key: array for key, array in WEIGHTS.items() if key in read}
    model = infer_shapes(make_model(nodes, {"x": DIMS}, {"y": (None,)}, weights, opset=13))
    result = CleanMovement()(ir.from_proto(model))
    assert operators(result.model) == [n.op_type for n in nodes]


def test_reshapes_become_one():
    nodes = [
        node("Flatten", "x", "a", axis=2),
        node("Unsqueeze", "a 0", "b"),
        node("Neg", "b", "n"),
        node("Reshape", "n to_24", "d"),
        node("Reshape", "d to_6_4", "y"),
    ]
    check(nodes, "Reshape Neg Reshape", (6, 4))


def test_a_reduction_keeps_its_axes():
    nodes = [
        node("ReduceMax", "x", "r", axes=[1], keepdims=0),
        node("Reshape", "r to_2_1_4", "y"),
    ]
    check(nodes, "ReduceMax", (2, 1, 4))


def test_a_gather_of_neighbors_is_a_slice():
    check([node("Gather", "x 1_2", "y", axis=1)], "Slice", (2, 2, 4))
    check([node("Gather", "x -2_-1", "y", axis=-1)], "Slice", (2, 3, 2))
    check([node("Gather", "x scalar", "y", axis=1)], "Slice Reshape", (2, 4))


def test_a_sum_is_made_of_additions():
    check([RELU, node("Sum", "x a", "y")], "Relu Add")
    check([RELU, node("Sum", "x a x", "y")], "Relu Add Add")


def test_a_concat_takes_in_others():
    nodes = [
        node("Concat", "x x", "a", axis=1),
        node("Concat", "x x", "b", axis=0),
        node("Neg", "b", "n"),
        node("Split", "n", "c d", axis=0),
        node("Concat", "a c a d", "y", axis=-2),
        node("Concat", "x x", "e", axis=1),
        node("Concat", "e x", "z", axis=1),
    ]
    check([nodes[5], nodes[6]], "Concat", (2, 9, 4), outputs=["z"])
    check(nodes[:5], "Concat Concat Neg Split Concat", (2, 18, 4))


def test_a_split_takes_a_concat_apart():
    nodes = [
        RELU,
        node("Neg", "x", "b"),
        node("Concat", "a b", "c", axis=1),
        node("Split", "c", "d e", axis=1),
        node("Sub", "d e", "y"),
    ]
    check(nodes, "Relu Neg Sub")


def test_an_output_that_is_an_input_is_copied():
    check([node("Identity", "x", "y")], "Identity")
    check([node("Reshape", "x to_2_3_4", "y")], "Reshape")


def test_a_dynamic_dimension():
    nodes = [
        node("Unsqueeze", "x 0", "a"),
        node("Squeeze", "a 0", "b"),
        node("Reshape", "b to_24", "c"),
        node("Reshape", "c last", "y"),
    ]
    weights = {"0": WEIGHTS["0"], "to_24": WEIGHTS["to_24"], "last": np.array([-1, 12])}
    model = infer_shapes(make_model(nodes, {"x": ("n", 3, 4)}, {"y": ("n", 12)}, weights, opset=13))
    after = apply(CleanMovement(), model)
    assert operators(after) == ["Reshape"]
    assert_same_results(model, after, {"x": random(5, 3, 4)})
