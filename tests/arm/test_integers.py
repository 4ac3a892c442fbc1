"""Integer kernels on AArch64 with dot products, bit for bit against exact integer arithmetic."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

from tests.arm import emulator
from tests.support import compile_to
from tests.targets.test_llvm_integer import convolve, make_model, quantized, random_integers

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(emulator.why_not() is not None, reason=str(emulator.why_not())),
]

CPUS = {"neoverse-n1": "signed by signed only", "neoverse-v1": "unsigned by signed too"}
CONVOLUTIONS = {
    "dense": ("uint8", 32, 64, 1, 1),
    "signed": ("int8", 5, 17, 1, 2),
    "few": ("uint8", 7, 3, 1, 1),
    "depthwise": ("uint8", 24, 24, 24, 1),
}
PRODUCTS = [("uint8", "int8"), ("int8", "int8"), ("uint8", "uint8"), ("int8", "uint8")]

Case = tuple[onnx.ModelProto, np.ndarray, np.ndarray]


def convolution(dtype: str, channels: int, filters: int, groups: int, stride: int) -> Case:
    """A quantized convolution of channels that come last, its input and its exact result."""
    x = random_integers((1, 11, 11, channels), dtype, channels)
    w = random_integers((filters, channels // groups, 3, 3), "int8", filters)
    zero, one = np.array(3, dtype), np.array(1, np.float32)
    out = np.array(900, np.float32)
    constants = [one, zero, w, one, np.array(0, np.int8), out, zero]
    attributes: dict[str, Any] = {"channels_last": 1, "pads": [1] * 4, "strides": [stride] * 2}
    model = make_model("QLinearConv", x, constants, "com.microsoft", group=groups, **attributes)
    sums = convolve(x.astype(np.int64) - 3, w.astype(np.int64), [1] * 4, stride, 1, groups)
    return model, x, quantized(sums, one / out, zero)


def product(left: str, right: str) -> Case:
    """A product of integers with zero points, its input and its exact result."""
    x, w = random_integers((3, 21, 70), left, 1), random_integers((70, 45), right, 2)
    model = make_model("MatMulInteger", x, [w, np.array(7, left), np.array(9, right)], "")
    exact = (x.astype(np.int64) - 7) @ (w.astype(np.int64) - 9)
    return model, x, exact.astype(np.int32)


CASES = {name: convolution(*sizes) for name, sizes in CONVOLUTIONS.items()} | {
    f"{left} x {right}": product(left, right) for left, right in PRODUCTS
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All cases for each CPU, built here and run in one emulated process."""
    path = tmp_path_factory.mktemp("arm")
    for cpu in CPUS:
        for name, (model, x, expected) in CASES.items():
            kind = helper.np_dtype_to_tensor_dtype(expected.dtype)
            result = helper.make_tensor_value_info("y", kind, expected.shape)
            model.graph.output[0].CopyFrom(result)
            bundle = path / f"{name}-{cpu}.bundle"
            compile_to(bundle, model, targets=(f"llvm:{cpu}",), fallback=False)
            np.savez(bundle.with_suffix(".npz"), x=x)
    emulator.run_all(path)
    return path


@pytest.mark.parametrize("cpu", CPUS)
@pytest.mark.parametrize("name", CASES)
def test_exact(name: str, cpu: str, folder: Path) -> None:
    (result,) = emulator.outputs_of(folder / f"{name}-{cpu}.bundle").values()
    assert np.array_equal(result, CASES[name][2])
