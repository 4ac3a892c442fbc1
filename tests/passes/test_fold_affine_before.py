import numpy as np
import onnx_ir as ir
import pytest
from hybridc.passes.fold_affine_before import FoldAffineBefore
from onnx.shape_inference import infer_shapes

from tests.models import make_model, node, random
from tests.passes.harness import apply, assert_same_results, operators

ANCHORS = {
    "Conv": (node("Conv", "a w", "y"), (1, 4, 5, 5), (6, 4, 3, 3)),
    "Conv with bias": (node("Conv", "a w b", "y", strides=[2, 2]), (1, 4, 5, 5), (6, 4, 3, 3)),
    "grouped Conv": (node("Conv", "a w", "y", group=2), (1, 4, 5, 5), (6, 2, 3, 3)),
    "depthwise Conv": (node("Conv", "a w b", "y", group=4), (1, 4, 5), (8, 1, 3)),
    "Gemm": (node("Gemm", "a w b", "y", alpha=0.5), (3, 4), (4, 6)),
    "Gemm transposed": (node("Gemm", "a w", "y", transB=1), (3, 4), (6, 4)),
}
READERS = {
    "scale": [("Mul", "v channel")],
    "number": [("Mul", "one v")],
    "shift": [("Add", "channel v")],
    "difference": [("Sub", "one v")],
    "chain": [("Div", "v channel"), ("Add", "v other"), ("Mul", "v one")],
    "normalization": [("BatchNormalization", "v s t m d")],
}


def model_of(anchor, readers, opset=17):
    last, dims, filters = anchor
    nodes, value = [], "x"
    for number, (operator, inputs) in enumerate(readers):
        result = "a" if number == len(readers) - 1 else f"a{number}"
        names = " ".join(value if name == "v" else name for name in inputs.split())
        nodes.append(node(operator, names, result))
        value = result
    spread = (4,) if len(dims) == 2 else (4, *(1,) * (len(dims) - 2))
    outputs = filters[1] if last.op_type == "Gemm" and not last.attribute else filters[0]
    outputs = 8 if filters[0] == 8 else 6
    weights = {
        "w": random(*filters),
        "b": random(outputs, seed=1),
        "channel": random(*spread, seed=2) + 3,
        "other": random(*spread, seed=3),
        "one": np.array(1.5, "f"),
        **{name: np.abs(random(4, seed=i)) + 0.1 for i, name in enumerate("stmd")},
    }
    shapes = {"y": (None,) * len(dims)}
    return infer_shapes(make_model([*nodes, last], {"x": dims}, shapes, weights, opset=opset))


def check(model, expected):
    after = apply(FoldAffineBefore(), model)
    assert operators(after) == expected
    dims = [dim.dim_value for dim in model.graph.input[0].type.tensor_type.shape.dim]
    assert_same_results(model, after, {"x": random(*dims)})


@pytest.mark.parametrize("anchor", ANCHORS)
@pytest.mark.parametrize("reader", READERS)
def test_what_folds(anchor, reader):
    check(model_of(ANCHORS[anchor], READERS[reader]), [ANCHORS[anchor][0].op_type])


def padded(**options):
    return (node("Conv", "a w b", "y", **options), (1, 4, 5, 5), (6, 4, 3, 3))


def test_only_scales_go_into_a_padded_convolution():
    check(model_of(padded(pads=[1, 1, 1, 1]), READERS["scale"]), ["Conv"])
    check(model_of(padded(pads=[1, 1, 1, 1]), READERS["shift"]), ["Add", "Conv"])
    check(model_of(padded(auto_pad="SAME_UPPER"), READERS["shift"]), ["Add", "Conv"])


@pytest.mark.parametrize("reader", [("Mul", "v v"), ("Div", "one v"), ("Relu", "v")])
def test_what_looks_alike_stays(reader):
    model = model_of(ANCHORS["Conv"], [reader])
    assert not FoldAffineBefore()(ir.from_proto(model)).modified


def test_what_others_read_stays():
    model = model_of(ANCHORS["Conv"], READERS["scale"])
    model.graph.output.add().CopyFrom(model.graph.value_info[0])
    assert not FoldAffineBefore()(ir.from_proto(model)).modified
