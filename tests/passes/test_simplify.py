import itertools

import numpy as np
import onnx
import onnx_ir as ir
import onnxsim
import pytest
from hybridc.passes import simplify
from hybridc.passes.simplify import Simplify
from onnx import TensorProto

from tests.models import branched_model, make_model, node, random, relu_model
from tests.passes.harness import apply, assert_same_results, operators, run_all


def test_a_batch_normalization_goes_into_the_convolution():
    nodes = [
        node("Conv", "x w", "c"),
        node("BatchNormalization", "c one zero zero one", "b"),
        node("Dropout", "b", "y"),
    ]
    weights = {"w": random(4, 3, 3, 3), "one": np.full(4, 2, "f"), "zero": np.ones(4, "f")}
    model = make_model(nodes, {"x": (1, 3, 8, 8)}, {"y": (1, 4, 6, 6)}, weights)
    after = apply(Simplify(), model)
    assert operators(after)[0] == "Conv"
    assert "BatchNormalization" not in operators(after)
    assert_same_results(model, after, {"x": random(1, 3, 8, 8)})


def test_a_large_model_passes_unchanged(monkeypatch):
    monkeypatch.setattr(simplify, "MAX_BYTES", 10)
    model = ir.from_proto(branched_model())
    result = Simplify()(model)
    assert not result.modified
    assert operators(result.model) == operators(model)


@pytest.mark.parametrize("kind", [TensorProto.FLOAT8E4M3FN, TensorProto.INT4])
def test_constants_of_narrow_types_keep_their_type(kind):
    """onnxsim and ONNX Runtime give the bytes of a float8 as uint8."""
    nodes = [
        node("Cast", "one", "narrow", to=kind),
        node("Reshape", "narrow shape", "like"),
        node("CastLike", "x like", "small"),
        node("Cast", "small", "y", to=TensorProto.FLOAT),
    ]
    weights = {"one": np.ones(1, "f"), "shape": np.array([1, 1])}
    model = make_model(nodes, {"x": (3,)}, {"y": (3,)}, weights, opset=21)
    after, notes = run_all(model)
    assert not notes
    types = {value.dtype for n in after.graph for value in n.inputs if value is not None}
    assert kind in types
    assert ir.DataType.UINT8 not in types


def test_large_weights_stay_here(monkeypatch):
    """onnxsim gets the weights that constant nodes read, and none of the other large ones."""
    nodes = [
        node("Transpose", "v", "t", perm=[1, 0]),
        node("MatMul", "x w", "a"),
        node("MatMul", "a t", "b"),
        node("Add", "b bias", "y"),
    ]
    weights = {"w": random(64, 96), "v": random(80, 96), "bias": random(80)}
    model = make_model(nodes, {"x": (2, 64)}, {"y": (2, 80)}, weights)
    seen = []
    monkeypatch.setattr(onnxsim, "simplify", spying(onnxsim.simplify, seen))
    after = apply(Simplify(), model)
    assert {tensor.name for tensor in seen[0].graph.initializer} == {"v", "bias"}
    assert [value.name for value in after.graph.inputs] == ["x"]
    assert "Transpose" not in operators(after)
    np.testing.assert_array_equal(after.graph.initializers["w"].const_value.numpy(), weights["w"])
    assert_same_results(model, after, {"x": random(2, 64)})


def spying(function, seen):
    def call(proto, **options):
        seen.append(proto)
        return function(proto, **options)

    return call


def broken(*_arguments, **_options):
    raise RuntimeError("Bad node spec\nsecond line")


def renamed(proto, **_options):
    proto = onnx.ModelProto.FromString(proto.SerializeToString())
    proto.graph.output[0].name = proto.graph.node[-1].output[0] = "renamed"
    return proto, True


def invalid(proto, **_options):
    proto.graph.node[0].input[0] = "nowhere"
    return proto, True


@pytest.mark.parametrize(
    ("replacement", "reason"),
    [(broken, "Bad node spec"), (renamed, "outputs"), (invalid, "nowhere")],
)
def test_a_failure_is_left_out_with_a_note(monkeypatch, replacement, reason):
    monkeypatch.setattr(onnxsim, "simplify", replacement)
    model, notes = run_all(relu_model())
    assert operators(model) == ["Relu"]
    (note,) = notes
    assert note.startswith("step 'simplify' was left out: ")
    assert reason in note
    assert "\n" not in note


def mistaken(proto, **_options):
    """The same model with the shape of the input on every value, as onnxsim has left a Slice."""
    shape = proto.graph.input[0].type.tensor_type.shape
    for value in (*proto.graph.value_info, *proto.graph.output):
        value.type.tensor_type.shape.CopyFrom(shape)
    return proto, True


PIECES = {
    "Slice": node("Slice", "x zero two one", "s"),
    "Gather": node("Gather", "x zero", "s", axis=1),
    "Reshape": node("Reshape", "x four_two", "s"),
    "Expand": node("Expand", "x three_one", "s"),
    "Tile": node("Tile", "x three_one", "s"),
}


@pytest.mark.parametrize("operator", PIECES)
@pytest.mark.parametrize("last", [True, False])
def test_shapes_that_a_simplifier_writes_are_not_believed(monkeypatch, operator, last):
    """A node that seems to leave the shape alone would be dropped."""
    monkeypatch.setattr(onnxsim, "simplify", mistaken)
    known = {"zero": [0], "one": [1], "two": [2], "four_two": [4, 2], "three_one": [3, 1]}
    weights = {name: np.array(known[name]) for name in PIECES[operator].input[1:]}
    dims = (1, 4) if operator == "Expand" else (2, 4)
    nodes = [PIECES[operator], node("Neg" if last else "Identity", "s", "y")]
    model = make_model(nodes, {"x": dims}, {"y": (None, None)}, weights)
    after, notes = run_all(model)
    assert not notes
    assert_same_results(model, after, {"x": random(*dims)})


@pytest.mark.parametrize("operator", ["ReduceMin", "ReduceMean", "ReduceL2"])
@pytest.mark.parametrize(("first", "second"), [*itertools.product([0, 1], repeat=2)])
def test_reductions_of_reductions_keep_their_rank(operator, first, second):
    """onnxsim 0.8.1 makes one of both that keeps the axes of both, or of none."""
    nodes = [
        node(operator, "x", "a", axes=[1], keepdims=first),
        node(operator, "a", "y", axes=[0], keepdims=second),
    ]
    shape = ([1] if second else []) + ([1] if first else []) + [6]
    model = make_model(nodes, {"x": (4, 5, 6)}, {"y": shape}, opset=17)
    after, notes = run_all(model)
    assert not notes
    assert_same_results(model, after, {"x": random(4, 5, 6)})


def test_a_result_of_another_shape_is_refused(monkeypatch):
    model = make_model([node("Relu", "x", "y")], {"x": (4, 5)}, {"y": (4, 5)})
    other = make_model([node("Flatten", "x", "y", axis=0)], {"x": (4, 5)}, {"y": (4, 5)})
    monkeypatch.setattr(simplify, "_simplify", lambda _model: other)
    monkeypatch.setattr(onnx.checker, "check_model", lambda _model: None)
    with pytest.raises(ir.passes.PostconditionError, match="shape of output 'y'"):
        Simplify()(ir.from_proto(model))
