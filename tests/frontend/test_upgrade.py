"""Models of opset 1 to 6: right results where the operators changed since, or a clear refusal."""

from collections.abc import Sequence

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import hybridc
from hybridc import onnx_backend
from hybridc.errors import ModelError
from hybridc.frontend.read import read_model, source_of
from hybridc.frontend.upgrade import TARGET_OPSET, upgrade
from tests.models import make_model, node, random, save
from tests.support import assert_close, assert_compile_refused, compile_to

X = random(2, 3, 4, 5)


def old_model(nodes, shape, weights=None, opset=6, outputs=("y",)):
    """A model of an old opset; its weights are inputs too, as they had to be then."""
    model = make_model(nodes, {"x": shape}, {}, weights, opset)
    for name, array in (weights or {}).items():
        kind = helper.np_dtype_to_tensor_dtype(array.dtype)
        model.graph.input.append(helper.make_tensor_value_info(name, kind, array.shape))
    model.ir_version = 3
    for name in outputs:
        model.graph.output.add(name=name).type.tensor_type.elem_type = TensorProto.FLOAT
    return model


def run(model, *inputs: np.ndarray) -> list[np.ndarray]:
    return onnx_backend.run_model(model, list(inputs))


def assert_gives(model, expected: np.ndarray | Sequence[np.ndarray], x=X) -> None:
    wanted = [expected] if isinstance(expected, np.ndarray) else expected
    results = run(model, x)
    assert len(results) == len(wanted)
    for actual, right in zip(results, wanted, strict=True):
        assert actual.shape == right.shape
        np.testing.assert_allclose(actual, right, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("dims", "axis", "aligned"),
    [
        ((3, 4), 1, (3, 4, 1)),
        ((2,), 0, (2, 1, 1, 1)),
        ((3,), -3, (3, 1, 1)),
        ((5,), 3, (5,)),
        ((4, 5), None, (4, 5)),
        ((1,), 0, (1,)),
        ((1, 1), None, (1, 1)),
        ((), None, ()),
    ],
)
def test_second_operand_at_an_axis(dims, axis, aligned):
    b = np.asarray(random(*dims, seed=1))
    options = {} if axis is None else {"axis": axis}
    model = old_model([node("Add", "x b", "y", broadcast=1, **options)], X.shape, {"b": b}, opset=1)
    assert_gives(model, X + b.reshape(aligned))


@pytest.mark.parametrize(
    ("operator", "compute"),
    [("Sub", np.subtract), ("Mul", np.multiply), ("Div", np.divide), ("Pow", np.power)],
)
def test_aligned_operators(operator, compute):
    b = np.array([1, 2, 3], "f")
    nodes = [node("Abs", "x", "a"), node(operator, "a b", "y", axis=1, broadcast=1)]
    model = old_model(nodes, X.shape, {"b": b})
    assert_gives(model, compute(np.abs(X), b.reshape(3, 1, 1)))


@pytest.mark.parametrize(
    ("operator", "compute"), [("And", np.logical_and), ("Or", np.logical_or), ("Xor", np.not_equal)]
)
def test_aligned_logic(operator, compute):
    nodes = [
        node("Greater", "x zero", "a", broadcast=1),
        node("Less", "b zero", "c", broadcast=1),
        node(operator, "a c", "d", axis=2, broadcast=1),
        node("Cast", "d", "y", to=TensorProto.FLOAT),
    ]
    b = np.array([-1, 1, -1, 1], "f")
    model = old_model(nodes, X.shape, {"b": b, "zero": np.zeros(1, "f")})
    assert_gives(model, compute(X > 0, (b < 0).reshape(4, 1)).astype("f"))


def test_a_chain_of_aligned_nodes():
    """The shape of each is known only if it is known of the one before."""
    b = random(3, seed=1)
    nodes = [
        node("Add", "x b", "s", axis=1, broadcast=1),
        node("Mul", "s b", "t", axis=1, broadcast=1),
        node("Sub", "t b", "y", axis=1, broadcast=1),
    ]
    c = b.reshape(3, 1, 1)
    assert_gives(old_model(nodes, X.shape, {"b": b}), (X + c) * c - c)


def test_the_second_operand_is_computed():
    nodes = [
        node("Slice", "x", "s", axes=[0, 2, 3], starts=[0, 0, 0], ends=[1, 1, 1]),
        node("Squeeze", "s", "c", axes=[0, 2, 3]),
        node("Add", "x c", "y", axis=1, broadcast=1),
    ]
    assert_gives(old_model(nodes, X.shape), X + X[0, :, 0, 0].reshape(3, 1, 1))


