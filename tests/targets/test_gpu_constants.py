"""Constants keep all their digits in the source that TVM's code generators print."""

import math

import numpy as np
import pytest
import tvm
from hybridc.targets.cuda.architectures import parse_gpu
from hybridc.targets.gpu.constants import CUDA, OPENCL, keep_constants
from hypothesis import given, settings
from hypothesis import strategies as st
from tvm import te, tirx

from tests.conformance.suite import cases
from tests.gpu.emulation import cuda_source


def scaled(value, dtype):
    """A module with one function: x times a constant."""
    x = te.placeholder((4,), dtype, name="x")
    y = te.compute((4,), lambda i: x[i] * tirx.const(value, dtype), name="y")
    return tvm.IRModule({"main": te.create_prim_func([x, y]).with_attr("global_symbol", "main")})


def run(module, array):
    library = tvm.compile(module, parse_gpu("").host.target)
    tensors = tvm.runtime.tensor(array), tvm.runtime.tensor(np.zeros_like(array))
    library["main"](*tensors)
    return tensors[1].numpy()


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
    ],
)
def test_what_is_kept(value, dtype, printed, kept):
    module = scaled(value, dtype)
    changed = keep_constants(module, printed)
    assert ("reinterpret" in changed.script()) != kept


@settings(max_examples=8, deadline=None)
@given(st.floats(allow_nan=False, allow_infinity=False, width=32), st.sampled_from([32, 64]))
def test_the_value_is_the_same(value, bits):
    dtype = f"float{bits}"
    module, ones = scaled(value, dtype), np.ones(4, dtype)
    assert np.array_equal(run(keep_constants(module, OPENCL), ones), run(module, ones))


def test_the_smallest_power_of_two_is_no_zero():
    """2**-127 is the least number of FLOAT8E8M0; TVM printed it as 0.000000000000000."""
    source = cuda_source(cases()["test_cast_e8m0_FLOAT_to_FLOAT8E8M0"].model)
    assert ", 0.000000000000000)" not in source
