"""Compiles in another precision, by the command line."""

from __future__ import annotations

import json

import numpy as np
import onnx
import pytest

import hybridc as api
from hybridc.precision.compile import _steadiest
from hybridc.precision.quantize import Calibration, quantize_static
from hybridc.precision.ranges import METHODS
from hybridc.precision.samples import load_samples
from tests.models import make_model, node, run_reference, save
from tests.precision.data import network, samples, write_samples
from tests.precision.test_samples import SPECS
from tests.support import assert_compile_refused, hybridc


@pytest.fixture
def model(tmp_path):
    return save(network(), tmp_path / "network.onnx")


@pytest.fixture
def data(tmp_path):
    return write_samples(tmp_path / "data", samples())


def test_int8_keeps_its_budget(tmp_path, model, data):
    options = ("--precision", "int8", "--calibration", data, "--accuracy-budget", "cosine=0.99")
    kept, output = tmp_path / "kept.onnx", tmp_path / "bundle"
    outcome = hybridc("compile", model, "-o", output, *options, "--keep-model", kept)
    assert outcome.code == 0, outcome.stderr
    assert "cosine >= 0.99 is kept" in outcome.stdout
    assert "fewer than 500 samples" in outcome.stdout
    x = {"x": samples(12)[-1]}
    (exact,) = run_reference(network(), x).values()
    got = api.load(output)(**x)["y"]
    assert 0 < np.abs(got - exact).max() < 0.05 * np.abs(exact).max()
    (quantized,) = run_reference(onnx.load(kept), x).values()
    np.testing.assert_allclose(got, quantized, atol=0.02 * np.abs(exact).max())
    assert hybridc("verify", output).code == 0


def test_a_budget_that_is_missed(tmp_path, model, data):
    options = ("--precision", "int8", "--calibration", str(data), "--accuracy-budget", "relative=0")
    assert_compile_refused(model, tmp_path, 4, "relative is", "no bundle", options=options)


@pytest.mark.parametrize("precision", ["fp16", "int8-dynamic", "int8-weights", "int4-weights"])
def test_other_precisions(tmp_path, model, data, precision):
    options = ("--precision", precision, "--calibration", data, "--accuracy-budget", "cosine=0.9")
    output = tmp_path / "bundle"
    outcome = hybridc("compile", model, "-o", output, *options, "--format", "json")
    assert outcome.code == 0, outcome.stderr
    assert any("is kept" in note for note in json.loads(outcome.stdout)["notes"])


BAD = [
    (("--precision", "int8"), "--calibration"),
    (("--precision", "int8", "--calibration", "nowhere"), "nowhere"),
    (("--precision", "fp16", "--accuracy-budget", "cosine=0.9"), "--calibration"),
    (("--calibration", "data"), "--precision"),
    (("--precision", "int8", "--calibration", "{one}", "--accuracy-budget", "cosine=0.9"), "one"),
    (("--precision", "int8", "--calibration", "{named}"), "'image'"),
    (("--precision", "int8", "--calibration", "{data}", "--accuracy-budget", "x=1"), "metric"),
]


@pytest.mark.parametrize(("options", "word"), BAD, ids=[word for _, word in BAD])
def test_what_is_refused(tmp_path, model, data, options, word):
    one = write_samples(tmp_path / "one", samples(1))
    named = write_samples(tmp_path / "named", samples(2), "image")
    filled = tuple(option.format(one=one, named=named, data=data) for option in options)
    assert_compile_refused(model, tmp_path, 2, word, options=filled)


@pytest.mark.parametrize("method", METHODS)
def test_methods(data, method):
    found = load_samples(str(data), SPECS, {})
    quantized = quantize_static(network(), Calibration(found, method)).model
    onnx.checker.check_model(quantized)
    x = {"x": samples(12)[-1]}
    (exact,), (got,) = (run_reference(m, x).values() for m in (network(), quantized))
    assert 0 < np.abs(got - exact).max() < 0.2 * np.abs(exact).max()


def test_a_bundle_is_checked_on_a_sample_that_noise_does_not_change():
    """Between two steps, noise decides; the other sample lies in the middle of its steps."""
    nodes = [node("QuantizeLinear", "x s z", "q"), node("DequantizeLinear", "q s z", "y")]
    weights = {"s": np.array(1, "f"), "z": np.array(0, "i1")}
    model = make_model(nodes, {"x": (64,)}, {"y": (64,)}, weights, opset=17)
    between, steady = ({"x": np.full(64, value, "f")} for value in (1.5, 2.0))
    for order in ([between, steady], [steady, between]):
        found, spread = _steadiest(model.SerializeToString(), order)
        assert found is steady
        assert spread == 0
    assert _steadiest(model.SerializeToString(), [between])[1] >= 0.5
