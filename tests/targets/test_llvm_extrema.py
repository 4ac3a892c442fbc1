"""Maxima and minima that start from infinity, as ONNX's do, in vectors of partial results."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

tvm = pytest.importorskip("tvm")

from hybridc.targets.llvm.cpu import Cpu, parse_cpu  # noqa: E402
from hybridc.targets.llvm.schedules import schedule_function  # noqa: E402
from hybridc.targets.llvm.schedules.blocks import collect  # noqa: E402
from tvm import te, tirx  # noqa: E402

LEAST = float(np.finfo("float32").min)


def extremum(name: str, rows: int, size: int, floor: float | None = None) -> Any:
    """The maximum or minimum of each row, optionally of values that are at least ``floor``."""
    combine = getattr(tirx, name)
    start = float("-inf") if name == "max" else float("inf")
    reducer = te.comm_reducer(
        lambda a, b: combine(a, b), lambda dtype: tirx.const(start, dtype), name="extremum"
    )
    sizes = [tirx.IntImm("int64", dim) for dim in (rows, size)]
    data = te.placeholder(sizes, "float32", "data")
    axis = te.reduce_axis((tirx.IntImm("int64", 0), sizes[1]), "k")

    def element(row: Any) -> Any:
        value = data(row, axis)
        if floor is not None:
            value = tirx.max(value, tirx.const(floor, "float32"))
        return reducer(value, axis=axis)

    return te.create_prim_func([data, te.compute(sizes[:1], element, name="extremum")])


def run(function: Any, cpu: Cpu, x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    library = tvm.compile(tvm.IRModule({"main": function}), target=cpu.target)
    result = tvm.runtime.tensor(np.zeros(x.shape[0], "float32"))
    library["main"](tvm.runtime.tensor(x), result)
    return np.asarray(result.numpy())


@pytest.mark.parametrize("size", [5, 64, 508, 1009])
@pytest.mark.parametrize("name", ["max", "min"])
def test_rows_of_infinities_stay_infinite(cpu: Cpu, name: str, size: int) -> None:
    x = np.random.default_rng(size).standard_normal((6, size)).astype("float32")
    x[1] = -np.inf
    x[2] = np.inf
    x[3, 0] = LEAST
    x[4, -1] = -LEAST
    function = schedule_function(extremum(name, *x.shape), cpu)
    np.testing.assert_array_equal(run(function, cpu, x), getattr(x, name)(axis=1))


@pytest.mark.parametrize("target", ["x86-64-v3", "x86-64-v4", "aarch64"])
def test_rows_are_reduced_in_vectors(target: str) -> None:
    function = schedule_function(extremum("max", 64, 508), parse_cpu(target))
    kinds = {loop.kind for loop in collect(function.body, tirx.For)}
    assert tirx.ForKind.VECTORIZED in kinds


def test_a_function_that_uses_the_finite_limit_keeps_it(cpu: Cpu) -> None:
    x = np.full((4, 64), -np.inf, "float32")
    function = schedule_function(extremum("max", 4, 64, floor=LEAST), cpu)
    np.testing.assert_array_equal(run(function, cpu, x), np.full(4, LEAST, "float32"))
