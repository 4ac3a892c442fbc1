import numpy as np
import onnx_ir as ir
import pytest
from hybridc.passes.move_transposes import MoveTransposes
from onnx.shape_inference import infer_shapes

from tests.models import make_model, node, random
from tests.passes.harness import apply, assert_same_results, operators

DIMS = (2, 3, 4, 5)
LAST, FIRST = [0, 2, 3, 1], [0, 3, 1, 2]
WEIGHTS = {
    "channel": random(3, seed=1),
    "pixel": random(4, 1, 3, seed=2),
    "number": np.array(0.5, "f"),
    "slope": random(1, 1, 3, seed=3),
    "pads": np.array([0, 1, 2, 3, 0, 0, 0, 1]),
    "starts": np.array([1, 0]),
    "ends": np.array([3, -1]),
    "axes": np.array([-2, 1]),
    "steps": np.array([1, 2]),
    "1": np.array([1]),
    "2": np.array([2]),
    "3": np.array([3]),
    "parts": np.array([1, 2]),
    "flag": random(2, 4, 5, 3, seed=4) > 0,
    "bound": np.array(0.1, "f"),
    "w": random(3, 3, 3, 3, seed=5),
    "rest": random(2, 4, 5, 2, seed=6),
    "columns": random(3, 2, seed=7),
    "t": np.array(True),
    "flat": np.array([2, 60]),
    "none": np.zeros(0, "f"),
    "scales": np.array([1, 2, 3, 1], "f"),
    "sizes": np.array([2, 7, 10, 3]),
    "split_axis": np.array([2, 1, 4, 5, 3]),
}


def model_of(nodes, outputs=("y",), dims=DIMS, opset=17):
    read = {name for n in nodes for name in n.input}
    weights = {name: array for name, array in WEIGHTS.items() if name in read}
    shapes = dict.fromkeys(outputs, (None,) * 4)
    model = infer_shapes(make_model(nodes, {"x": dims}, shapes, weights, opset=opset))
    for output in model.graph.output:
        output.type.tensor_type.ClearField("shape")
    return infer_shapes(model)


def check(nodes, expected, outputs=("y",), dims=DIMS, opset=17):
    """Compare the operators after the pass, and ONNX Runtime's results."""
    model = model_of(nodes, outputs, dims, opset)
    after = apply(MoveTransposes(), model)
    assert operators(after) == expected.split()
    assert_same_results(model, after, {"x": random(*dims)})
    return after


def between(*nodes, back=FIRST):
    """Nodes from ``a`` to ``b`` between two transpositions."""
    return [
        node("Transpose", "x", "a", perm=LAST),
        *nodes,
        node("Transpose", "b", "y", perm=back),
    ]


CARRIED = {
    "activation": [node("Relu", "a", "b")],
    "channel": [node("Mul", "channel a", "b")],
    "pixel": [node("Add", "a pixel", "b")],
    "number": [node("Sub", "number a", "b")],
    "slope": [node("PRelu", "a slope", "b")],
    "choice": [node("Where", "flag a number", "b")],
    "bounds": [node("Clip", "a - bound", "b")],
    "cast": [node("Cast", "a", "i", to=6), node("Cast", "i", "b", to=1)],
    "softmax": [node("Softmax", "a", "b", axis=-1)],
    "concat": [node("Neg", "a", "n"), node("Concat", "a n rest", "b", axis=3)],
    "pad": [node("Pad", "a pads", "b")],
    "resize": [node("Resize", "a none scales", "b", mode="nearest")],
    "resize to sizes": [node("Resize", "a - - sizes", "b", mode="linear")],
    "slice": [node("Slice", "a starts ends axes", "b")],
    "slice with steps": [node("Slice", "a starts ends axes steps", "b")],
    "mean": [node("ReduceMean", "a", "b", axes=[1, -1])],
    "sum": [node("ReduceSum", "a 3", "b")],
    "maximum of all": [node("ReduceMax", "a", "m"), node("Sub", "a m", "b")],
    "split": [node("Split", "a parts", "c d", axis=3), node("Concat", "d c", "b", axis=-1)],
    "gate": [
        node("ReduceMean", "a", "m", axes=[1, 2]),
        node("Sigmoid", "m", "s"),
        node("Mul", "a s", "b"),
    ],
    "axes added and removed": [
        node("Unsqueeze", "a 1", "u"),
        node("Neg", "u", "n"),
        node("Squeeze", "n 1", "b"),
    ],
    "reduced axes put back": [
        node("ReduceMax", "a", "m", axes=[2], keepdims=0),
        node("Exp", "m", "e"),
        node("Unsqueeze", "e 2", "u"),
        node("Sub", "a u", "b"),
    ],
}


@pytest.mark.parametrize("name", CARRIED)
def test_transpositions_cancel(name):
    nodes = CARRIED[name]
    kinds = [n.op_type.replace("Unsqueeze", "Reshape").replace("Squeeze", "Reshape") for n in nodes]
    check(between(*nodes), " ".join(kinds))


