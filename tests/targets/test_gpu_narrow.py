"""Integers of 8 and 16 bits wrap around in the middle of a kernel, as they do in memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from hybridc.targets.cuda import build as cuda
from hybridc.targets.cuda.architectures import parse_gpu
from hybridc.targets.opencl import build as opencl
from hybridc.targets.opencl.devices import parse_devices
from tvm import tirx
from tvm_ffi import structural_walk

from hybridc import onnx_backend
from tests.gpu.emulation import lowered_model
from tests.models import make_model, node
from tests.targets.test_opencl import needs_device

NARROW = ("uint8", "int8", "uint16", "int16")


def overflowing(dtype: str) -> tuple[onnx.ModelProto, np.ndarray[Any, Any]]:
    """A model of one kernel whose sums and products do not fit their type, and the weights."""
    nodes = [
        node("Add", "x w", "s"),
        node("Div", "s two", "d"),
        node("BitwiseNot", "x", "n"),
        node("Div", "n two", "m"),
        node("Mul", "d m", "y"),
    ]
    weights = (np.arange(64).reshape(8, 8) * 37).astype(dtype)
    constants = {"w": weights, "two": np.array(2, dtype)}
    model = make_model(nodes, {"x": (8, 8)}, {"y": (8, 8)}, constants, opset=18, dtype=dtype)
    return model, weights


def halved(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Divided by two and rounded toward zero, as ONNX does."""
    wide = values.astype(np.int64)
    return (np.sign(wide) * (np.abs(wide) // 2)).astype(values.dtype)


@needs_device
@pytest.mark.parametrize("dtype", NARROW)
def test_what_overflows_is_cut_off_before_it_is_read(dtype: str) -> None:
    model, weights = overflowing(dtype)
    data = (np.arange(64).reshape(8, 8) * 91).astype(dtype)
    (result,) = onnx_backend.prepare(model, target="opencl", fallback=False).run([data])
    np.testing.assert_array_equal(result, halved(data + weights) * halved(~data))


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("target", ["cuda", "opencl"])
def test_nothing_is_computed_in_a_narrow_type(dtype: str, target: str) -> None:
    """C computes in at least 32 bits, whatever a code generator means."""
    module = lowered_model(overflowing(dtype)[0])[0].module
    if target == "cuda":
        graph = cuda.compiled_graph(module, parse_gpu("sm_90"))
    else:
        graph = opencl.compiled_graph(module, parse_devices(""))
    types: list[str] = []

    def see(operation: Any) -> None:
        types.append(str(operation.ty.dtype))

    for function in graph.functions.values():
        if isinstance(function, tirx.PrimFunc):
            kinds = (tirx.Add, tirx.Sub, tirx.Mul, tirx.Div, tirx.FloorDiv)
            structural_walk(function.body, [(kind, see) for kind in kinds], order="post")
    wide = dtype.replace("16", "32") if "16" in dtype else dtype.replace("8", "32")
    assert wide in types
    assert dtype not in types
