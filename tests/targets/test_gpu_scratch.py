"""Scratch between kernels becomes an output: planned with the rest, and never left in a kernel."""

import numpy as np
import pytest
from hybridc.targets.cuda.architectures import parse_gpu
from hybridc.targets.gpu.pipeline import fuse
from hybridc.targets.gpu.schedules import schedule_module
from hybridc.targets.gpu.scratch import lift_scratch, scratch_of

from tests.gpu.emulation import lowered_model, run_serially
from tests.gpu.models import SMALL
from tests.models import random, run_reference


def scheduled(model, *shapes):
    gpu = parse_gpu("sm_90")
    with gpu.target:
        return schedule_module(
            fuse(lowered_model(model, *shapes)[0].module), gpu.target, gpu.limits
        )


def total(module):
    return sum(len(scratch_of(function)) for function in module.functions.values())


@pytest.mark.parametrize("name", ["argmax-reductions", "topk", "tiles-64"])
def test_nothing_is_left(name):
    module = scheduled(SMALL[name]())
    assert total(module) > 0
    lifted = lift_scratch(module)
    assert total(lifted) == 0
    names = {variable.name_hint for variable in module.functions}
    assert {variable.name_hint for variable in lifted.functions} == names


def test_a_module_without_scratch_is_given_back():
    module = scheduled(SMALL["add"]())
    assert lift_scratch(module).same_as(module)


def test_two_results_and_scratch():
    """TopK returns two tensors; its scratch must not take the place of either."""
    model = SMALL["topk"]()
    feeds = {"x": random(5, 300, seed=3)}
    results = run_serially(model, feeds)
    for name, expected in run_reference(model, feeds).items():
        assert np.array_equal(results[name], expected)
