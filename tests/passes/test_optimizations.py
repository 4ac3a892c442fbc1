"""Random graphs compute the same after every optimization."""

import numpy as np
import onnx
import onnx_ir as ir
from hybridc.passes.infer_shapes import InferShapes
from hybridc.passes.pipeline import optimizations
from hypothesis import HealthCheck, assume, given, settings

from tests.graphs import generator
from tests.models import run_reference
from tests.support import assert_close

MOVEMENT = (
    generator.transpose, generator.transpose, generator.transpose, generator.unary,
    generator.binary, generator.with_constant, generator.reshape, generator.slice_,
    generator.concat, generator.gather, generator.pad, generator.reduce, generator.normalize,
    generator.compare_and_choose, generator.clip, generator.round_trip, generator.expand,
)  # fmt: skip


def check(model, feeds):
    expected = run_reference(model, feeds)
    assume(all(np.isfinite(array).all() for array in expected.values()))
    after = InferShapes()(ir.from_proto(model)).model
    for step in optimizations():
        after = step.make()(after).model
        proto = ir.to_proto(after)
        onnx.checker.check_model(proto, full_check=True)
        assert_close(run_reference(proto, feeds), expected, 1e-4)


@settings(
    max_examples=150, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
@given(generator.graphs(kinds=MOVEMENT, most=14))
def test_graphs_that_move_data(case):
    check(*case)


@settings(
    max_examples=100, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
@given(generator.graphs(most=12))
def test_graphs_of_all_kinds(case):
    check(*case)
