"""Infinities of bfloat16 in kernels for CUDA, whose source has no literal for them."""

from __future__ import annotations

import onnx
import pytest
from hybridc.targets.cuda.nvcc import compile_source, find_nvcc

from tests.gpu.emulation import cuda_source

MODELS = {
    "a pool": "g (bfloat16[1, 4, 8, 8] x) => (bfloat16[1, 4, 4, 4] y)"
    "{ y = MaxPool <kernel_shape = [3, 3], strides = [2, 2], pads = [1, 1, 1, 1]> (x) }",
    "a maximum": "g (bfloat16[4, 64] x) => (bfloat16[4, 1] y) { y = ReduceMax <axes = [1]> (x) }",
    "a mask": "g (bfloat16[4, 8] x, bool[4, 8] c) => (bfloat16[4, 8] y) <bfloat16 none = {65408}>"
    "{ a = Where(c, x, none) y = Neg(a) }",
    "not a number": "g (bfloat16[4, 8] x, bool[4, 8] c) => (bfloat16[4, 8] y)"
    "<bfloat16 none = {32704}> { a = Where(c, x, none) y = Neg(a) }",
}


@pytest.mark.parametrize("name", MODELS)
def test_kernels_are_valid_source(name: str) -> None:
    opset = 17 if name == "a maximum" else 22
    text = f'<ir_version: 10, opset_import: ["" : {opset}]> {MODELS[name]}'
    source = cuda_source(onnx.parser.parse_model(text))
    assert "inff" not in source
    assert "nanf" not in source.lower()
    if find_nvcc() is not None:
        assert compile_source(source, ["sm_90"])


def test_the_bits_are_those_of_minus_infinity() -> None:
    text = f'<ir_version: 10, opset_import: ["" : 22]> {MODELS["a pool"]}'
    assert "65408" in cuda_source(onnx.parser.parse_model(text))
