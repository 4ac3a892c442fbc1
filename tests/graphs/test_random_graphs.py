"""Random graphs give what ONNX Runtime gives.

HYBRIDC_GRAPHS sets how many are tried: some in every test run, thousands in ``make nightly``.
"""

from __future__ import annotations

import os

import numpy as np
import onnx
import onnxruntime
from hypothesis import HealthCheck, assume, given, settings

from hybridc import onnx_backend
from hybridc.runtime.samples import relative_error
from tests.graphs.generator import graphs

COUNT = int(os.environ.get("HYBRIDC_GRAPHS", "150"))
TOLERANCE = 2e-4


def reference(model: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    return session.run(None, feeds)


@settings(
    max_examples=COUNT,
    deadline=None,
    derandomize="HYBRIDC_GRAPHS" not in os.environ,
    suppress_health_check=list(HealthCheck),
)
@given(graphs())
def test_random_graph_agrees(case: tuple[onnx.ModelProto, dict[str, np.ndarray]]) -> None:
    model, feeds = case
    onnx.checker.check_model(model, full_check=True)
    expected = reference(model, feeds)
    assume(all(np.isfinite(array).all() for array in expected))
    results = onnx_backend.run_model(model, list(feeds.values()), fallback=False)
    for output, actual, right in zip(model.graph.output, results, expected, strict=True):
        error = relative_error(actual, np.asarray(right))
        assert error <= TOLERANCE, f"{output.name}: {error:.3g}"
