"""Tensors between the loop nests of a kernel are allocated as a whole where indices are odd."""

from __future__ import annotations

import numpy as np
from hybridc.targets.llvm.cpu import parse_cpu
from hybridc.targets.llvm.schedules import schedule_function
from hybridc.targets.llvm.schedules.blocks import collect
from hybridc.targets.regions import EXPLICIT
from hypothesis import example, given
from hypothesis import strategies as st
from tvm import te, tirx
from tvm.s_tir import SBlock

from hybridc import onnx_backend
from tests.models import make_model, node, random, run_reference
from tests.support import assert_close
from tests.targets.properties import kernel_examples


def padded(operator, mode, shape, pads):
    """A model that pads what an operator computes."""
    sizes = [size + sum(pads[axis :: len(shape)]) for axis, size in enumerate(shape)]
    nodes = [node(operator, "x", "between"), node("Pad", "between pads", "y", mode=mode)]
    return make_model(nodes, {"x": shape}, {"y": sizes}, {"pads": np.array(pads)}, opset=19)


@kernel_examples(25)
@example("Exp", "reflect", (8, 171, 1), 128, 128)
@example("Sin", "reflect", (3, 90, 1), 70, 0)
@given(
    operator=st.sampled_from(["Exp", "Softmax", "Sin"]),
    mode=st.sampled_from(["reflect", "wrap", "edge"]),
    sizes=st.tuples(st.integers(1, 9), st.integers(2, 90), st.sampled_from([1, 1, 2, 8])),
    before=st.integers(0, 99),
    after=st.integers(0, 99),
)
def test_padded_results(operator, mode, sizes, before, after):
    pads = [0, before % sizes[1], 0, 0, after % sizes[1], 0]
    model, feeds = padded(operator, mode, sizes, pads), {"x": random(*sizes)}
    result = onnx_backend.run_model(model, [feeds["x"]], fallback=False)[0]
    assert_close({"y": result}, run_reference(model, feeds))


def test_what_is_declared():
    """The tensor between is read as a whole where the index is odd, and as before elsewhere."""
    x = te.placeholder((8, 171), "float32", "x")
    between = te.compute((8, 171), lambda i, j: te.exp(x[i, j]), "between")

    def reading(index):
        result = te.compute((8, 300, 1), lambda i, j, k: between[i, index(j)], "result")
        function = schedule_function(te.create_prim_func([x, result]), parse_cpu("x86-64-v3"))
        (reader,) = [b for b in collect(function.body, SBlock) if b.name_hint == "result"]
        (read,) = reader.reads
        return EXPLICIT in reader.annotations, [int(r.extent) for r in read.region]

    def odd(j):
        return tirx.Select(j % 170 >= 99, j % 170 - 99, j % 170)

    assert reading(odd) == (True, [8, 171])
    assert reading(lambda j: tirx.floormod(j + 3, 171)) == (False, [1, 1])
