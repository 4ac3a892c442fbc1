"""Concatenated channels are chosen by whole vectors where they begin and end with these."""

from __future__ import annotations

import numpy as np
import pytest

tvm = pytest.importorskip("tvm")

from hybridc.targets.llvm.cpu import parse_cpu  # noqa: E402
from hybridc.targets.llvm.schedules import schedule_function  # noqa: E402
from hybridc.targets.llvm.schedules.blocks import collect  # noqa: E402
from tvm import te, tirx  # noqa: E402

ROWS = 30


def quantized(value):
    """A value divided by three and rounded to uint8."""
    moved = tirx.nearbyint(value / tirx.const(3.0, "float32"))
    bounds = (tirx.const(bound, "float32") for bound in (0.0, 255.0))
    return tirx.min(tirx.max(moved, next(bounds)), next(bounds)).astype("int32").astype("uint8")


def joined(sizes, flipped):
    """A kernel that quantizes a concatenation of tensors with some channels each."""
    parts = [te.placeholder((ROWS, size), "float32", f"x{i}") for i, size in enumerate(sizes)]
    ends = np.cumsum(sizes).tolist()

    def element(row, channel):
        value = parts[0](row, channel)
        for part, start in zip(parts[1:], ends, strict=False):
            other = part(row, channel - start)
            if flipped:
                value = tirx.if_then_else(channel < start, value, other)
            else:
                value = tirx.if_then_else(start <= channel, other, value)
        return quantized(value)

    result = te.compute((ROWS, ends[-1]), element, name="result")
    return te.create_prim_func([*parts, result])


@pytest.mark.parametrize("flipped", [False, True])
@pytest.mark.parametrize(
    ("sizes", "whole"), [([24, 24, 24, 24], True), ([8, 40, 16], True), ([20, 22, 14], False)]
)
def test_joined_channels(sizes, whole, flipped):
    cpu = parse_cpu("x86-64-v3")
    function = schedule_function(joined(sizes, flipped), cpu)
    kinds = {loop.kind for loop in collect(function.body, tirx.For)}
    assert (tirx.ForKind.VECTORIZED in kinds) == whole
    host = parse_cpu("host")
    function = schedule_function(joined(sizes, flipped), host)
    module = tvm.IRModule({"main": function.with_attr("global_symbol", "main")})
    built = tvm.compile(module, target=host.target)
    generator = np.random.default_rng(1)
    x = [generator.uniform(-100, 900, (ROWS, size)).astype(np.float32) for size in sizes]
    y = tvm.runtime.tensor(np.zeros((ROWS, sum(sizes)), np.uint8))
    built["main"](*map(tvm.runtime.tensor, x), y)
    expected = np.clip(np.rint(np.concatenate(x, axis=1) / np.float32(3)), 0, 255)
    np.testing.assert_array_equal(y.numpy(), expected.astype(np.uint8))
