"""Rounding half to even is vectorized, and may stand in an argument that is bound to a value."""

from __future__ import annotations

import numpy as np
import pytest

tvm = pytest.importorskip("tvm")

from hybridc.targets.llvm.cpu import parse_cpu  # noqa: E402
from hybridc.targets.llvm.schedules import schedule_function  # noqa: E402
from tvm import te, tirx  # noqa: E402


def test_rounding_below_an_activation():
    cpu = parse_cpu("")
    data = te.placeholder((40,), "float32", "data")

    def element(i):
        rounded = tirx.nearbyint(data(i))
        return rounded * tirx.sigmoid(rounded)

    result = te.compute((40,), element, name="result")
    function = schedule_function(te.create_prim_func([data, result]), cpu)
    module = tvm.IRModule({"main": function.with_attr("global_symbol", "main")})
    built = tvm.compile(module, target=cpu.target)
    if cpu.architecture == "x86_64":
        assert "vroundps" in str(built.mod.inspect_source("asm"))
    x = np.arange(-10, 10, 0.5, dtype=np.float32)
    y = tvm.runtime.tensor(np.zeros_like(x))
    built["main"](tvm.runtime.tensor(x), y)
    whole = np.rint(x)
    np.testing.assert_allclose(y.numpy(), whole / (1 + np.exp(-whole)), rtol=1e-6, atol=1e-7)


def around_ties(scale: np.float32) -> np.ndarray:
    """Numbers whose quotients by a scale are next to the middle between integers, and others."""
    middles = (np.arange(-600, 600) + 0.5).astype(np.float32) * scale
    drawn = np.random.default_rng(1).standard_normal(5000).astype(np.float32) * scale * 100
    limits = np.array([np.inf, -np.inf, np.nan, 3e38, -3e38, 1e-45, -1e-42, 0.0, -0.0], np.float32)
    below, above = (np.nextafter(middles, np.float32(end)) for end in (-np.inf, np.inf))
    return np.concatenate([middles, below, above, drawn, limits])


DRAWN = np.random.default_rng(2).uniform(0.5, 1, 24).tolist()
"""Reciprocals of these are rounded by more or less than a quarter of a unit in the last place."""


@pytest.mark.parametrize(
    "scale", [0.0163665451, 1 / 3, 0.9999999, 1.0000001, 2.0, 1e-12, 7e5, *DRAWN]
)
@pytest.mark.parametrize(("zero", "kind"), [(0, "uint8"), (132, "uint8"), (-3, "int8")])
def test_quotients_by_a_constant(scale, zero, kind):
    """What is rounded is what a division gives, to the last bit, and nothing is divided."""
    cpu, step = parse_cpu(""), np.float32(scale)
    x = around_ties(step)
    data = te.placeholder(x.shape, "float32", "data")
    low, high = np.iinfo(kind).min, np.iinfo(kind).max

    def element(i):
        rounded = tirx.nearbyint(data(i) / tirx.const(float(step), "float32"))
        moved = rounded + tirx.const(float(zero), "float32") if zero else rounded
        bounds = (tirx.const(float(bound), "float32") for bound in (low, high))
        return tirx.min(tirx.max(moved, next(bounds)), next(bounds)).astype("int32").astype(kind)

    result = te.compute(x.shape, element, name="result")
    function = schedule_function(te.create_prim_func([data, result]), cpu)
    built = tvm.compile(
        tvm.IRModule({"main": function.with_attr("global_symbol", "main")}), target=cpu.target
    )
    if cpu.architecture == "x86_64":
        assert "vdivps" not in str(built.mod.inspect_source("asm"))
    y = tvm.runtime.tensor(np.zeros(x.shape, kind))
    built["main"](tvm.runtime.tensor(x), y)
    with np.errstate(over="ignore"):
        moved = np.rint(x / step) + np.float32(zero)
    expected = np.where(np.isnan(moved), low, np.clip(moved, low, high)).astype(kind)
    np.testing.assert_array_equal(y.numpy(), expected)


@pytest.mark.parametrize("lanes", [40, 37])
def test_truths_are_rounded_and_exponentiated(lanes):
    """TVM's analysis fails for comparisons of vectors that are cast and bound to a variable."""
    cpu = parse_cpu("")
    left, right = (te.placeholder((lanes,), "int32", name) for name in ("left", "right"))

    def element(i):
        truth = (left(i) == right(i)).astype("float32")
        rounded = tirx.nearbyint(truth / tirx.const(0.004, "float32"))
        bounds = (tirx.const(bound, "float32") for bound in (0.0, 255.0))
        return tirx.min(tirx.max(rounded, next(bounds)), next(bounds)).astype("int32")

    def curve(i):
        return tirx.sigmoid((left(i) < right(i)).astype("float32"))

    first = te.compute((lanes,), element, name="first")
    second = te.compute((lanes,), curve, name="second")
    function = te.create_prim_func([left, right, first, second])
    module = tvm.IRModule(
        {"main": schedule_function(function, cpu).with_attr("global_symbol", "main")}
    )
    built = tvm.compile(module, target=cpu.target)
    x, y = (np.arange(lanes, dtype=np.int32) % step for step in (3, 5))
    results = [tvm.runtime.tensor(np.zeros(lanes, dtype)) for dtype in ("int32", "float32")]
    built["main"](tvm.runtime.tensor(x), tvm.runtime.tensor(y), *results)
    np.testing.assert_array_equal(results[0].numpy(), np.where(x == y, 250, 0))
    np.testing.assert_allclose(results[1].numpy(), 1 / (1 + np.exp(-1.0 * (x < y))), rtol=1e-6)
