"""Constants that are added inside quotients and remainders are taken out of them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import tvm
from hybridc.targets.offsets import take_shifts_out
from hypothesis import given
from hypothesis import strategies as st
from tvm import te, tirx

from hybridc import onnx_backend
from tests.models import make_model, node, random, run_reference
from tests.support import assert_close
from tests.targets.properties import kernel_examples


def values(function, count):
    """What a function of one output of ``count`` int64 gives, with loops in order."""
    result = tvm.runtime.empty((count,), "int64")
    tvm.compile(function, target="llvm")(result)
    return result.numpy()


@kernel_examples(25)
@given(
    shift=st.integers(-40, 40),
    divisor=st.integers(1, 12),
    scale=st.integers(1, 3),
)
def test_values_stay(shift, divisor, scale):
    def position(i):
        return i * scale + tirx.IntImm("int64", shift)

    by = tirx.IntImm("int64", divisor)
    count = tirx.IntImm("int64", 50)
    result = te.compute(
        (count,),
        lambda i: tirx.floordiv(position(i), by) * 100 + tirx.floormod(position(i), by),
    )
    function = take_shifts_out(te.create_prim_func([result]))
    expected = np.arange(50) * scale + shift
    assert (values(function, 50) == expected // divisor * 100 + expected % divisor).all()


@pytest.mark.parametrize("stride", [2, 3])
@pytest.mark.parametrize("pads", [[0] * 4, [1] * 4, [1, 0, 0, 1]])
@pytest.mark.parametrize("kernel", [2, 3, 4])
def test_transposed_convolutions(stride, pads, kernel):
    """Output channels, rows and columns are parts of one variable, and rows are shifted."""
    sizes = [stride * (size - 1) + kernel - pads[0] - pads[2] for size in (4, 5)]
    operator = node("ConvTranspose", "x w", "y", strides=[stride] * 2, pads=pads)
    weights = {"w": random(3, 3, kernel, kernel)}
    model = make_model([operator], {"x": (2, 3, 4, 5)}, {"y": (2, 3, *sizes)}, weights)
    feeds = {"x": random(2, 3, 4, 5, seed=1)}
    actual = onnx_backend.run_model(model, [feeds["x"]], fallback=False)[0]
    assert_close({"y": actual}, run_reference(model, feeds))


@pytest.mark.parametrize(("axis", "before"), [*itertools.product([1, 2, 3], [1, 2])])
def test_wrapped_padding(axis, before):
    pads = [0] * 8
    pads[axis], pads[4 + axis] = before, 3
    sizes = [2, 4, 6, 8]
    sizes[axis] += before + 3
    operator = node("Pad", "x pads", "y", mode="wrap")
    model = make_model(
        [operator], {"x": (2, 4, 6, 8)}, {"y": sizes}, {"pads": np.array(pads)}, opset=19
    )
    feeds = {"x": random(2, 4, 6, 8)}
    actual = onnx_backend.run_model(model, [feeds["x"]], fallback=False)[0]
    assert_close({"y": actual}, run_reference(model, feeds))
