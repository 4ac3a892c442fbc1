"""What cannot be proved about shapes is checked when the model runs; what is wrong is refused."""

import numpy as np
import pytest
from onnx import TensorProto, helper

from hybridc.compiler import build, load_built
from hybridc.errors import UnsupportedError, UsageError
from hybridc.frontend.read import read_model
from tests.models import make_model, node, random, run_reference, save
from tests.support import assert_close, make_options


def compiled(model, folder, *shapes):
    path = save(model, folder / "m.onnx")
    return load_built(build(read_model(path), make_options(shapes=shapes, fallback=False))[0])


def assert_right(model, loaded, **inputs):
    assert_close(loaded.run(inputs), run_reference(model, inputs))


@pytest.mark.parametrize("operator", ["Add", "Max", "Pow"])
def test_sizes_that_broadcast_at_run_time(tmp_path, operator):
    """Equal, or one of them 1; what follows goes on with the common size."""
    nodes = [node(operator, "a b", "y", "first"), node("Mul", "y a", "z", "second")]
    model = make_model(nodes, {"a": ("p", 4), "b": ("q", 4)}, {"z": (None, 4)})
    with compiled(model, tmp_path, "p=1..8", "q=1..8") as loaded:
        for p, q in ((2, 2), (1, 1), (3, 1), (1, 3)):
            assert_right(model, loaded, a=np.abs(random(p, 4)), b=random(q, 4, seed=1))
        with pytest.raises(UsageError, match=r"first \(.*\): .* differ"):
            loaded.run({"a": random(2, 4), "b": random(3, 4)})


def test_sizes_above_one_must_be_equal(tmp_path):
    nodes = [node("Max", "a b", "y", "first"), node("Mul", "y a", "z", "second")]
    model = make_model(nodes, {"a": ("p", 4), "b": ("q", 4)}, {"z": (None, 4)})
    with compiled(model, tmp_path, "p=2..8", "q=2..8") as loaded:
        assert_right(model, loaded, a=random(3, 4), b=random(3, 4, seed=1))
        with pytest.raises(UsageError, match=r"first \(Max\): sizes to broadcast: q and p differ"):
            loaded.run({"a": random(2, 4), "b": random(3, 4)})


CHECKED = [
    (node("Concat", "a b", "y", "n", axis=1), ("p", 4), ("q", 3), "sizes to put together"),
    (node("MatMul", "a b", "y", "n"), (3, "p"), ("q", 4), "inner sizes"),
    (node("MatMul", "a b", "y", "n"), (2, 3, "p"), (2, "q", 4), "inner sizes"),
]


@pytest.mark.parametrize(("single", "left", "right", "words"), CHECKED)
def test_sizes_that_must_be_equal(tmp_path, single, left, right, words):
    model = make_model([single], {"a": left, "b": right}, {"y": (None,) * len(left)})
    with compiled(model, tmp_path, "p=1..8", "q=1..8") as loaded:
        sized = [[3 if isinstance(dim, str) else dim for dim in dims] for dims in (left, right)]
        assert_right(model, loaded, a=random(*sized[0]), b=random(*sized[1]))
        other = [5 if isinstance(dim, str) else dim for dim in right]
        with pytest.raises(UsageError, match=rf"n \(.*\): {words}"):
            loaded.run({"a": random(*sized[0]), "b": random(*other)})


def test_squeezed_dimensions_are_one(tmp_path):
    single = node("Squeeze", "x axes", "y", "n")
    model = make_model([single], {"x": ("p", 4)}, {"y": (4,)}, {"axes": np.array([0])})
    with compiled(model, tmp_path, "p=1..3") as loaded:
        assert_right(model, loaded, x=random(1, 4))
        with pytest.raises(UsageError, match=r"n \(Squeeze\): .* p and 1 differ"):
            loaded.run({"x": random(2, 4)})


