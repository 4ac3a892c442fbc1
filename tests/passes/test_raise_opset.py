import numpy as np
import onnx
import onnx_ir as ir
import pytest
from hybridc.passes.raise_opset import NEWEST, ensure_opset

from tests.models import make_model, node, random, run_reference
from tests.support import assert_close

DIMS = (2, 3, 4)


def raised(model, version):
    model = ir.from_proto(onnx.shape_inference.infer_shapes(model))
    assert ensure_opset(model, version)
    proto = ir.to_proto(model)
    onnx.checker.check_model(proto, full_check=True)
    return proto


CHANGED = {
    "ReduceMean": (node("ReduceMean", "x", "y", axes=[-1], keepdims=1), (2, 3, 1)),
    "ReduceSum": (node("ReduceSum", "x", "y", axes=[0, 2], keepdims=0), (3,)),
    "ReduceMax of all": (node("ReduceMax", "x", "y", keepdims=0), ()),
    "Unsqueeze": (node("Unsqueeze", "x", "y", axes=[0]), (1, 2, 3, 4)),
    "Squeeze": (node("Squeeze", "x", "y"), DIMS),
    "Split": (node("Split", "x", "y z", axis=1, split=[1, 2]), (2, 1, 4)),
    "Softmax": (node("Softmax", "x", "y", axis=2), DIMS),
    "Resize": (node("Resize", "x none scales", "y"), (2, 6, 4)),
}


@pytest.mark.parametrize("name", CHANGED)
@pytest.mark.parametrize("version", [14, 17, NEWEST])
def test_changed_operators_are_rewritten(name, version):
    changed, dims = CHANGED[name]
    weights = {"none": np.zeros(0, "f"), "scales": np.array([1, 2, 1], "f")}
    used = {key: value for key, value in weights.items() if key in changed.input}
    model = make_model([changed], {"x": DIMS}, {"y": dims}, used, opset=12)
    inputs = {"x": random(*DIMS)}
    after = raised(model, version)
    assert after.opset_import[0].version == version
    assert_close(run_reference(after, inputs), run_reference(model, inputs))


def test_softmax_over_channels_with_ones_behind():
    dims = (2, 3, 1, 1)
    model = make_model([node("Softmax", "x", "y")], {"x": dims}, {"y": dims}, opset=9)
    inputs = {"x": random(*dims)}
    assert_close(run_reference(raised(model, 20), inputs), run_reference(model, inputs))


@pytest.mark.parametrize(
    "first",
    [
        node("Softmax", "x", "a", axis=1),
        node("Upsample", "x", "a", scales=[1.0, 1.0, 1.0]),
        node("Dropout", "x", "a"),
    ],
    ids=["flattened", "gone", "unknown"],
)
def test_a_model_with_another_meaning_stays(first):
    nodes = [first, node("ReduceMean", "a", "y", axes=[1])]
    proto = make_model(nodes, {"x": DIMS}, {"y": (2, 1, 4)}, opset=8)
    model = ir.from_proto(onnx.shape_inference.infer_shapes(proto))
    assert not ensure_opset(model, 20)
    assert model.graph.opset_imports[""] == 8
    assert ir.to_proto(model).graph.node == ir.to_proto(ir.from_proto(proto)).graph.node


def test_a_newer_opset_stays():
    model = ir.from_proto(make_model([node("Relu", "x", "y")], {"x": (2,)}, {"y": (2,)}, opset=21))
    assert ensure_opset(model, 20)
    assert model.graph.opset_imports[""] == 21


def test_subgraphs_are_rewritten_too():
    from onnx import TensorProto, helper

    def branch(name):
        info = helper.make_tensor_value_info(name, TensorProto.FLOAT, (2, 1, 4))
        return helper.make_graph([node("ReduceMean", "x", name, axes=[1])], name, [], [info])

    branches = {"then_branch": branch("p"), "else_branch": branch("q")}
    nodes = [helper.make_node("If", ["t"], ["y"], **branches)]
    model = make_model(nodes, {"x": DIMS}, {"y": (2, 1, 4)}, {"t": np.array(True)}, opset=12)
    inputs = {"x": random(*DIMS)}
    assert_close(run_reference(raised(model, 20), inputs), run_reference(model, inputs))
