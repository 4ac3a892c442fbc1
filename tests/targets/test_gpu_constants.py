"""Constants keep all their digits in the source that TVM's code generators print."""

import math
import re

import numpy as np
import pytest
import tvm
from hybridc.targets.gpu.constants import CUDA, OPENCL, keep_constants
from hypothesis import given
from hypothesis import strategies as st
from tvm import te, tirx

from tests.conformance.suite import cases
from tests.gpu.emulation import cuda_source


def scaled(value, dtype):
    """A module with one function: x times a constant."""
    x = te.placeholder((4,), dtype, name="x")
    y = te.compute((4,), lambda i: x[i] * tirx.const(value, dtype), name="y")
    return tvm.IRModule({"main": te.create_prim_func([x, y]).with_attr("global_symbol", "main")})


@pytest.mark.parametrize(
    ("value", "dtype", "printed", "kept"),
    [
        (1e-20, "float64", CUDA, False),
        (1 / 3, "float64", CUDA, False),
        (0.5, "float64", CUDA, True),
        (1 / 3, "float32", CUDA, True),  # printed in hexadecimal
        (1 / 3, "float32", OPENCL, False),
        (2.0**-127, "float64", OPENCL, False),
        (0.25, "float32", OPENCL, True),
        (math.inf, "float64", CUDA, True),
        (-0.0, "float64", CUDA, True),
        (-float(np.finfo("float32").max), "float32", OPENCL, True),
    ],
)
def test_what_is_kept(value, dtype, printed, kept):
    module = scaled(value, dtype)
    changed = keep_constants(module, printed)
    assert ("as_" in changed.script()) != kept


@given(st.floats(allow_nan=False, allow_infinity=False, width=32), st.sampled_from([32, 64]))
def test_the_bits_are_those_of_the_value(value, size):
    dtype = f"float{size}"
    text = keep_constants(scaled(value, dtype), OPENCL).script()
    written = re.search(r'"as_(?:float|double)", (?:T.int64\()?(-?\d+)', text)
    if written is None and abs(value) < np.finfo("float32").max:
        assert np.dtype(dtype).type(f"{value:.6e}") == np.dtype(dtype).type(value)
    elif written:
        bits = np.array(int(written[1]), f"int{size}")
        assert bits.view(dtype) == np.dtype(dtype).type(value)


def test_the_smallest_power_of_two_is_no_zero():
    """2**-127 is the least number of FLOAT8E8M0; TVM printed it as 0.000000000000000."""
    source = cuda_source(cases()["test_cast_e8m0_FLOAT_to_FLOAT8E8M0"].model)
    assert ", 0.000000000000000)" not in source
