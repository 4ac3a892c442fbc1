"""``--strict-math`` keeps convolutions direct that would be computed by Winograd's algorithm."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest

from tests.models import save
from tests.support import hybridc as command


@pytest.mark.parametrize("strict", [False, True])
def test_strict_math_of_a_compile(tmp_path: Path, strict: bool) -> None:
    text = """<ir_version: 8, opset_import: ["": 17]>
        layer (float[1,64,28,28] x) => (float[1,64,28,28] y)
        <float[64,64,3,3] weight = {%s}> { y = Conv<pads = [1, 1, 1, 1]>(x, weight) }"""
    (weight,) = np.random.default_rng(0).standard_normal((1, 64, 64, 3, 3)).astype("float32")
    model = onnx.parser.parse_model(text % ", ".join(map(str, weight.ravel())))
    path = save(model, tmp_path / "model.onnx")
    options = ["--strict-math"] if strict else []
    done = command("compile", path, "-o", tmp_path / "b", "--format", "json", *options)
    assert done.code == 0, done.stderr
    report = json.loads(done.stdout)
    (name,) = report["manifest"]["parts"][0]["weights"]
    assert ("winograd" in name) != strict
    assert all(error["within"] for error in report["errors"])