def test_a_kernel_larger_than_the_input(tmp_path):
    single = node("Conv", "x w", "y", "n")
    model = make_model([single], {"x": (1, 2, "h")}, {"y": (1, 3, None)}, {"w": random(3, 2, 5)})
    with compiled(model, tmp_path, "h=1..9") as loaded:
        assert_right(model, loaded, x=random(1, 2, 5))
        with pytest.raises(UsageError, match="covers 5 elements and the input has fewer"):
            loaded.run({"x": random(1, 2, 4)})
    with pytest.raises(UnsupportedError, match="a kernel over 5 elements, and 4 of them"):
        compiled(model, tmp_path, "h=4")


def test_ranges_and_steps_prove_what_fits(tmp_path):
    """Halved and doubled again: with steps of 2 no check is left that could fail."""
    nodes = [
        node("MaxPool", "x", "half", "pool", kernel_shape=[2], strides=[2]),
        node("Resize", "half - scales", "again", "resize", mode="nearest"),
        node("Add", "x again", "y", "add"),
    ]
    weights = {"scales": np.array([1, 1, 2], "f")}
    model = make_model(nodes, {"x": (1, 2, "h")}, {"y": (1, 2, "h")}, weights)
    with compiled(model, tmp_path, "h=2..20/2") as loaded:
        for size in (2, 6, 20):
            assert_right(model, loaded, x=random(1, 2, size))
    with compiled(model, tmp_path, "h=4..20") as loaded:
        assert_right(model, loaded, x=random(1, 2, 6))
        with pytest.raises(UsageError, match=r"add \(Add\): sizes to broadcast"):
            loaded.run({"x": random(1, 2, 7)})


POOLS = [
    {"kernel_shape": [2, 2], "strides": [2, 2]},
    {"kernel_shape": [3, 3], "strides": [2, 2], "ceil_mode": 1},
    {"kernel_shape": [3, 2], "strides": [3, 3], "ceil_mode": 1, "pads": [0, 1, 1, 0]},
]


@pytest.mark.parametrize("attributes", POOLS, ids=str)
@pytest.mark.parametrize("operator", ["MaxPool", "AveragePool"])
def test_pools_over_any_size(tmp_path, operator, attributes):
    """Also over inputs that are too short for one window, as ONNX Runtime counts them."""
    single = node(operator, "x", "y", "n", **attributes)
    model = make_model([single], {"x": (1, 2, "h", "w")}, {"y": (1, 2, None, None)}, opset=19)
    with compiled(model, tmp_path, "h=1..20", "w=1..20") as loaded:
        for size in ((1, 1), (1, 5), (7, 8), (20, 13), (2, 3)):
            assert_right(model, loaded, x=random(1, 2, *size))


def branch(name, nodes, output, rank):
    value = helper.make_tensor_value_info(output, TensorProto.FLOAT, [None] * rank)
    return helper.make_graph(nodes, name, [], [value])


def choosing_model(then_rank, last):
    """``If(flag): squeeze x else: x``, and a node behind it."""
    then_nodes = [node("Squeeze", "x first", "then.y", "squeeze")]
    otherwise = [node("Identity", "x", "else.y", "keep")]
    if then_rank == 2:
        then_nodes = [node("Neg", "x", "then.y", "negate")]
    choice = node(
        "If",
        "flag",
        "chosen",
        "choice",
        then_branch=branch("then", then_nodes, "then.y", then_rank),
        else_branch=branch("otherwise", otherwise, "else.y", 2),
    )
    weights = {"first": np.array([0]), "w": random(4, 4)}
    model = make_model([choice, last], {"x": ("n", 4)}, {"y": None}, weights)
    flag = helper.make_tensor_value_info("flag", TensorProto.BOOL, [])
    model.graph.input.append(flag)
    return model


