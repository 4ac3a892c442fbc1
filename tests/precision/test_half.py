"""Models in floats of 16 bits, rounded at every operator as a GPU does it."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

import hybridc as api
from hybridc.precision.half import convert_to_half, wide_nodes
from tests.models import make_model, node, random, run_reference, save
from tests.support import hybridc

WIDTH = 512

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


def compiled(model, folder):
    path, bundle = save(model, folder / "model.onnx"), folder / "bundle"
    options = ("--target", "llvm", "--precision", "fp16", "--strict-math")
    outcome = hybridc("compile", path, "-o", bundle, *options)
    assert outcome.code == 0, outcome.stderr
    return api.load(bundle)


def close_to_reference(model, folder, x):
    with compiled(model, folder) as loaded:
        (found,) = loaded.run({"x": x}).values()
    (expected,) = run_reference(model, {"x": x}).values()
    assert np.isfinite(found).all()
    np.testing.assert_allclose(found, expected, atol=0.01 * np.abs(expected).max())


def test_a_normalization_by_a_sum_of_squares(tmp_path):
    model = make_model(NORMALIZATION, {"x": (4, WIDTH)}, {"y": (4, 8)}, WEIGHTS)
    close_to_reference(model, tmp_path, 40 * random(4, WIDTH))


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


def test_what_adds_up_keeps_32_bits_and_products_do_not():
    model = make_model(NORMALIZATION, {"x": (4, WIDTH)}, {"y": (4, 8)}, WEIGHTS)
    wide = [node.name for node in wide_nodes(ir.from_proto(model).graph)]
    assert wide == ["square", "sum", "mean", "move", "root"]
    half = ir.from_proto(convert_to_half(model)).graph
    kinds = {node.name: node.inputs[0].dtype for node in half}
    names = [node.name for node in half]
    assert {"square", "sum", "mean", "move", "root", "divide", "product"} <= set(names)
    (product,) = (node for node in half if node.op_type == "MatMul")
    assert product.inputs[1].const_value.dtype == ir.DataType.FLOAT16
    assert kinds["sum"] != ir.DataType.FLOAT16


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
