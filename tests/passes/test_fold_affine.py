import numpy as np
import onnx_ir as ir
import pytest
from hybridc.passes.fold_affine import FoldAffine
from onnx.shape_inference import infer_shapes

from tests.models import make_model, node, random
from tests.passes.harness import apply, assert_same_results, operators

CHANNELS = 4
ANCHORS = {
    "Conv": (node("Conv", "x w", "a", "n"), (1, 2, 5, 5), (CHANNELS, 2, 3, 3)),
    "Conv with bias": (node("Conv", "x w b", "a", "n"), (1, 2, 5, 5), (CHANNELS, 2, 3, 3)),
    "Conv in one dimension": (node("Conv", "x w", "a", "n"), (1, 2, 5), (CHANNELS, 2, 3)),
    "grouped Conv": (node("Conv", "x w", "a", "n", group=2), (1, 2, 5, 5), (CHANNELS, 1, 3, 3)),
    "ConvTranspose": (node("ConvTranspose", "x w b", "a", "n"), (1, 2, 5, 5), (2, CHANNELS, 3, 3)),
    "grouped ConvTranspose": (
        node("ConvTranspose", "x w", "a", "n", group=2),
        (1, 2, 5, 5),
        (2, CHANNELS // 2, 3, 3),
    ),
    "Gemm": (node("Gemm", "x w b", "a", "n", alpha=0.5), (3, 2), (2, CHANNELS)),
    "Gemm transposed": (node("Gemm", "x w", "a", "n", transB=1), (3, 2), (CHANNELS, 2)),
}
READERS = {
    "scale": ["Mul", "a channel"],
    "scale from the left": ["Mul", "channel a"],
    "one number": ["Mul", "a one"],
    "division": ["Div", "a channel"],
    "shift": ["Add", "a channel"],
    "difference": ["Sub", "a channel"],
    "difference from the left": ["Sub", "channel a"],
}


def chain(anchor, *readers):
    """An anchor and element-wise readers of it; ``channel`` is a constant for each channel."""
    first, dims, filters = ANCHORS[anchor]
    nodes, value = [first], "a"
    for i, (operator, inputs, *attributes) in enumerate(readers):
        given = " ".join(value if name == "a" else name for name in inputs.split())
        value = f"r{i}"
        nodes.append(node(operator, given, value, value, **(attributes[0] if attributes else {})))
    spread = (CHANNELS,) if anchor.startswith("Gemm") else (CHANNELS, *(1,) * (len(dims) - 2))
    weights = {
        "w": random(*filters, seed=1),
        "b": random(CHANNELS, seed=2),
        "channel": random(*spread, seed=3) + 3,
        "one": np.array(1.5, "f"),
        **{name: np.abs(random(CHANNELS, seed=i)) + 0.1 for i, name in enumerate("stmv")},
    }
    rank = len(dims)
    return infer_shapes(make_model(nodes, {"x": dims}, {value: (None,) * rank}, weights))


def check(model, expected):
    dims = [dim.dim_value for dim in model.graph.input[0].type.tensor_type.shape.dim]
    after = apply(FoldAffine(), model)
    assert operators(after) == expected
    assert_same_results(model, after, {"x": random(*dims)})


@pytest.mark.parametrize("anchor", ANCHORS)
@pytest.mark.parametrize("reader", READERS)
def test_one_reader(anchor, reader):
    check(chain(anchor, READERS[reader]), [ANCHORS[anchor][0].op_type])


@pytest.mark.parametrize("anchor", ANCHORS)
def test_a_chain(anchor):
    readers = [["Mul", "a channel"], ["Add", "a one"], ["BatchNormalization", "a s t m v"]]
    check(chain(anchor, *readers, ["Sub", "one a"]), [ANCHORS[anchor][0].op_type])


@pytest.mark.parametrize(
    "reader",
    [
        ["Relu", "a"],
        ["Mul", "a a"],
        ["Div", "channel a"],
        ["Pow", "a one"],
        ["BatchNormalization", "a s t m v", {"training_mode": 1}],
    ],
    ids=["no constant", "itself", "reciprocal", "power", "training"],
)
def test_what_does_not_fold(reader):
    model = chain("Conv", reader)
    assert operators(FoldAffine()(ir.from_proto(model)).model) == ["Conv", reader[0]]


def test_a_constant_over_pixels_does_not_fold():
    nodes = [node("Conv", "x w", "a", "n"), node("Mul", "a pixels", "y", "m")]
    weights = {"w": random(4, 2, 3, 3), "pixels": random(1, 1, 3, 3)}
    model = make_model(nodes, {"x": (1, 2, 5, 5)}, {"y": (1, 4, 3, 3)}, weights)
    check(infer_shapes(model), ["Conv", "Mul"])


@pytest.mark.parametrize("outputs", ["ya", "yz"])
def test_a_result_with_other_readers_does_not_fold(outputs):
    nodes = [
        node("Conv", "x w", "a", "n"),
        node("Mul", "a c", "y", "m"),
        node("Relu", "a", "z", "r"),
    ]
    weights = {"w": random(4, 2, 3, 3), "c": random(4, 1, 1)}
    dims = (1, 4, 3, 3)
    model = make_model(nodes, {"x": (1, 2, 5, 5)}, dict.fromkeys(outputs, dims), weights)
    check(infer_shapes(model), ["Conv", "Mul", "Relu"])


@pytest.mark.parametrize("name", ["w", "n__weight"])
def test_weights_that_others_read_stay(name):
    nodes = [
        node("Conv", f"x {name}", "a", "n"),
        node("Mul", "a c", "y", "m"),
        node("Conv", f"x {name}", "z", "other"),
    ]
    weights = {name: random(4, 2, 3, 3), "c": random(4, 1, 1)}
    outputs = {"y": (1, 4, 3, 3), "z": (1, 4, 3, 3)}
    model = make_model(nodes, {"x": (1, 2, 5, 5)}, outputs, weights)
    check(infer_shapes(model), ["Conv", "Conv"])
