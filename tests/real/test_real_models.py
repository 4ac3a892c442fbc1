"""Real models compile whole and agree with ONNX Runtime; the check is the compiler's own."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

import hybridc
from tests.models import run_reference
from tests.support import assert_close, compile_to
from tools.models import CATALOG, LIGHT_MODELS, light_model, model_feeds, model_path

pytestmark = pytest.mark.slow

CATALOG_MODELS = {
    "rapidocr-ch-PP-OCRv4-det-infer": 1e-4,
    "rapidocr-ch-PP-OCRv4-rec-infer": 1e-3,
    "rapidocr-ch-ppocr-mobile-v2.0-cls-infer": 1e-4,
    "magika-model": 1e-4,
    "mtcnn-pnet": 1e-4,
    "mtcnn-rnet": 1e-4,
    "mtcnn-onet": 1e-4,
    "openwakeword-melspectrogram": 1e-4,
    "openwakeword-embedding-model": 1e-4,
    "openwakeword-alexa-v0.1": 1e-4,
}
"""Tolerance relative to an output's largest magnitude."""

SLOW = {"bvlc_alexnet", "inception_v1", "vgg19", "zfnet512"}
"""Models of many weights and few kinds of layers, which others have, too; for ``make nightly``."""

EVERYTHING = os.environ.get("HYBRIDC_REAL_MODELS") == "all"


def shapes_of(name):
    """``--shape`` for each input, as the catalog feeds it."""
    feeds = CATALOG["models"][name]["feeds"]
    return tuple(f"{key}={'x'.join(map(str, feed['shape']))}" for key, feed in feeds.items())


@pytest.mark.parametrize("name", [n for n in LIGHT_MODELS if EVERYTHING or n not in SLOW])
def test_light_model(name, tmp_path):
    report = compile_to(tmp_path / "b", light_model(name), verify=True)
    assert report.notes == ()
    assert len(report.manifest.parts) == 1
    assert max(error["error"] for error in report.errors) < 1e-4


@pytest.mark.parametrize("name", CATALOG_MODELS)
def test_catalog_model(name, tmp_path):
    """The compiler's own check, and the catalog's inputs, which it does not know."""
    path, tolerance = model_path(name), CATALOG_MODELS[name]
    report = compile_to(
        tmp_path / "b", path, shapes=shapes_of(name), verify=True, tolerance=tolerance
    )
    assert report.notes == ()
    assert len(report.manifest.parts) == 1
    feeds = model_feeds(name, seed=1)
    with hybridc.load(tmp_path / "b") as model:
        assert_close(model.run(feeds), run_reference(path, feeds), tolerance)


def test_squeezenet_needs_little_memory(tmp_path):
    """A fresh process that loads and runs it peaks below 80 MB."""
    compile_to(tmp_path / "b.hyb", light_model("squeezenet"))
    code = (
        "import json, re, sys, numpy, hybridc\n"
        "model = hybridc.load(sys.argv[1])\n"
        "inputs = {s.name: numpy.ones(s.shape, s.dtype) for s in model.inputs}\n"
        "outputs = model.run(inputs)\n"
        "status = open('/proc/self/status').read()\n"
        "peak = int(re.search(r'VmHWM:\\s+(\\d+) kB', status)[1]) * 1024\n"
        "print(json.dumps([peak, next(iter(outputs.values())).ravel().tolist()]))\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "b.hyb")]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    peak, values = json.loads(result.stdout)
    with hybridc.load(tmp_path / "b.hyb") as model:
        inputs = {spec.name: np.ones(spec.shape, spec.dtype) for spec in model.inputs}
    expected = run_reference(light_model("squeezenet"), inputs)
    assert_close({"y": np.array(values, "f")}, {"y": next(iter(expected.values())).ravel()}, 1e-4)
    assert peak < 80e6