def test_a_chain_of_convolutions():
    """What an exporter makes of a model whose channels come last."""
    nodes = [
        node("Transpose", "x", "a", perm=FIRST),
        node("Conv", "a w", "b", pads=[1] * 4),
        node("Transpose", "b", "c", perm=LAST),
        node("Relu", "c", "d"),
        node("Transpose", "d", "e", perm=FIRST),
        node("Conv", "e w", "f", pads=[1] * 4),
        node("Transpose", "f", "g", perm=LAST),
        node("Add", "g d", "h"),
        node("Concat", "h c", "i", axis=3),
        node("Transpose", "i", "j", perm=FIRST),
        node("MaxPool", "j", "k", kernel_shape=[2, 2]),
        node("Transpose", "k", "y", perm=LAST),
    ]
    expected = "Transpose Conv Relu Conv Add Concat MaxPool Transpose"
    check(nodes, expected, dims=(2, 4, 5, 3))


def test_one_transposition_for_two():
    nodes = [node("Transpose", "x", "a", perm=LAST), node("Transpose", "a", "y", perm=LAST)]
    (only,) = check(nodes, "Transpose").graph
    assert only.attributes["perm"].value == (0, 3, 1, 2)


def test_none_for_two_that_cancel():
    nodes = [node("Transpose", "x", "a"), node("Transpose", "a", "b"), node("Relu", "b", "y")]
    check(nodes, "Relu")


def test_an_output_that_is_an_input_is_copied():
    check([node("Transpose", "x", "a"), node("Transpose", "a", "y")], "Transpose Transpose")


def test_axes_of_one_element_are_reshaped():
    check([node("Transpose", "x", "y", perm=FIRST)], "Reshape", dims=(2, 4, 5, 1))
    check([node("Transpose", "x", "y", perm=[1, 0, 2, 3])], "Reshape", dims=(2, 1, 4, 5))


def test_the_smaller_tensor_is_transposed():
    nodes = [
        node("Transpose", "x", "a", perm=LAST),
        node("Neg", "a", "b"),
        node("ReduceMax", "b", "y", axes=[1, 2]),
    ]
    check(nodes, "Neg ReduceMax Reshape")
    nodes[-1] = node("Concat", "b b", "y", axis=0)
    check(nodes, "Transpose Neg Concat")


def test_what_saves_nothing_stays():
    nodes = [node("Relu", "x", "a"), node("Transpose", "a", "y", perm=LAST)]
    check(nodes, "Relu Transpose")
    nodes = [node("Transpose", "x", "a", perm=LAST), node("Relu", "a", "y")]
    check(nodes, "Transpose Relu")


def test_a_value_that_is_read_in_both_orders():
    nodes = [*between(node("Relu", "a", "b")), node("MatMul", "b columns", "z")]
    check(nodes, "Relu Transpose MatMul", ["y", "z"])


def test_an_output_in_the_middle_keeps_its_order():
    nodes = [*between(node("Relu", "a", "b"), node("Neg", "b", "c"))[:-1]]
    nodes += [node("Transpose", "c", "y", perm=FIRST)]
    model = model_of(nodes, ["y", "b"])
    after = apply(MoveTransposes(), model)
    assert_same_results(model, after, {"x": random(*DIMS)})
    assert operators(after).count("Transpose") == 1


def test_axes_with_a_fixed_meaning_stop_it():
    flattened = between(node("Softmax", "a", "b", axis=2))
    check(flattened, "Transpose Softmax Transpose", opset=12)
    product = between(node("MatMul", "a a", "b"))
    check(product, "Transpose MatMul Transpose", dims=(1, 4, 4, 4))
    nodes = [node("Transpose", "x", "a", perm=LAST), node("Reshape", "a flat", "b")]
    model = model_of(nodes, ["b"])
    assert not MoveTransposes()(ir.from_proto(model)).modified


def test_a_subgraph_reads_the_old_order():
    from onnx import TensorProto, helper

    def branch(name):
        info = helper.make_tensor_value_info(name, TensorProto.FLOAT, None)
        return helper.make_graph([node("Neg", "b", name)], name, [], [info])

    branches = {"then_branch": branch("p"), "else_branch": branch("q")}
    choice = helper.make_node("If", ["t"], ["z"], **branches)
    check([*between(node("Relu", "a", "b")), choice], "Relu Transpose If", ["y", "z"])


def test_a_dynamic_dimension():
    nodes = between(node("Relu", "a", "c"), node("Mul", "c channel", "b"))
    weights = {"channel": WEIGHTS["channel"]}
    shapes = {"x": ("n", 3, "height", 5)}, {"y": ("n", 3, "height", 5)}
    model = infer_shapes(make_model(nodes, *shapes, weights))
    after = apply(MoveTransposes(), model)
    assert operators(after) == ["Relu", "Mul"]
    assert_same_results(model, after, {"x": random(2, 3, 7, 5)})


@pytest.mark.parametrize("block", [2, 3])
def test_depth_to_space_with_channels_last(block):
    nodes = [
        node("Transpose", "x", "a", perm=FIRST),
        node("DepthToSpace", "a", "b", blocksize=block),
        node("Transpose", "b", "y", perm=LAST),
    ]
    check(nodes, "Reshape Transpose Reshape", dims=(2, 4, 5, 2 * block * block))


def test_depth_to_space_of_the_other_order_stays():
    nodes = [
        node("Transpose", "x", "a", perm=FIRST),
        node("DepthToSpace", "a", "b", blocksize=2, mode="CRD"),
        node("Transpose", "b", "y", perm=LAST),
    ]
    check(nodes, "Transpose DepthToSpace Transpose", dims=(2, 4, 5, 8))