@pytest.mark.parametrize("slopes", [np.array([0.5], "f"), np.array([0.1, 0.2, 0.3], "f")])
def test_prelu(slopes):
    model = old_model([node("PRelu", "x b", "y")], X.shape, {"b": slopes})
    assert_gives(model, np.where(X < 0, X * slopes.reshape(-1, 1, 1), X))


@pytest.mark.parametrize("shape", [[6, 20], [0, -1, 5]])
def test_reshape_by_attribute(shape):
    model = old_model([node("Reshape", "x", "y", shape=shape)], X.shape, opset=1)
    assert_gives(model, X.reshape([X.shape[i] if d == 0 else d for i, d in enumerate(shape)]))


def test_pad_by_its_old_name():
    model = old_model([node("Pad", "x", "y", paddings=[0, 0, 0, 1, 0, 0, 0, 2])], X.shape, opset=1)
    assert_gives(model, np.pad(X, [(0, 0), (0, 0), (0, 0), (1, 2)]))


def test_upsample_by_two_scales():
    nodes = [node("Upsample", "x", "y", height_scale=2.0, width_scale=3.0)]
    assert_gives(old_model(nodes, X.shape, opset=1), X.repeat(2, 2).repeat(3, 3))


def test_cast_to_a_name():
    nodes = [node("Cast", "x", "whole", to="INT32"), node("Cast", "whole", "y", to="float")]
    assert_gives(old_model(nodes, X.shape, opset=1), X.astype(np.int32).astype("f"))


def test_concat_without_an_axis():
    model = old_model([node("Concat", "x x", "y")], X.shape, opset=1)
    assert_gives(model, np.concatenate([X, X], 1))


def test_split_with_its_lengths_as_an_input():
    nodes = [node("Split", "x n", "y z", axis=2)]
    model = old_model(nodes, X.shape, {"n": np.array([1, 3], "f")}, 1, ("y", "z"))
    assert_gives(model, [X[:, :, :1], X[:, :, 1:]])


def test_tile_along_one_axis():
    weights = {"n": np.array([3], "f"), "axis": np.array([2], "f")}
    model = old_model([node("Tile", "x n axis", "y")], X.shape, weights, 1)
    assert_gives(model, np.tile(X, (1, 1, 3, 1)))


def test_gemm_that_broadcasts():
    weights = {"w": random(5, 6), "b": random(6, seed=1)}
    model = old_model([node("Gemm", "x w b", "y", broadcast=1)], (4, 5), weights)
    assert_gives(model, X[0, 0] @ weights["w"] + weights["b"], X[0, 0])


def test_batch_normalization_and_dropout_for_inference():
    parts = {name: np.abs(random(3, seed=i)) for i, name in enumerate("abcd")}
    nodes = [
        node("Dropout", "x", "kept", is_test=1, consumed_inputs=[0]),
        node("BatchNormalization", "kept a b c d", "y", is_test=1, consumed_inputs=[0, 0, 0, 1, 1]),
    ]
    scale, bias, mean, variance = (part.reshape(3, 1, 1) for part in parts.values())
    model = old_model(nodes, X.shape, parts, opset=1)
    assert_gives(model, (X - mean) / np.sqrt(variance + 1e-5) * scale + bias)


def test_recurrent_with_a_sequence_output():
    weights = {"w": random(1, 8, 5), "r": random(1, 8, 2, seed=1)}
    nodes = [node("LSTM", "x w r", "y last", hidden_size=2, output_sequence=1)]
    results = run(old_model(nodes, (4, 3, 5), weights, 5, ("y", "last")), X[0].swapaxes(0, 1))
    new = make_model(
        [node("LSTM", "x w r", "y last", hidden_size=2)],
        {"x": (4, 3, 5)},
        {"y": (4, 1, 3, 2), "last": (1, 3, 2)},
        weights,
    )
    for actual, right in zip(results, run(new, X[0].swapaxes(0, 1)), strict=True):
        np.testing.assert_allclose(actual, right, rtol=1e-5, atol=1e-6)


def conditional():
    """An aligned Add in a branch, of an operand in it and one outside of it."""
    info = helper.make_tensor_value_info("s", TensorProto.FLOAT, X.shape)
    b = numpy_helper.from_array(np.array([1, 2, 3], "f"), "b")
    add = [node("Constant", "", "b", value=b), node("Add", "x b", "s", axis=1, broadcast=1)]
    add[0].ClearField("input")
    then = helper.make_graph(add, "then", [], [info])
    otherwise = helper.make_graph([node("Neg", "x", "s")], "else", [], [info])
    branch = node("If", "choice", "y", then_branch=then, else_branch=otherwise)
    nodes = [node("ReduceMax", "x", "m", keepdims=0), node("Greater", "m zero", "choice"), branch]
    return old_model(nodes, X.shape, {"zero": np.zeros((), "f")})


