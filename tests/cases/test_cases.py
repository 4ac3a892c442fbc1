"""Small graphs rebuilt from public bug reports of this field, with right answers.

The answers come from ONNX Runtime, except where exact arithmetic shows it to be wrong: its CPU
kernels saturate products of uint8 and int8 on processors without VNNI.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from hybridc import onnx_backend
from hybridc.runtime.samples import relative_error

DATA = Path(__file__).parent / "data"
CASES: dict[str, dict[str, Any]] = {
    case["name"]: case for case in json.loads((DATA / "index.json").read_text())
}


@pytest.mark.parametrize("name", sorted(CASES))
def test_case(name: str) -> None:
    model = onnx.load(DATA / name / "model.onnx")
    inputs = dict(np.load(DATA / name / "inputs.npz", allow_pickle=False))
    expected = dict(np.load(DATA / name / "outputs.npz", allow_pickle=False))
    set_shapes(model, inputs)
    weights = {tensor.name for tensor in model.graph.initializer}
    feeds = [inputs[value.name] for value in model.graph.input if value.name not in weights]
    results = onnx_backend.run_model(model, feeds)
    for output, actual in zip(model.graph.output, results, strict=True):
        assert relative_error(actual, expected[output.name]) <= 1e-4, CASES[name]["label"]


def set_shapes(model: onnx.ModelProto, inputs: dict[str, np.ndarray]) -> None:
    """Give dynamic dimensions of the inputs the sizes that they are fed with."""
    for value in model.graph.input:
        if value.name in inputs:
            dims = value.type.tensor_type.shape.dim
            for dim, size in zip(dims, inputs[value.name].shape, strict=True):
                dim.dim_value = size
