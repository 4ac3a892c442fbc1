"""ONNX Runtime runs models with bfloat16 for reference, though it has few operators for it."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx
import pytest

from hybridc.errors import ModelError
from hybridc.reference import open_session, run_reference
from tests.models import random

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def parse(text: str) -> onnx.ModelProto:
    return onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 22]> {text}')


def rounded(array: np.ndarray) -> np.ndarray:
    return array.astype(BFLOAT16).astype(np.float32)


def test_a_convolution_is_computed_in_float32_and_rounded_at_the_end(tmp_path):
    model = parse(
        "g (bfloat16[1, 3, 8, 8] x, bfloat16[4, 3, 3, 3] w) => (bfloat16[1, 4, 6, 6] y)"
        "{ a = Conv(x, w) y = Relu(a) }"
    )
    onnx.save(model, tmp_path / "model.onnx")
    x, w = random(1, 3, 8, 8).astype(BFLOAT16), random(4, 3, 3, 3, seed=1).astype(BFLOAT16)
    sample = run_reference(tmp_path / "model.onnx", {"x": x, "w": w}, {})
    assert sample.reference.startswith("onnxruntime")
    wide = parse(
        "g (float[1, 3, 8, 8] x, float[4, 3, 3, 3] w) => (float[1, 4, 6, 6] y)"
        "{ a = Conv(x, w) y = Relu(a) }"
    )
    inputs = {"x": x.astype(np.float32), "w": w.astype(np.float32)}
    expected = open_session(wide.SerializeToString())(inputs)["y"]
    assert sample.outputs["y"].dtype == BFLOAT16
    np.testing.assert_array_equal(sample.outputs["y"], expected.astype(BFLOAT16))


def test_a_cast_rounds():
    model = parse(
        "g (float[64] x) => (float[64] y, bfloat16[64] z)"
        "{ a = Cast <to = 16> (x) z = Mul(a, a) y = Cast <to = 1> (a) }"
    )
    x = random(64)
    found = open_session(model.SerializeToString())({"x": x})
    np.testing.assert_array_equal(found["y"], rounded(x))
    np.testing.assert_array_equal(found["z"], (rounded(x) ** 2).astype(BFLOAT16))


def test_constants_of_attributes_subgraphs_and_functions():
    """A Constant of 0.5 by its bits, in a function; and a branch."""
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["" : 22, "own" : 1]>
        g (bool c, float[4] x) => (float[4] y) {
            n = Cast <to = 16> (x)
            a = own.half (n)
            b = If (c) <then_branch = t () => (bfloat16[4] p) { p = Exp(a) },
                        else_branch = e () => (bfloat16[4] q) { q = Identity(a) }>
            y = Cast <to = 1> (b)
        }
        <opset_import: ["" : 22], domain: "own">
        half (v) => (w) {
            h = Constant <value = bfloat16[1] {16128}> ()
            w = Mul(v, h)
        }"""
    )
    x = random(4)
    run = open_session(model.SerializeToString())
    half = rounded(x) / 2
    np.testing.assert_array_equal(run({"c": np.array(False), "x": x})["y"], half)
    found = run({"c": np.array(True), "x": x})["y"]
    np.testing.assert_allclose(found, np.exp(half), rtol=1e-6)


def test_what_fails_for_another_reason_fails():
    model = parse("g (bfloat16[4] x) => (bfloat16[4] y) { y = Nonsense(x) }")
    with pytest.raises(ModelError, match="Nonsense"):
        open_session(model.SerializeToString())