def test_subgraphs():
    assert_gives(conditional(), X + np.array([1, 2, 3], "f").reshape(3, 1, 1))
    assert_gives(conditional(), np.abs(X), -np.abs(X))


def test_new_names_are_free():
    """Values that have the names which the new nodes would take are left alone."""
    nodes = [
        node("Relu", "x", "b__aligned__0"),
        node("Relu", "b__aligned__0", "y__shape__0"),
        node("Add", "y__shape__0 b", "s", axis=1, broadcast=1),
        node("Reshape", "s", "y", shape=[-1]),
    ]
    b = np.array([1, 2, 3], "f")
    expected = (np.maximum(X, 0) + b.reshape(3, 1, 1)).ravel()
    assert_gives(old_model(nodes, X.shape, {"b": b}, opset=4), expected)


def test_names_and_external_data_survive(tmp_path):
    weights = {"w": random(3, seed=1)}
    model = old_model([node("Add", "x w", "y", axis=1, broadcast=1)], X.shape, weights)
    path = save(model, tmp_path / "m.onnx", external=True)
    source = read_model(path)
    assert source.model.graph.opset_imports[""] == TARGET_OPSET
    (weight,) = source.model.graph.initializers.values()
    assert weight.name == "w"
    assert type(weight.const_value).__name__ == "ExternalTensor"
    compile_to(tmp_path / "b.hyb", path)
    with hybridc.load(tmp_path / "b.hyb") as loaded:
        right = {"y": X + weights["w"].reshape(3, 1, 1)}
        assert_close(loaded.run({"x": X}), right)


def test_without_an_opset(tmp_path):
    """Before IR version 3 there were no opsets; the operators are those of opset 1."""
    model = old_model([node("Reshape", "x", "y", shape=[-1])], X.shape, opset=1)
    del model.opset_import[:]
    model.ir_version = 2
    path = save(model, tmp_path / "m.onnx")
    assert read_model(path).model.graph.opset_imports[""] == TARGET_OPSET


def test_the_compile_checks_against_the_original(tmp_path):
    model = old_model([node("Reshape", "x", "y", shape=[6, 20])], X.shape, opset=4)
    report = compile_to(tmp_path / "b.hyb", model, verify=True)
    assert report.errors[0]["error"] == 0


def test_newer_models_stay_as_they_are(tmp_path):
    model = make_model([node("Add", "x x", "y")], {"x": (2,)}, {"y": (2,)}, opset=7)
    before = model.SerializeToString()
    assert not upgrade(model, tmp_path)
    assert model.SerializeToString() == before


STATISTICS = {name: np.ones(3, "f") for name in "abcd"}


@pytest.mark.parametrize(
    ("nodes", "weights", "opset", "words"),
    [
        ([node("Dropout", "x", "y", "drop")], {}, 6, "'drop' (Dropout): it is in training mode"),
        (
            [node("BatchNormalization", "x a b c d", "y", "norm")],
            STATISTICS,
            6,
            "'norm' (BatchNormalization): it is in training mode",
        ),
        ([node("Cast", "x", "y", to="NUMBER")], {}, 1, "no element type 'NUMBER'"),
        ([node("Reshape", "x", "y")], {}, 1, "has no shape"),
        ([node("LpPool", "x", "y", kernel_shape=[2, 2], p=1.5)], {}, 1, "not a whole number"),
        ([node("Tile", "x x x", "y")], {}, 1, "the number of tiles is computed at run time"),
        ([node("Split", "x x", "y", axis=0)], {}, 1, "its second input is computed"),
        (
            [node("Add", "x w", "y", axis=3, broadcast=1)],
            {"w": np.ones((3, 4), "f")},
            6,
            "2 dimensions against 4 at axis 3",
        ),
    ],
)
def test_refused(tmp_path, nodes, weights, opset, words):
    path = save(old_model(nodes, X.shape, weights, opset), tmp_path / "m.onnx")
    assert_compile_refused(path, tmp_path, 3, f"opset {opset}", "opset 7", words)


def test_unknown_rank_is_refused():
    nodes = [node("Add", "x w", "y", axis=1, broadcast=1)]
    model = old_model(nodes, X.shape, {"w": np.ones(3, "f")})
    model.graph.input[0].type.tensor_type.ClearField("shape")
    with pytest.raises(ModelError, match="number of dimensions of 'x'"):
        upgrade(onnx.ModelProto.FromString(model.SerializeToString()), "m.onnx")
    with pytest.raises(ModelError):
        source_of(model)
