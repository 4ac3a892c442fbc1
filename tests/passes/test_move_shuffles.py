import numpy as np
import pytest
from hybridc.passes.move_shuffles import MoveShuffles
from onnx.shape_inference import infer_shapes

from tests.models import make_model, node, random
from tests.passes.harness import apply, assert_same_results, operators

MOVED = ["Conv", "Reshape", "Transpose", "Reshape"]
KEPT = ["Reshape", "Transpose", "Reshape", "Conv"]


def shuffle(order=(0, 2, 1, 3, 4)):
    return [
        node("Reshape", "x split", "s"),
        node("Transpose", "s", "t", perm=list(order)),
        node("Reshape", "t joined", "u"),
    ]


def model_of(nodes, dims=(2, 6, 5, 4), parts=2, filters=6, weights=None, joined=None, channels=1):
    size = dims[1]
    known = {
        "split": np.array([0, parts, size // parts, *dims[2:]]),
        "joined": np.array(joined or [0, size, *dims[2:]]),
        "w": random(filters, channels, 3, 2),
        "b": random(filters),
        **(weights or {}),
    }
    read = {name for n in nodes for name in n.input}
    known = {name: array for name, array in known.items() if name in read}
    outputs = {name: (None,) * 4 for n in nodes[3:] for name in n.output if name in "yz"}
    return infer_shapes(make_model(nodes, {"x": dims}, outputs, known, opset=18))


def check(model, expected, dims=(2, 6, 5, 4)):
    after = apply(MoveShuffles(), model)
    assert operators(after) == expected
    assert_same_results(model, after, {"x": random(*dims)})


@pytest.mark.parametrize("parts", [2, 3])
@pytest.mark.parametrize("inputs", ["u w", "u w b"])
def test_moves_behind_a_depthwise_convolution(parts, inputs):
    conv = node("Conv", inputs, "y", group=6, strides=[2, 1], pads=[1, 0, 0, 1])
    check(model_of([*shuffle(), conv], parts=parts), MOVED)


@pytest.mark.parametrize("parts", [2, 3])
def test_dense_convolutions_take_it_in(parts):
    conv = node("Conv", "u w b", "y", strides=[2, 1], pads=[1, 0, 0, 1])
    check(model_of([*shuffle(), conv], parts=parts, filters=5, channels=6), ["Conv"])


def test_number_of_images_may_be_open():
    conv = node("Conv", "u w", "y", group=6)
    model = model_of([*shuffle(), conv], dims=("n", 6, 5, 4))
    check(model, MOVED)


@pytest.mark.parametrize(
    ("conv", "changes"),
    [
        (node("Conv", "u w", "y", group=2), {"channels": 3}),
        (node("Conv", "u w", "y", group=6), {"filters": 12}),
    ],
    ids=["grouped", "several filters each"],
)
def test_other_convolutions_keep_it_in_front(conv, changes):
    check(model_of([*shuffle(), conv], **changes), KEPT)


@pytest.mark.parametrize(
    ("order", "joined"),
    [((0, 1, 2, 3, 4), None), ((0, 2, 1, 4, 3), [0, 6, 4, 5]), ((0, 1, 2, 4, 3), [0, 6, 5, 4])],
    ids=["no exchange", "turned plane", "mixed plane"],
)
def test_other_movement_stays(order, joined):
    conv = node("Conv", "u w", "y", group=6)
    check(model_of([*shuffle(order), conv], joined=joined), KEPT)


def test_stays_where_another_reads_it():
    nodes = [*shuffle(), node("Conv", "u w", "y", group=6), node("Neg", "u", "z")]
    check(model_of(nodes), [*KEPT, "Neg"])
