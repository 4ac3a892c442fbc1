"""Winograd's algorithm on GPUs: its kernels on the CPU, their source, and what they are for."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hybridc.targets.cuda.architectures import parse_gpu
from hybridc.targets.gpu.schedules.winograd_choice import (
    Geometry,
    winograd_problem,
)
from hybridc.targets.gpu.winograd import geometry_of, with_winograd
from hybridc.targets.llvm.layout.graph import bindings_of
from hybridc.targets.llvm.layout.main_writer import weight_names
from hybridc.targets.tuning import Tuning, figures

from hybridc.lowering.lower import Lowered
from tests.gpu.emulation import run_serially
from tests.models import make_model, node, random, run_reference

LIMITS = parse_gpu("sm_90").limits


def geometries(lowered: Lowered) -> list[Geometry]:
    """The convolutions that the algorithm can compute."""
    names = weight_names(lowered.module, lowered.weights)
    values = [getattr(binding, "value", None) for binding in bindings_of(lowered.module["main"])]
    found = [geometry_of(value, names) for value in values]
    return [geometry for geometry in found if geometry is not None]


def forced(size: int, **limits: Any) -> Callable[[Lowered], Lowered]:
    """Lets all convolutions have tiles of a size, as if measured."""

    def pack(lowered: Lowered) -> Lowered:
        problems = {winograd_problem(geometry) for geometry in geometries(lowered)}
        tuning = Tuning(tuple((problem, figures(size=size)) for problem in problems))
        chosen = dataclasses.replace(LIMITS, tuning=tuning, **limits)
        module, weights = with_winograd(lowered.module, lowered.weights, chosen)
        return dataclasses.replace(lowered, module=module, weights=dict(weights))

    return pack


def convolution(
    batch: int,
    channels: int,
    filters: int,
    size: tuple[int, int],
    pads: tuple[int, int, int, int] = (1, 1, 1, 1),
    epilogue: str = "",
    **attributes: Any,
) -> Any:
    """A convolution with a bias and perhaps what follows it."""
    top, left, bottom, right = pads
    shape = (batch, filters, size[0] + top + bottom - 2, size[1] + left + right - 2)
    nodes = [node("Conv", "x w b", "c", pads=list(pads), **attributes)]
    inputs: dict[str, Any] = {"x": (batch, channels, *size)}
    last = "c"
    if "sum" in epilogue:
        nodes.append(node("Add", f"{last} r", "s"))
        inputs["r"], last = shape, "s"
    if "relu" in epilogue:
        nodes.append(node("Relu", last, "y"))
        last = "y"
    weights = {"w": random(filters, channels, 3, 3, seed=1), "b": random(filters, seed=2)}
    return make_model(nodes, inputs, {last: shape}, weights)


def feeds_of(model: Any) -> dict[str, Any]:
    weights = {tensor.name for tensor in model.graph.initializer}
    feeds = {}
    for seed, value in enumerate(model.graph.input):
        if value.name not in weights:
            dims = [dim.dim_value for dim in value.type.tensor_type.shape.dim]
            feeds[value.name] = random(*dims, seed=seed + 3)
    return feeds


def check(model: Any, size: int, tolerance: float = 1e-5) -> None:
    """Compare with ONNX Runtime, in units of the largest result."""
    feeds = feeds_of(model)
    results = run_serially(model, feeds, pack=forced(size))
    for name, expected in run_reference(model, feeds).items():
        assert results[name].shape == expected.shape
        error = np.abs(results[name] - expected).max() / np.abs(expected).max()
        assert error <= tolerance, error


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("epilogue", ["", "relu", "sum", "sum relu"])
@pytest.mark.parametrize("image", [(8, 8), (7, 10)])
def test_results_are_those_of_onnx_runtime(
    size: int, epilogue: str, image: tuple[int, int]
) -> None:
    check(convolution(2, 9, 11, image, epilogue=epilogue), size)
