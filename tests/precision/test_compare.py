"""``hybridc compare``: outputs and layers, bundles and ONNX models."""

from __future__ import annotations

import json

import numpy as np
import onnx
from onnx import numpy_helper

from tests.models import save
from tests.precision.data import network, samples, write_samples
from tests.support import assert_refused, compile_to, hybridc


def changed() -> onnx.ModelProto:
    """The network with the second convolution's bias a little off."""
    model = network()
    for tensor in model.graph.initializer:
        if tensor.name == "b.b":
            array = numpy_helper.to_array(tensor) + np.float32(0.5)
            tensor.CopyFrom(numpy_helper.from_array(array, "b.b"))
    return model


def test_a_bundle_against_its_model(tmp_path):
    model, bundle = save(network(), tmp_path / "m.onnx"), tmp_path / "bundle"
    compile_to(bundle, model)
    data = write_samples(tmp_path / "data", samples(2))
    for first, second in ((model, bundle), (bundle, model), (bundle, bundle)):
        outcome = hybridc("compare", first, second, "--data", data, "--format", "json")
        assert outcome.code == 0, outcome.stderr
        found = json.loads(outcome.stdout)
        assert found["samples"] == 2
        (output,) = found["outputs"]
        assert output["name"] == "y"
        assert output["relative"] < 1e-5
    refused = hybridc("compare", model, bundle, "--layers")
    assert_refused(refused, 2, "--layers", "--keep-model")


def test_layers_show_where_an_error_begins(tmp_path):
    first, second = save(network(), tmp_path / "a.onnx"), save(changed(), tmp_path / "b.onnx")
    outcome = hybridc("compare", first, second, "--layers", "--format", "json")
    assert outcome.code == 0, outcome.stderr
    layers = json.loads(outcome.stdout)["layers"]
    assert [layer["name"] for layer in layers] == ["a.c", "a.y", "b.c", "s", "p", "f", "y"]
    assert [layer["relative"] > 0 for layer in layers] == [False, False, *[True] * 5]
    text = hybridc("compare", first, second, "--layers", "--bound", "0.01").stdout
    assert "5 of 7 tensors differ by more than 0.01" in text
    assert "LARGE" in text


def test_what_cannot_be_made_up(tmp_path):
    model = network()
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "batch"
    path = save(model, tmp_path / "dynamic.onnx")
    assert_refused(hybridc("compare", path, path), 2, "--data")