def test_branches_of_different_ranks(tmp_path):
    """What follows the If is compiled once for each."""
    model = choosing_model(1, node("ReduceL2", "chosen", "y", "length", keepdims=0))
    with compiled(model, tmp_path, "n=1..3") as loaded:
        for rows, flag in ((1, False), (3, False), (1, True)):
            assert_right(model, loaded, x=random(rows, 4), flag=np.array(flag))
        with pytest.raises(UsageError, match=r"squeeze \(Squeeze\)"):
            loaded.run({"x": random(3, 4), "flag": np.array(True)})


def test_a_branch_that_no_input_can_take(tmp_path):
    """Three rows cannot be squeezed: the condition is checked and the other branch compiled."""
    model = choosing_model(1, node("MatMul", "chosen w", "y", "product"))
    with compiled(model, tmp_path, "n=3") as loaded:
        assert_right(model, loaded, x=random(3, 4), flag=np.array(False))
        with pytest.raises(UsageError, match=r"choice \(If\): this branch cannot run .* squeeze"):
            loaded.run({"x": random(3, 4), "flag": np.array(True)})


def test_branches_of_one_rank(tmp_path):
    model = choosing_model(2, node("MatMul", "chosen w", "y", "product"))
    with compiled(model, tmp_path, "n=1..3") as loaded:
        for flag in (False, True):
            assert_right(model, loaded, x=random(2, 4), flag=np.array(flag))


REDUCTIONS = [
    ("ReduceSum", {}),
    ("ReduceProd", {}),
    ("ReduceMax", {}),
    ("ReduceMin", {"keepdims": 0}),
    ("ReduceMean", {}),
    ("ReduceSumSquare", {}),
    ("ReduceL1", {}),
    ("ReduceL2", {"keepdims": 0}),
    ("ReduceLogSum", {}),
    ("ReduceLogSumExp", {"keepdims": 0}),
]


@pytest.mark.parametrize(("operator", "attributes"), REDUCTIONS, ids=str)
def test_reductions_of_what_may_be_empty(tmp_path, operator, attributes):
    """ONNX's own evaluator says what no elements reduce to; ONNX Runtime refuses some."""
    single = node(operator, "x axes", "y", "n", **attributes)
    dims = (3, None)[: 1 + attributes.get("keepdims", 1)]
    model = make_model([single], {"x": (3, "n")}, {"y": dims}, {"axes": np.array([1])}, opset=20)
    neutral = {"ReduceProd": 1, "ReduceMax": -np.inf, "ReduceMin": np.inf, "ReduceMean": np.nan}
    logarithms = {"ReduceLogSum": -np.inf, "ReduceLogSumExp": -np.inf}
    with compiled(model, tmp_path, "n=0..5") as loaded:
        assert_right(model, loaded, x=np.abs(random(3, 5)))
        (empty,) = loaded.run({"x": random(3, 0)}).values()
    np.testing.assert_array_equal(empty.ravel(), [{**neutral, **logarithms}.get(operator, 0)] * 3)


def test_a_product_over_nothing(tmp_path):
    model = make_model(
        [node("MatMul", "a b", "y", "n")], {"a": (3, "n"), "b": ("n", 2)}, {"y": (3, 2)}
    )
    with compiled(model, tmp_path, "n=0..5") as loaded:
        assert_right(model, loaded, a=random(3, 4), b=random(4, 2))
        (empty,) = loaded.run({"a": random(3, 0), "b": random(0, 2)}).values()
    np.testing.assert_array_equal(empty, np.zeros((3, 2)))


def test_nan_is_true(tmp_path):
    nodes = [node("Cast", "x", "flag", "n", to=TensorProto.BOOL), node("Cast", "flag", "y", to=1)]
    model = make_model(nodes, {"x": ("n",)}, {"y": ("n",)})
    with compiled(model, tmp_path, "n=1..9") as loaded:
        x = np.array([np.nan, 0, -0.0, 1, -np.inf], "f")
        assert_right(model, loaded, x=x)
