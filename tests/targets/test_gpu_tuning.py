"""Choices that were measured on a GPU: schedules follow them, and kernels are measured alone."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import onnx
import pytest

tvm = pytest.importorskip("tvm")

from hybridc.targets.cuda.architectures import parse_gpu  # noqa: E402
from hybridc.targets.cuda.build import fused_kernels, planned_graph  # noqa: E402
from hybridc.targets.gpu.limits import Limits  # noqa: E402
from hybridc.targets.gpu.schedules import schedule_function  # noqa: E402
from hybridc.targets.gpu.schedules.choices import product_problem  # noqa: E402
from hybridc.targets.gpu.tunable import (  # noqa: E402
    Bench,
    calls_in_a_row,
    kernel_calls,
    tunable_kernels,
)
from hybridc.targets.protocol import Device  # noqa: E402
from hybridc.targets.tuning import Tuning, figures  # noqa: E402

from hybridc.errors import UsageError  # noqa: E402
from hybridc.runtime.tensors import HOST  # noqa: E402
from tests.gpu.emulation import lowered_model  # noqa: E402
from tests.models import make_model, node, random  # noqa: E402
from tests.targets.test_opencl import needs_device  # noqa: E402


def network(dtype: Any = np.float32) -> onnx.ModelProto:
    """A convolution, and two products with weights of the same sizes."""
    nodes = [
        node("Conv", "x a", "h", pads=[1, 1, 1, 1]),
        node("Reshape", "h shape", "f"),
        node("MatMul", "f b", "p"),
        node("Relu", "p", "r"),
        node("MatMul", "r c", "y"),
    ]
    weights = {
        "a": random(24, 16, 3, 3).astype(dtype),
        "b": random(64, 64, seed=1).astype(dtype),
        "c": random(64, 64, seed=2).astype(dtype),
        "shape": np.array([24, 64]),
    }
    return make_model(nodes, {"x": (1, 16, 8, 8)}, {"y": (24, 64)}, weights, dtype=dtype)


def unbuildable(_module: tvm.IRModule, _tuning: Tuning) -> bytes:
    raise AssertionError("a kernel was built")


def found(specification: str, dtype: Any = np.float32) -> tuple[tvm.IRModule, list[Any], Any]:
    """The fused kernels of the network, what can be tuned of it, and the GPU."""
    gpu = parse_gpu(specification)
    fused = fused_kernels(lowered_model(network(dtype))[0].module, gpu)
    bench = Bench(unbuildable, gpu.target, gpu.limits, HOST)
    return fused, tunable_kernels(fused, 2**20, bench), gpu


@pytest.mark.parametrize(
    ("specification", "dtype", "kind"),
    [
        ("sm_90", np.float32, "tiles"),
        ("sm_90,tf32", np.float32, "fragments"),
        ("sm_90", np.float16, "fragments"),
    ],
)
def test_kernels_of_the_same_problem_are_one(specification: str, dtype: Any, kind: str) -> None:
    _, kernels, _ = found(specification, dtype)
    assert {kernel.problem.kind for kernel in kernels} == {kind}
    costs = sorted(kernel.cost for kernel in kernels)
    product, convolution = 24 * 64 * 64, 24 * 64 * 144
    # The first product has an activation behind it, which is no part of the problem.
    assert costs == sorted([convolution, 2 * product])
    assert all(len(kernel.candidates) > 1 for kernel in kernels)


def with_choice(limits: Limits, problem: Any, **choice: int) -> Limits:
    return dataclasses.replace(limits, tuning=Tuning(((problem, figures(**choice)),)))


def scheduled(fused: tvm.IRModule, limits: Limits, target: Any) -> str:
    """All kernels, scheduled, as text."""
    functions = [f for f in fused.functions.values() if isinstance(f, tvm.tirx.PrimFunc)]
    with target:
        return "\n".join(schedule_function(function, limits).script() for function in functions)


@pytest.mark.parametrize("specification", ["sm_90", "sm_90,tf32"])
def test_a_choice_is_followed(specification: str) -> None:
    """The first is what is chosen without measurements; a tile that does not fit gives it, too."""
    fused, kernels, gpu = found(specification)
    plain = scheduled(fused, gpu.limits, gpu.target)
    for kernel in kernels:
        choices = [dict(choice) for choice in kernel.candidates[:3]]
        texts = [
            scheduled(fused, with_choice(gpu.limits, kernel.problem, **choice), gpu.target)
            for choice in choices
        ]
        assert texts[0] == plain
        assert len(set(texts)) > 1


@pytest.mark.parametrize("specification", ["sm_90", "sm_90,tf32"])
def test_a_choice_that_is_no_candidate_is_refused(specification: str) -> None:
    fused, (kernel, *_), gpu = found(specification)
    wrong = {**dict(kernel.candidates[0]), "slices": 3}
    limits = with_choice(gpu.limits, kernel.problem, **wrong)
    with pytest.raises(UsageError, match="none of its candidates"):
        scheduled(fused, limits, gpu.target)


def test_calls_in_a_row_become_a_cuda_graph() -> None:
    fused, _, gpu = found("sm_90")
    calls = kernel_calls(fused["main"])
    assert sum(call.count for call in calls.values()) >= 3
    name, call = next((n, c) for n, c in calls.items() if c.weights)
    graph = planned_graph(calls_in_a_row(fused[name], call, 4), gpu)
    captured = graph["main_cuda_graph_capture"].script()
    # The last one writes the result, which is allocated anew in each run.
    assert captured.count("kernel(") == 3


def test_weights_are_told_from_activations() -> None:
    calls = kernel_calls(found("sm_90")[0]["main"])
    assert {len(call.weights) for call in calls.values() if len(call.operands) > 1} == {1}


def opencl_kernels(at_once: int) -> list[Any]:
    """What can be tuned of the network on this machine's device, called so often in a row."""
    from hybridc.targets.opencl import measure

    lowered = lowered_model(network())[0]
    device = Device("opencl:0", "opencl")
    kernels = measure.tunable(lowered.module, lowered.weights, device, at_once=at_once)
    return sorted(kernels, key=lambda kernel: kernel.cost)


@needs_device
@pytest.mark.parametrize("at_once", [1, 3])
def test_a_kernel_runs_alone_on_the_device(at_once: int) -> None:
    kernel = opencl_kernels(at_once)[0]
    assert kernel.at_once == at_once
    run = kernel.build(kernel.candidates[0])
    assert run is not None
    for count in (at_once, 7 * at_once):
        run(count)
    # The same code again is not worth a measurement.
    assert kernel.build(kernel.candidates[0]) is None


def test_sizes_that_are_not_known_do_not_enter_a_problem() -> None:
    rows = tvm.te.var("rows", "int64")
    first = tvm.te.placeholder((rows, 4), "float16", name="first")
    second = tvm.te.placeholder((4, 4), "float16", name="second")
    summand = tvm.te.reduce_axis((0, 4), "summand")
    product = tvm.te.compute(
        (4, 4), lambda i, j: tvm.te.sum(first[i, summand] * second[summand, j], axis=summand)
    )
    function = tvm.te.create_prim_func([first, second, product])
    schedule = tvm.s_tir.Schedule(function)
    (block,) = schedule.get_child_blocks(schedule.get_sblock("root"))
    sizes = dict(product_problem("tiles", schedule.get(block), (1, 4, 4, 4)).sizes)
    assert (sizes["first_elements"], sizes["second_elements"], sizes["bits"]) == (4, 16, 16)
