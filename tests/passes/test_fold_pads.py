import numpy as np
import onnx_ir as ir
import pytest
from hybridc.passes.fold_pads import FoldPads
from onnx.shape_inference import infer_shapes

from tests.models import make_model, node, random
from tests.passes.harness import apply, assert_same_results, operators

DIMS = (1, 2, 5, 6)
WEIGHTS = {
    "w": random(3, 2, 3, 3),
    "b": random(3),
    "pads": np.array([0, 0, 1, 2, 0, 0, 0, 1]),
    "channels": np.array([0, 1, 0, 0, 0, 0, 0, 0]),
    "crop": np.array([0, 0, -1, 0, 0, 0, 0, 0]),
    "spatial": np.array([1, 0, 2, 1]),
    "axes": np.array([2, -1]),
    "one": np.array(1, "f"),
    "lowest": np.array(-np.inf, "f"),
    "line": np.array([0, 0, 3, 0, 0, 2]),
    "to_image": np.array([1, 2, 1, -1]),
    "taps": random(3, 2, 1, 3),
}


def model_of(nodes, dims=DIMS, opset=18):
    read = {name for n in nodes for name in n.input}
    weights = {name: array for name, array in WEIGHTS.items() if name in read}
    outputs = {"y": (None,) * 4}
    return infer_shapes(make_model(nodes, {"x": dims}, outputs, weights, opset=opset))


PAD = node("Pad", "x pads", "p")
CONV = node("Conv", "p w b", "y")


def check(nodes, expected, dims=DIMS, opset=18):
    model = model_of(nodes, dims, opset)
    after = apply(FoldPads(), model)
    assert operators(after) == expected
    assert_same_results(model, after, {"x": random(*dims)})


@pytest.mark.parametrize(
    "conv",
    [
        CONV,
        node("Conv", "p w", "y", pads=[1, 0, 0, 2], strides=[2, 1]),
        node("Conv", "p w", "y", auto_pad="VALID"),
    ],
    ids=["plain", "with pads", "valid"],
)
def test_convolution(conv):
    check([PAD, conv], ["Conv"])


def test_some_axes_and_several_pads():
    check([node("Pad", "x spatial - axes", "q"), node("Pad", "q pads", "p"), CONV], ["Conv"])


def test_pads_as_an_attribute():
    check([node("Pad", "x", "p", pads=[0, 0, 1, 1, 0, 0, 1, 1]), CONV], ["Conv"], opset=10)


def test_max_pool():
    pool = node("MaxPool", "p", "y", kernel_shape=[3, 3])
    check([node("Pad", "x pads lowest", "p"), pool], ["MaxPool"])


def test_average_pool():
    check([PAD, node("AveragePool", "p", "y", kernel_shape=[3, 3])], ["AveragePool"])


def test_a_reshape_between():
    nodes = [
        node("Pad", "x line", "p"),
        node("Reshape", "p to_image", "r"),
        node("Conv", "r taps", "y"),
    ]
    check(nodes, ["Reshape", "Conv"], (1, 2, 7))


def test_another_reader_keeps_the_pad():
    nodes = [PAD, node("Conv", "p w", "c"), node("ReduceMax", "p", "m"), node("Add", "c m", "y")]
    check(nodes, ["Pad", "Conv", "ReduceMax", "Add"])


NOT_FOLDED = {
    "reflection": [node("Pad", "x pads", "p", mode="reflect"), CONV],
    "ones": [node("Pad", "x pads one", "p"), CONV],
    "channels": [node("Pad", "x channels", "p"), node("Conv", "p more", "y")],
    "crop": [node("Pad", "x crop", "p"), CONV],
    "same": [PAD, node("Conv", "p w", "y", auto_pad="SAME_UPPER")],
    "maximum of zeros": [PAD, node("MaxPool", "p", "y", kernel_shape=[3, 3])],
    "larger than the kernel": [PAD, node("AveragePool", "p", "y", kernel_shape=[2, 2])],
    "pads that do not count": [
        PAD,
        node("AveragePool", "p", "y", kernel_shape=[4, 4], pads=[1, 1, 1, 1]),
    ],
}


@pytest.mark.parametrize("name", NOT_FOLDED)
def test_what_looks_alike_stays(name):
    model = model_of(NOT_FOLDED[name])
    assert not FoldPads()(ir.from_proto(model)).modified
