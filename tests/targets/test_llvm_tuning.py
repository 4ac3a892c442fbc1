"""Choices that were measured: schedules follow them, and every candidate gives right results."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

tvm = pytest.importorskip("tvm")

from hybridc.targets.llvm.build import make_kernels  # noqa: E402
from hybridc.targets.llvm.cpu import Cpu, parse_cpu  # noqa: E402
from hybridc.targets.llvm.layout.products import product_geometry  # noqa: E402
from hybridc.targets.llvm.schedules import schedule_function, winograd_tiles  # noqa: E402
from hybridc.targets.llvm.schedules.blocked_tiles import (  # noqa: E402
    Geometry,
    choice_of,
    choose_tiling,
    choose_vectors,
    problem_of,
    rank_choices,
)
from hybridc.targets.llvm.schedules.winograd_transforms import SIZES  # noqa: E402
from hybridc.targets.llvm.tunable import tunable_kernels  # noqa: E402
from hybridc.targets.tuning import Figures, Problem, TunableKernel, Tuning, figures  # noqa: E402
from tvm import relax  # noqa: E402

from hybridc.errors import UsageError  # noqa: E402
from tests.targets.properties import kernel_examples  # noqa: E402
from tests.targets.test_llvm_layouts import (  # noqa: E402
    CONVOLUTIONS,
    check_kernel,
    geometry,
    network,
)
from tests.targets.test_llvm_products import Array, perceptron  # noqa: E402
from tests.targets.test_llvm_schedules import draw  # noqa: E402
from tests.targets.test_llvm_winograd import check, kernel_of  # noqa: E402

op = relax.op


def tuned(cpu: Cpu, problem: Problem, choice: Figures) -> Cpu:
    return dataclasses.replace(cpu, tuning=Tuning(((problem, choice),)))


def wholes(cpu: Cpu) -> list[Geometry]:
    """Geometries for which a number of vectors is still to be chosen."""
    lanes = cpu.vector_bytes // 4
    found = [
        geometry(shape, n, kernel, lanes, **options) for shape, n, kernel, options in CONVOLUTIONS
    ]
    return [*found, dataclasses.replace(product_geometry(19, 40, 70, cpu), vectors=1)]


@pytest.mark.parametrize("name", ["x86-64-v3", "x86-64-v4", "aarch64"])
def test_the_first_candidate_is_what_is_chosen_without_measurements(name: str) -> None:
    cpu = parse_cpu(name)
    for whole in wholes(cpu):
        chosen = choose_vectors(whole, cpu)
        tiling = choose_tiling(chosen, cpu, True)
        assert next(iter(rank_choices(whole, cpu))) == choice_of(chosen, tiling)


def test_a_choice_is_followed(cpu: Cpu) -> None:
    for whole in wholes(cpu):
        for choice in list(rank_choices(whole, cpu))[:20]:
            chosen = choose_vectors(whole, tuned(cpu, problem_of(whole), choice))
            other = tuned(cpu, problem_of(whole), choice)
            assert choice_of(chosen, choose_tiling(chosen, other, True)) == choice


def test_a_folded_plane_is_not_forced_on_what_cannot_fold(cpu: Cpu) -> None:
    whole = geometry((1, 16, 12, 12), 16, (1, 1), cpu.vector_bytes // 4)
    folded = next(c for c in rank_choices(whole, cpu) if dict(c)["columns"] > 12)
    found = choose_vectors(whole, tuned(cpu, problem_of(whole), folded))
    tiling = choose_tiling(found, tuned(cpu, problem_of(whole), folded), False)
    assert (tiling.rows, tiling.columns) == (12, 12)


@pytest.mark.parametrize("change", [{"vectors": 77}, {"tile_columns": 999}, {"rows": 3}])
def test_a_choice_that_is_no_candidate_is_refused(cpu: Cpu, change: dict[str, int]) -> None:
    whole = geometry((1, 32, 14, 14), 64, (3, 3), cpu.vector_bytes // 4, pad=1)
    choice = figures(**{**dict(next(iter(rank_choices(whole, cpu)))), **change})
    other = tuned(cpu, problem_of(whole), choice)
    with pytest.raises(UsageError, match="which is none of its candidates"):
        choose_tiling(choose_vectors(whole, other), other, True)


@kernel_examples(10)
@given(
    data=st.data(),
    size=st.tuples(st.integers(1, 12), st.integers(1, 12)),
    channels=st.integers(1, 24),
    filters=st.integers(1, 40),
    kernel=st.sampled_from([(1, 1), (3, 3), (1, 2)]),
    pad=st.integers(0, 1),
    depthwise=st.booleans(),
)
def test_every_candidate_gives_right_results(
    cpu: Cpu,
    data: st.DataObject,
    size: tuple[int, int],
    channels: int,
    filters: int,
    kernel: tuple[int, int],
    pad: int,
    depthwise: bool,
) -> None:
    height, width = (max(s, k) for s, k in zip(size, kernel, strict=True))
    groups, filters = (channels, channels) if depthwise and channels > 1 else (1, filters)
    shape = (1, channels, height, width)
    lanes = cpu.vector_bytes // 4
    whole = geometry(shape, filters, kernel, lanes, pad=min(pad, kernel[0] - 1), groups=groups)
    choice = data.draw(st.sampled_from(list(rank_choices(whole, cpu))))
    other = tuned(cpu, problem_of(whole), choice)
    check_kernel(choose_vectors(whole, other), shape, filters, other)


def test_candidates_of_winograds_algorithm(cpu: Cpu) -> None:
    """They are followed and give right results; none is offered for strict math."""
    direct = geometry((1, 16, 9, 11), 40, (3, 3), cpu.vector_bytes // 4, pad=1)
    ranked = list(winograd_tiles.rank_winograd(direct, cpu))
    assert {dict(choice)["winograd"] for choice in ranked} == set(SIZES)
    for choice in ranked[:: len(ranked) // 3]:
        other = tuned(cpu, problem_of(direct), choice)
        found = winograd_tiles.fastest(direct, other)
        chunking = winograd_tiles.choose_chunking(found, other)
        assert winograd_tiles.choice_of(found, chunking) == choice
        function, shapes = kernel_of(found)
        check(schedule_function(function, other), shapes, found, other)
    assert winograd_tiles.rank_winograd(direct, dataclasses.replace(cpu, strict_math=True)) == {}


def test_a_measured_algorithm_is_followed(cpu: Cpu) -> None:
    large = geometry((1, 64, 56, 56), 64, (3, 3), cpu.vector_bytes // 4, pad=1)
    assert winograd_tiles.fastest(choose_vectors(large, cpu), cpu).winograd
    direct = next(iter(rank_choices(large, cpu)))
    other = tuned(cpu, problem_of(large), direct)
    assert not winograd_tiles.fastest(choose_vectors(large, other), other).winograd
    wrong = tuned(cpu, problem_of(large), figures(winograd=3, vectors=1, tiles=1, panels=1))
    with pytest.raises(UsageError, match="none of its candidates"):
        winograd_tiles.fastest(choose_vectors(large, wrong), wrong)


def plain_kernels(builder: relax.BlockBuilder, x: Any, weight: Callable[[Array], Any]) -> Any:
    """A convolution with a weight that is computed, and a product of two tensors."""
    (kernel,) = draw([(20, 6, 3, 3)], 9)
    known = builder.emit(op.multiply(weight(kernel), op.mean(x)))
    y = builder.emit(op.nn.relu(builder.emit(op.nn.conv2d(x, known))))
    flat = builder.emit(op.reshape(y, (20, 80)))
    return builder.emit(op.matmul(builder.emit(op.permute_dims(flat, [1, 0])), flat))


def find(cpu: Cpu, shape: Sequence[int], net: Any, kind: str) -> tuple[Any, TunableKernel]:
    """The fused module of a network, with its one kernel of a kind."""
    module, weights = network(shape, net)
    fused, _ = make_kernels(module, weights, cpu)
    (kernel,) = [one for one in tunable_kernels(fused, 10_000, cpu) if one.problem.kind == kind]
    return fused, kernel


def outputs(fused: Any, x: Array, weights: Sequence[Array], cpu: Cpu) -> Array:
    functions = {
        name: schedule_function(function, cpu)
        if isinstance(function, tvm.tirx.PrimFunc)
        else function
        for name, function in fused.functions.items()
    }
    module = tvm.IRModule(functions, attrs=fused.attrs)
    machine = relax.VirtualMachine(relax.build(module, cpu.target), tvm.cpu())
    arrays = tuple(tvm.runtime.tensor(array) for array in weights)
    return machine["main"](tvm.runtime.tensor(x), arrays)[0].numpy()


@pytest.mark.parametrize("kind", ["convolution", "product"])
def test_plain_kernels_follow_choices_and_stay_right(kind: str) -> None:
    cpu = parse_cpu("")
    shape = (1, 6, 10, 12)
    fused, kernel = find(cpu, shape, plain_kernels, kind)
    (x,) = draw([shape])
    _, weights = network(shape, plain_kernels)
    arrays = list(weights.values())
    expected = outputs(fused, x, arrays, cpu)
    step = len(kernel.candidates) // 4
    for choice in kernel.candidates[step::step]:
        kernel.build(choice)(2)
        got = outputs(fused, x, arrays, tuned(cpu, kernel.problem, choice))
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)


def test_kernels_of_a_part(cpu: Cpu) -> None:
    """Equal kernels are one, whose cost is that of all calls; each candidate is other code."""
    module, weights = network((1, 19, 40), perceptron)
    fused, _ = make_kernels(module, weights, cpu)
    found = [one for one in tunable_kernels(fused, 10_000, cpu) if one.problem.kind == "blocked"]
    (kernel,) = found
    whole = dataclasses.replace(product_geometry(19, 40, 40, cpu), vectors=1)
    assert kernel.problem == problem_of(whole)
    ranked = rank_choices(whole, cpu)
    assert list(kernel.candidates) == list(ranked)
    assert kernel.cost == pytest.approx(2 * min(ranked.values()))
    for choice in kernel.candidates[:2]:
        kernel.build(choice)(2)
