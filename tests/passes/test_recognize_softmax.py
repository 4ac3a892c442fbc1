import onnx_ir as ir
import pytest
from hybridc.passes.recognize_softmax import RecognizeSoftmax
from onnx.shape_inference import infer_shapes

from tests.models import make_model, node, random
from tests.passes.harness import apply, assert_same_results, operators

DIMS = (2, 3, 4)


def softmax(axis, total=None, opset=12, **options):
    """A softmax from its parts; ``total`` is the axis of the sum if it is another."""
    total = axis if total is None else total
    nodes = [
        node("ReduceMax", "x", "m", axes=[axis], **options),
        node("Sub", "x m", "d"),
        node("Exp", "d", "e"),
        node("ReduceSum", "e", "s", axes=[total], **options),
        node("Div", "e s", "y"),
    ]
    return infer_shapes(make_model(nodes, {"x": DIMS}, {"y": DIMS}, opset=opset))


@pytest.mark.parametrize("axis", [-1, 2])
def test_the_last_axis(axis):
    model = softmax(axis)
    after = apply(RecognizeSoftmax(), model)
    assert operators(after) == ["Softmax"]
    assert_same_results(model, after, {"x": 50 * random(*DIMS)})


def test_an_inner_axis_needs_opset_13():
    model = softmax(1)
    assert not RecognizeSoftmax()(ir.from_proto(model)).modified
    model.opset_import[0].version = 13
    total = model.graph.node[3]
    del total.attribute[:]
    total.input.append("axes")
    import numpy as np
    from onnx import numpy_helper

    model.graph.initializer.append(numpy_helper.from_array(np.array([1]), "axes"))
    after = apply(RecognizeSoftmax(), model)
    assert operators(after) == ["Softmax"]
    assert_same_results(model, after, {"x": 50 * random(*DIMS)})


@pytest.mark.parametrize(
    "model", [softmax(-1, total=1), softmax(-1, opset=11)], ids=["other axis", "read outside"]
)
def test_what_looks_alike_stays(model):
    if model.opset_import[0].version == 11:
        model.graph.output.add().CopyFrom(model.graph.value_info[2])
    assert not RecognizeSoftmax()(ir.from_proto(model)).modified


def test_without_the_maximum_it_overflows_and_stays():
    nodes = [
        node("Exp", "x", "e"),
        node("ReduceSum", "e", "s", axes=[-1]),
        node("Div", "e s", "y"),
    ]
    model = infer_shapes(make_model(nodes, {"x": DIMS}, {"y": DIMS}, opset=12))
    assert not RecognizeSoftmax()(ir.from_proto(model)).modified
