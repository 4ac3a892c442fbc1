"""Two models on the same inputs: errors of their outputs, and of all tensors that both name.

A bundle is run by the loader, as it is; an ONNX model in ONNX Runtime. Tensors inside are compared
between ONNX models only, where reading them breaks no fusion of a bundle.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import onnx

from hybridc.bundle.manifest import TensorSpec
from hybridc.bundle.tensors import Array
from hybridc.errors import UsageError
from hybridc.frontend.read import read_model
from hybridc.frontend.shapes import Range
from hybridc.precision.budget import cosine_between, relative_difference
from hybridc.precision.observe import with_outputs
from hybridc.precision.samples import Sample, specs_of
from hybridc.reference import open_session
from hybridc.runtime.arrays import make_inputs
from hybridc.runtime.loader import load

ONNX_SUFFIX = ".onnx"


@dataclass(frozen=True)
class Difference:
    """How much a tensor differs between two models.

    Attributes:
        name: Its name in the first.
        relative: Largest error over the first's largest magnitude, the worst of all samples.
        cosine: Smallest cosine of all samples.
    """

    name: str
    relative: float
    cosine: float


@dataclass(frozen=True)
class Runnable:
    """A model that can be run.

    Attributes:
        path: Where it is.
        inputs: Its inputs.
        sizes: Lowest and highest value of dynamic dimensions, where they are known.
        run: Runs it.
    """

    path: Path
    inputs: tuple[TensorSpec, ...]
    sizes: Mapping[str, Range]
    run: Callable[[Mapping[str, Array]], Mapping[str, Array]]

    @property
    def is_onnx(self) -> bool:
        """Whether it is an ONNX model."""
        return self.path.suffix == ONNX_SUFFIX


def open_model(path: Path) -> Runnable:
    """Open an ONNX model, by its suffix, or a bundle.

    Raises:
        UserError: It cannot be opened.
    """
    if path.suffix == ONNX_SUFFIX:
        specs = specs_of(read_model(path).model)
        return Runnable(path, specs, {}, open_session(path))
    model = load(path)
    sizes = {name: Range(*bounds) for name, bounds in model.manifest.dimensions.items()}
    return Runnable(path, model.inputs, sizes, model.run)


def random_samples(models: Iterable[Runnable], count: int) -> list[Sample]:
    """Seeded inputs for the first of the models of which all sizes are known.

    Raises:
        UsageError: There is none.
    """
    for model in models:
        names = {dim for spec in model.inputs for dim in spec.shape if isinstance(dim, str)}
        if names <= set(model.sizes):
            sizes = {name: size.low for name, size in model.sizes.items()}
            return [make_inputs(model.inputs, sizes, seed) for seed in range(count)]
    raise UsageError("the models have dynamic dimensions, so inputs cannot be made up; give --data")


def output_differences(
    first: Runnable, second: Runnable, samples: Iterable[Sample]
) -> list[Difference]:
    """Errors of the outputs that both have, or of the only one of each.

    Raises:
        UsageError: They have none in common.
    """
    collected = _Collected()
    for sample in samples:
        old, new = first.run(sample), second.run(sample)
        if len(old) == len(new) == 1:
            new = dict(zip(old, new.values(), strict=True))
        shared = [name for name in old if name in new]
        if not shared:
            names = ", ".join(old), ", ".join(new)
            raise UsageError(f"no output has the same name in both: {names[0]}; {names[1]}")
        for name in shared:
            collected.add(name, old[name], new[name])
    return collected.differences()


def layer_differences(
    first: Runnable, second: Runnable, samples: Iterable[Sample]
) -> list[Difference]:
    """Errors of all float tensors with the same name and shape in two ONNX models, in order.

    Raises:
        UsageError: One of them is a bundle.
    """
    if not (first.is_onnx and second.is_onnx):
        raise UsageError("--layers compares two ONNX models; compile with --keep-model to get one")
    models = [onnx.load(model.path) for model in (first, second)]
    known = {name for node in models[1].graph.node for name in node.output}
    names = [n for node in models[0].graph.node for n in node.output if n and n in known]
    run_first, run_second = (open_session(with_outputs(model, names)) for model in models)
    collected = _Collected()
    for sample in samples:
        old, new = run_first(sample), run_second(sample)
        for name in names:
            if old[name].shape == new[name].shape and old[name].dtype.kind == "f":
                collected.add(name, old[name], new[name])
    return collected.differences()


class _Collected:
    """The worst errors so far, by name."""

    def __init__(self) -> None:
        self._worst: dict[str, tuple[float, float]] = {}

    def add(self, name: str, old: Array, new: Array) -> None:
        """Take a tensor of one sample into account."""
        relative, cosine = relative_difference(old, new), cosine_between(old, new)
        before = self._worst.get(name, (0.0, 1.0))
        self._worst[name] = (max(before[0], relative), min(before[1], cosine))

    def differences(self) -> list[Difference]:
        """What was collected, in the order in which it came."""
        return [Difference(name, *worst) for name, worst in self._worst.items()]
