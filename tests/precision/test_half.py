"""Models in floats of 16 bits, rounded at every operator as a GPU does it."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import hybridc as api
from hybridc.precision.half import BFLOAT16, FLOAT16, convert_floats, to_half
from hybridc.reference import open_session
from hybridc.runtime.samples import relative_error
from tests.models import make_model, node, random, run_reference, save
from tests.support import hybridc

WIDTH = 512
FLOAT = ir.DataType.FLOAT
HALVES = (FLOAT16, BFLOAT16)

NORMALIZATION = [
    node("Mul", "x x", "squares", "square"),
    node("ReduceSum", "squares axes", "sum", "sum", keepdims=1),
    node("Mul", "sum share", "mean", "mean"),
    node("Add", "mean epsilon", "moved", "move"),
    node("Sqrt", "moved", "root", "root"),
    node("Div", "x root", "small", "divide"),
    node("MatMul", "small w", "y", "product"),
]
WEIGHTS = {
    "axes": np.array([-1]),
    "share": np.float32([1 / WIDTH]),
    "epsilon": np.float32([1e-6]),
    "w": random(WIDTH, 8, seed=1) / 16,
}


def compiled(model, folder, precision="fp16"):
    path, bundle = save(model, folder / "model.onnx"), folder / "bundle"
    options = ("--target", "llvm", "--precision", precision, "--strict-math")
    outcome = hybridc("compile", path, "-o", bundle, *options)
    assert outcome.code == 0, outcome.stderr
    return api.load(bundle)


def close_to_reference(model, folder, x, precision="fp16"):
    with compiled(model, folder, precision) as loaded:
        (found,) = loaded.run({"x": x}).values()
    (expected,) = run_reference(model, {"x": x}).values()
    assert np.isfinite(found).all()
    bound = {"fp16": 0.01, "bf16": 0.03}[precision]
    np.testing.assert_allclose(found, expected, atol=bound * np.abs(expected).max())


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_a_normalization_by_a_sum_of_squares(tmp_path, precision):
    model = make_model(NORMALIZATION, {"x": (4, WIDTH)}, {"y": (4, 8)}, WEIGHTS)
    close_to_reference(model, tmp_path, 40 * random(4, WIDTH), precision)


@pytest.mark.parametrize("operator", ["ReduceL1", "ReduceL2", "ReduceSumSquare", "ReduceLogSumExp"])
def test_sums_beyond_16_bits(tmp_path, operator):
    """The sum does not fit, its share of the largest one does."""
    nodes = [
        node(operator, "x", "sum", axes=[-1], keepdims=0),
        node("Div", "sum scale", "y"),
    ]
    weights = {"scale": np.float32([1000])}
    model = make_model(nodes, {"x": (4, WIDTH)}, {"y": (4,)}, weights)
    x = np.abs(random(4, WIDTH, seed=2))
    close_to_reference(model, tmp_path, x * np.float32(300 if operator == "ReduceL1" else 30))


@pytest.mark.parametrize("dtype", HALVES)
def test_what_adds_up_keeps_32_bits_and_products_do_not(dtype):
    model = make_model(NORMALIZATION, {"x": (4, WIDTH)}, {"y": (4, 8)}, WEIGHTS)
    types = types_of(convert_floats(model, dtype))
    assert {types[name] for name in ("square", "sum", "mean", "move", "root")} == {FLOAT}
    assert {types[name] for name in ("divide", "product")} == {dtype}


def types_of(model):
    """The type of each node's result, by the node's name."""
    return {node.name: node.outputs[0].dtype for node in ir.from_proto(model).graph.all_nodes()}


def error_of(model, dtype, **inputs):
    """How far a model in 16 bits is from the original, both in ONNX Runtime."""
    onnx.checker.check_model(convert_floats(model, dtype), full_check=True)
    expected, found = (
        open_session(proto.SerializeToString())(inputs)
        for proto in (model, convert_floats(model, dtype))
    )
    return max(relative_error(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("dtype", HALVES)
def test_values_that_several_read_are_converted_once(dtype):
    """One reader in 32 bits, two in 16, and an output: all see the type that they had."""
    nodes = [
        node("Relu", "x", "a"),
        node("Exp", "a", "b"),
        node("Round", "a", "c"),
        node("Add", "b w", "d"),
        node("Mul", "a d", "y"),
    ]
    outputs = dict.fromkeys("acdy", (4, 8))
    model = make_model(nodes, {"x": (4, 8)}, outputs, {"w": random(8)})
    half = convert_floats(model, dtype)
    casts = [each for each in half.graph.node if each.op_type == "Cast"]
    assert len(casts) == 1 + 3  # of x, and of a, d and y
    assert [output.name for output in half.graph.output] == list("acdy")
    assert error_of(model, dtype, x=random(4, 8)) < 0.02


def picture_model():
    """Scales of a Resize, statistics, an exponent, the places of a GridSample and RoiAlign."""
    nodes = [
        node("Resize", "x - scales", "a", mode="linear"),
        node("BatchNormalization", "a gamma beta mean variance", "b"),
        node("GridSample", "b grid", "c", mode="linear"),
        node("Pow", "c exponent", "d"),
        node("RoiAlign", "d rois batches", "y", output_height=2, output_width=2),
    ]
    weights = {
        "scales": np.float32([1, 1, 2, 2]),
        "gamma": random(3) / 8,
        "beta": random(3, seed=1),
        "mean": random(3, seed=2),
        "variance": np.float32([1e-6, 1, 3]),
        "exponent": np.float32([2]),
        "rois": np.float32([[0, 0, 5, 5]]),
        "batches": np.int64([0]),
    }
    shapes = {"x": (1, 3, 4, 4), "grid": (1, 8, 8, 2)}
    model = make_model(nodes, shapes, {"y": (1, 3, 2, 2)}, weights, opset=20)
    grid = np.random.default_rng(0).uniform(-1, 1, (1, 8, 8, 2)).astype(np.float32)
    return model, {"x": random(1, 3, 4, 4), "grid": grid}


@pytest.mark.parametrize("dtype", HALVES)
def test_operands_that_say_more_in_32_bits_keep_them(dtype):
    model, inputs = picture_model()
    assert error_of(model, dtype, **inputs) < 0.02


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_operands_of_two_types_compile(tmp_path, precision):
    model, inputs = picture_model()
    (expected,) = run_reference(model, inputs).values()
    with compiled(model, tmp_path, precision) as loaded:
        (found,) = loaded.run(inputs).values()
    np.testing.assert_allclose(found, expected, atol=0.03 * np.abs(expected).max())


@pytest.mark.parametrize("dtype", HALVES)
def test_angles_keep_32_bits(dtype):
    """Positions times frequencies, as in rotary embeddings: 16 bits do not hold 3,000."""
    nodes = [
        node("Cast", "n", "positions", "cast", to=1),
        node("MatMul", "frequencies positions", "angles", "angles"),
        node("Transpose", "angles", "turned", "turn", perm=[1, 0]),
        node("Concat", "turned turned", "all", "all", axis=-1),
        node("Cos", "all", "cosines", "cosine"),
        node("Mul", "x cosines", "y", "rotate"),
    ]
    weights = {"frequencies": (10.0 ** -np.arange(4, dtype=np.float32))[:, None]}
    model = make_model(nodes, {"x": (16, 8), "n": (1, 16)}, {"y": (16, 8)}, weights)
    model.graph.input[1].type.tensor_type.elem_type = onnx.TensorProto.INT64
    types = types_of(convert_floats(model, dtype))
    assert {types[n] for n in ("cast", "angles", "turn", "all", "cosine")} == {FLOAT}
    assert types["rotate"] == dtype
    positions = np.arange(3000, 3016)[None]
    assert error_of(model, dtype, x=random(16, 8), n=positions) < 0.02


@pytest.mark.parametrize("dtype", HALVES)
def test_subgraphs_compute_in_16_bits_and_speak_in_32(dtype):
    branches = onnx.parser.parse_graph(
        "g (float[4, 8] x, bool c) => (float[4, 8] y) {"
        "  a = Relu(x)"
        "  b = If <then_branch = t () => (float[4, 8] p) { p = Mul(a, a) },"
        "          else_branch = e () => (float[4, 8] q) { q = Identity(x) }> (c)"
        "  y = Sigmoid(b)"
        "}"
    )
    opset = onnx.helper.make_opsetid("", 17)
    model = onnx.helper.make_model(branches, opset_imports=[opset], ir_version=8)
    found = ir.from_proto(convert_floats(model, dtype)).graph.all_nodes()
    assert [each.outputs[0].dtype for each in found if each.op_type == "Mul"] == [dtype]
    for chosen in (False, True):
        assert error_of(model, dtype, x=random(4, 8), c=np.array(chosen)) < 0.02


@given(st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=20))
@example([3.4028234e38, -3.4028234e38, 65519, 1e-12, -1e-45, 0.0, -0.0, math.inf])
def test_constants_stay_finite_and_other_than_zero(numbers):
    """All else is rounded to the nearest."""
    array = np.float32(numbers)
    for dtype in (np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)):
        half = to_half(array, dtype).astype(np.float32)
        limits = ml_dtypes.finfo(dtype)
        assert (np.isfinite(half) == np.isfinite(array)).all()
        assert ((half == 0) == (array == 0)).all()
        assert (np.signbit(half) == np.signbit(array)).all()
        inside = (np.abs(array) <= float(limits.max)) & (np.abs(array) >= float(limits.tiny))
        assert (half[inside] == array[inside].astype(dtype).astype(np.float32)).all()


def test_nodes_without_names(tmp_path):
    nodes = [
        node("Mul", "x x", "s"),
        node("ReduceSum", "s axes", "r", keepdims=0),
        node("Sqrt", "r", "y", "root"),
    ]
    model = make_model(nodes, {"x": (4, WIDTH)}, {"y": (4,)}, {"axes": np.array([-1])})
    close_to_reference(model, tmp_path, 40 * random(4, WIDTH))


def test_sums_of_integers_and_of_inputs_stay_as_they_are(tmp_path):
    nodes = [
        node("Cast", "x", "n", to=7),
        node("ReduceSum", "n axes", "r", keepdims=1),
        node("Cast", "r", "f", to=1),
        node("Add", "x f", "y"),
    ]
    model = make_model(nodes, {"x": (4, 8)}, {"y": (4, 8)}, {"axes": np.array([-1])})
    close_to_reference(model, tmp_path, 40 * random(4, 8))
