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
from hybridc.reference import precise_session
from hybridc.runtime.samples import relative_error
from tests.graphs.generator import graphs

COUNT = int(os.environ.get("HYBRIDC_GRAPHS", "150"))
TOLERANCE = 2e-4
HALF_TOLERANCE = 2e-3  # two roundings to float16, one of them where a value is an output or moved


def reference(model: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = precise_session(model.SerializeToString(), options)
    return session.run(None, feeds)


def examples(count: int) -> settings:
    return settings(
        max_examples=count,
        deadline=None,
        derandomize="HYBRIDC_GRAPHS" not in os.environ,
        suppress_health_check=list(HealthCheck),
    )


@examples(COUNT)
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


def retyped(model: onnx.ModelProto, dtype: np.dtype) -> onnx.ModelProto:
    """The model with its floats in another type; weights are rounded to float16 first."""
    copy = onnx.ModelProto.FromString(model.SerializeToString())
    kind = onnx.helper.np_dtype_to_tensor_dtype(dtype)
    for info in (*copy.graph.input, *copy.graph.output):
        info.type.tensor_type.elem_type = kind
    for tensor in copy.graph.initializer:
        if tensor.data_type == onnx.TensorProto.FLOAT:
            array = onnx.numpy_helper.to_array(tensor).astype(np.float16).astype(dtype)
            tensor.CopyFrom(onnx.numpy_helper.from_array(array, tensor.name))
    for node in copy.graph.node:
        for attribute in node.attribute:
            if node.op_type == "Cast" and attribute.i == onnx.TensorProto.FLOAT:
                attribute.i = kind
    return copy


@examples(max(COUNT // 5, 1))
@given(graphs())
def test_float16_is_as_exact_as_its_results(
    case: tuple[onnx.ModelProto, dict[str, np.ndarray]],
) -> None:
    """A graph of float16 gives what one of float32 with the same weights does, but for rounding."""
    model, feeds = case
    halves = {name: array.astype(np.float16) for name, array in feeds.items()}
    wide = {name: array.astype(np.float32) for name, array in halves.items()}
    expected = reference(retyped(model, np.dtype(np.float32)), wide)
    assume(all((np.abs(array) < np.finfo(np.float16).max).all() for array in expected))
    half = retyped(model, np.dtype(np.float16))
    results = onnx_backend.run_model(half, list(halves.values()), fallback=False)
    for output, actual, right in zip(half.graph.output, results, expected, strict=True):
        error = relative_error(np.asarray(actual).astype(np.float32), np.asarray(right))
        assert error <= HALF_TOLERANCE, f"{output.name}: {error:.3g}"
