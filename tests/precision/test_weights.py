"""Weights in 8 and 4 bits: how they are rounded, and that they stay small in the bundle."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx.shape_inference import infer_shapes

from hybridc.compiler import build, load_built
from hybridc.errors import UsageError
from hybridc.frontend.read import source_of
from hybridc.precision.weights import in_blocks, quantize_tables, quantize_weights
from hybridc.reference import open_session
from tests.models import make_model, node, random, relu_model, run_reference
from tests.support import make_options


def embedding() -> onnx.ModelProto:
    """Rows of a table, a matrix product, a Gemm and a convolution, each of uneven sizes."""
    nodes = [
        node("ArgMax", "x", "i", axis=2, keepdims=0),
        node("Gather", "table i", "rows"),
        node("MatMul", "rows m", "p"),
        node("Unsqueeze", "p axes", "image"),
        node("Conv", "image k", "c", pads=[1, 1, 1, 1]),
        node("GlobalAveragePool", "c", "g"),
        node("Flatten", "g", "f"),
        node("Gemm", "f t", "y", transB=1),
    ]
    weights = {
        "table": random(50, 128, seed=1),
        "m": random(128, 75, seed=2),
        "axes": np.array([1]),
        "k": random(40, 1, 3, 3, seed=3),
        "t": random(61, 40, seed=4),
    }
    return infer_shapes(make_model(nodes, {"x": (2, 6, 50)}, {"y": (2, 61)}, weights))


@pytest.mark.parametrize(("bits", "share", "error"), [(8, 0.31, 0.05), (4, 0.2, 0.3)])
def test_a_model(bits, share, error):
    model = embedding()
    small = quantize_weights(model, bits)
    onnx.checker.check_model(small)
    x = {"x": random(2, 6, 50)}
    (exact,) = run_reference(model, x).values()
    # With its optimizations, ONNX Runtime rounds what such a weight is multiplied with, too.
    (rounded,) = open_session(small.SerializeToString(), optimize=False)(x).values()
    assert 0 < np.abs(rounded - exact).max() < error * np.abs(exact).max()
    built, notes = build(source_of(small), make_options())
    assert not notes
    np.testing.assert_allclose(load_built(built)(**x)["y"], rounded, atol=1e-4)
    before = build(source_of(model), make_options())[0].weights
    large, little = (sum(a.nbytes for a in w.values()) for w in (before, built.weights))
    assert little < share * large


def test_tables_alone():
    small = quantize_tables(embedding())
    onnx.checker.check_model(small)
    kinds = {t.name: t.data_type for t in small.graph.initializer}
    assert kinds["table__int8"] == onnx.TensorProto.INT8
    assert "table" not in kinds
    assert kinds["m"] == onnx.TensorProto.FLOAT
    x = {"x": random(2, 6, 50)}
    (exact,), (rounded,) = (run_reference(m, x).values() for m in (embedding(), small))
    assert 0 < np.abs(rounded - exact).max() < 0.05 * np.abs(exact).max()


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_blocks_keep_within_half_a_step(bits, axis):
    array = random(7, 10, 9, seed=axis) * np.float32(3)
    array[2] = 0
    found = in_blocks(array, axis, bits, 4)
    scales = np.repeat(found.scales, 4, axis=axis)
    scales = np.take(scales, range(array.shape[axis]), axis=axis)
    assert found.codes.dtype == np.int8
    assert np.abs(found.codes).max() == (1 << (bits - 1)) - 1
    assert np.all(np.abs(found.codes * scales - array) <= 0.5001 * scales)


def test_nothing_to_quantize():
    with pytest.raises(UsageError, match="nothing to quantize"):
        quantize_weights(relu_model(), 4)
