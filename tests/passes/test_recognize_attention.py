import numpy as np
import onnx_ir as ir
import pytest
from hybridc.passes.move_transposes import MoveTransposes
from hybridc.passes.recognize_attention import RecognizeAttention
from onnx.shape_inference import infer_shapes

from tests.models import make_model, node, random
from tests.passes.harness import apply, assert_same_results, operators

BATCH, HEADS, QUERIES, KEYS, SIZE, WIDTH = 2, 3, 4, 5, 6, 7
SHAPES = {
    "q": (BATCH, HEADS, QUERIES, SIZE),
    "k": (BATCH, HEADS, SIZE, KEYS),
    "v": (BATCH, HEADS, KEYS, WIDTH),
}
SCORES = [node("MatMul", "q k", "s"), node("Softmax", "s", "p", axis=-1)]
VALUES = [node("MatMul", "p v", "y")]
WEIGHTS = {
    "two": np.array([2], "f"),
    "half": np.array(0.5, "f"),
    "zero": np.array(0, "f"),
    "lowest": np.array(np.finfo("f").min, "f"),
    "infinite": np.array(-np.inf, "f"),
    "slight": np.array(-10000, "f"),
    "vector": random(KEYS, seed=9),
    "mask": random(BATCH, 1, QUERIES, KEYS, seed=1),
    "padding": random(BATCH, 1, 1, KEYS, seed=2),
    "nothing": np.full((BATCH, 1, QUERIES, KEYS), -np.inf, "f"),
    "row": random(KEYS, seed=3),
    "large": random(BATCH, HEADS, QUERIES, 1, seed=4),
    "seen": random(1, 1, QUERIES, KEYS, seed=5) > 0,
    "causal": np.tril(np.ones((QUERIES, KEYS), bool)),
}


def model_of(nodes, shapes=SHAPES, opset=13):
    read = {name for n in nodes for name in n.input}
    weights = {name: array for name, array in WEIGHTS.items() if name in read}
    result = (*shapes["q"][:-1], shapes["v"][-1])
    return infer_shapes(make_model(nodes, shapes, {"y": result}, weights, opset=opset))


def check(nodes, expected=("MultiHeadAttention",), shapes=SHAPES, opset=13):
    model = model_of(nodes, shapes, opset)
    after = apply(RecognizeAttention(), model)
    kinds = [kind for kind in operators(after) if kind not in ("Transpose", "Reshape")]
    assert kinds == list(expected)
    inputs = {name: random(*dims, seed=i) for i, (name, dims) in enumerate(shapes.items())}
    assert_same_results(model, after, inputs)
    return after


@pytest.mark.parametrize("opset", [11, 13, 20])
def test_plain(opset):
    check([*SCORES, *VALUES], opset=opset)


def test_scales_are_multiplied():
    nodes = [
        node("Mul", "q two", "qs"),
        node("Div", "k half", "ks"),
        node("MatMul", "qs ks", "s"),
        node("Div", "s two", "t"),
        node("Softmax", "t", "p"),
    ]
    after = check([*nodes, *VALUES])
    (attention,) = [n for n in after.graph if n.op_type == "MultiHeadAttention"]
    assert attention.attributes["scale"].value == pytest.approx(2)


@pytest.mark.parametrize("mask", ["mask", "padding", "row"])
@pytest.mark.parametrize("first", [True, False])
def test_masks_that_are_added(mask, first):
    add = node("Add", f"s {mask}" if first else f"{mask} s", "t")
    nodes = [SCORES[0], add, node("Softmax", "t", "p"), *VALUES]
    expected = ["MultiHeadAttention"] if mask == "mask" else ["Expand", "MultiHeadAttention"]
    check(nodes, expected)


@pytest.mark.parametrize("hidden", ["lowest", "infinite"])
@pytest.mark.parametrize("mask", ["seen", "causal"])
def test_masks_that_choose(hidden, mask):
    where = node("Where", f"{mask} s {hidden}", "t")
    check([SCORES[0], where, node("Softmax", "t", "p"), *VALUES], ["Where", "MultiHeadAttention"])


def test_a_guard_against_hidden_rows_moves_behind():
    nodes = [
        SCORES[0],
        node("Add", "s nothing", "t"),
        node("Softmax", "t", "w"),
        node("IsNaN", "w", "n"),
        node("Where", "n zero w", "p"),
    ]
    check([*nodes, *VALUES], ["MultiHeadAttention", "IsNaN", "Where"])


def test_without_heads():
    shapes = {name: (BATCH, *dims[2:]) for name, dims in SHAPES.items()}
    check([*SCORES, *VALUES], shapes=shapes)


def test_heads_split_off_by_reshapes_leave_no_transposes():
    nodes, shapes = [], {}
    for name in "qkv":
        size = WIDTH if name == "v" else SIZE
        shapes[name] = (BATCH, QUERIES, HEADS * size)
        nodes.append(node("Reshape", f"{name} to_{size}", f"{name}1"))
        perm = [0, 2, 3, 1] if name == "k" else [0, 2, 1, 3]
        nodes.append(node("Transpose", f"{name}1", f"{name}2", perm=perm))
    nodes += [
        node("MatMul", "q2 k2", "s"),
        node("Softmax", "s", "p"),
        node("MatMul", "p v2", "o"),
        node("Transpose", "o", "t", perm=[0, 2, 1, 3]),
        node("Reshape", "t joined", "y"),
    ]
    targets = {f"to_{size}": np.array([0, 0, HEADS, size]) for size in (SIZE, WIDTH)}
    targets["joined"] = np.array([0, 0, HEADS * WIDTH])
    result = (BATCH, QUERIES, HEADS * WIDTH)
    model = infer_shapes(make_model(nodes, shapes, {"y": result}, targets, opset=13))
    after = MoveTransposes()(apply(RecognizeAttention(), model)).model
    assert "Transpose" not in operators(after)
    inputs = {name: random(*dims, seed=i) for i, (name, dims) in enumerate(shapes.items())}
    assert_same_results(model, after, inputs)


def through(line):
    """Attention with another node between the scores and the softmax."""
    return [SCORES[0], line, node("Softmax", "t", "p"), *VALUES]


NOT_ATTENTION = {
    "softmax over queries": [SCORES[0], node("Softmax", "s", "p", axis=2), *VALUES],
    "scale of a vector": through(node("Mul", "s vector", "t")),
    "slightly hidden": through(node("Where", "seen s slight", "t")),
    "reversed choice": through(node("Where", "seen infinite s", "t")),
    "scores read twice": [
        *SCORES,
        node("MatMul", "p v", "o"),
        node("ReduceSum", "s", "r"),
        node("Add", "o r", "y"),
    ],
}


@pytest.mark.parametrize("name", NOT_ATTENTION)
def test_what_looks_alike_stays(name):
    model = model_of(NOT_ATTENTION[name])
    result = RecognizeAttention()(ir.from_proto(model))
    assert not result.modified
    assert operators(result.model) == [n.op_type for n in model.graph.node]


def test_a_mask_that_makes_the_scores_larger_stays():
    shapes = {**SHAPES, "k": (BATCH, HEADS, SIZE, 1)}
    nodes = [SCORES[0], node("Add", "s row", "t"), node("Softmax", "t", "p"), *VALUES]
    assert not RecognizeAttention()(ir.from_proto(model_of(nodes, shapes))).modified


def test_heads_that_broadcast_stay():
    shapes = {**SHAPES, "k": (BATCH, 1, SIZE, KEYS)}
    assert not RecognizeAttention()(ir.from_proto(model_of([*SCORES, *VALUES], shapes))).modified
