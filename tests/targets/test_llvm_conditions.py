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


def joined(sizes, flipped, block=0):
    """A kernel that quantizes a concatenation of tensors with some channels each.

    With a block, what is made is ``(channels / block, rows, block)``, and floats again.
    """
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

    def blocked(outer, row, lane):
        return element(row, outer * block + lane).astype("float32") * tirx.const(3.0, "float32")

    if block:
        result = te.compute((ends[-1] // block, ROWS, block), blocked, name="result")
    else:
        result = te.compute((ROWS, ends[-1]), element, name="result")
    return te.create_prim_func([*parts, result])


def run(sizes, function, target, shape, dtype):
    """What a kernel makes, and the integers that it should make or make floats of."""
    module = tvm.IRModule({"main": function.with_attr("global_symbol", "main")})
    built = tvm.compile(module, target=target)
    generator = np.random.default_rng(1)
    x = [generator.uniform(-100, 900, (ROWS, size)).astype(np.float32) for size in sizes]
    y = tvm.runtime.tensor(np.zeros(shape, dtype))
    built["main"](*map(tvm.runtime.tensor, x), y)
    expected = np.clip(np.rint(np.concatenate(x, axis=1) / np.float32(3)), 0, 255)
    return y.numpy(), expected.astype(np.uint8)


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
    got, expected = run(sizes, function, host.target, (ROWS, sum(sizes)), np.uint8)
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("flipped", [False, True])
@pytest.mark.parametrize(
    ("sizes", "whole"),
    [([16, 24], True), ([8, 16, 8], True), ([12, 20], False), ([3, 1, 4], False)],
)
def test_joined_channels_in_blocks(sizes, whole, flipped):
    """Channels counted by blocks and lanes; what rounding binds holds the condition."""
    cpu, shape = parse_cpu("x86-64-v3"), (sum(sizes) // 8, ROWS, 8)
    function = schedule_function(joined(sizes, flipped, block=8), cpu)
    kinds = {loop.kind for loop in collect(function.body, tirx.For)}
    assert (tirx.ForKind.VECTORIZED in kinds) == whole
    host = parse_cpu("host")
    function = schedule_function(joined(sizes, flipped, block=8), host)
    got, expected = run(sizes, function, host.target, shape, np.float32)
    blocks = expected.reshape(ROWS, -1, 8).transpose(1, 0, 2).astype(np.float32) * 3
    np.testing.assert_array_equal(got, blocks)
