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
