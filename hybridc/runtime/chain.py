"""Bundles one after another, with steps of your own in Python between them.

A chain is a folder: a bundle for each stage, and a file that says what runs between them.

    both/chain.json           detect --> step "crops:cut" --> read
    both/detect/              what the first stage was compiled to
    both/read/                the second

A step is a function that you mark with :func:`step`. The chain names it as ``module:function``, and
it is imported where the chain is loaded; its code is not in the chain, and never goes to a server.
Only marked functions are called. The module that a chain names is imported before that is known,
and may do anything as it is imported: what is on the path of modules must be trusted.
"""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np

from hybridc.bundle.dtypes import dtype_named
from hybridc.bundle.manifest import TensorSpec, build_record
from hybridc.bundle.read import Bundle, open_bundle
from hybridc.bundle.tensors import Array
from hybridc.errors import BundleError, UsageError
from hybridc.runtime.loader import Model, load

if TYPE_CHECKING:
    from hybridc.runtime.remote_settings import RemoteSettings

CHAIN = "chain.json"
SCHEMA = "1.0"

_MARK = "__hybridc_step__"

Arrays = Mapping[str, Any]
Step = Callable[[dict[str, Any]], "Arrays | Sequence[Arrays]"]


@dataclass(frozen=True)
class StageSpec:
    """A stage of a chain.

    Attributes:
        name: The folder of its bundle.
        build: The digest of that bundle's manifest.
        step: What gives its inputs, as ``module:function``; empty for the first stage.
    """

    name: str
    build: str
    step: str = ""


@dataclass(frozen=True)
class ChainSpec:
    """What ``chain.json`` says."""

    schema: str
    stages: tuple[StageSpec, ...]


@dataclass(frozen=True)
class Stage:
    """A loaded stage: its name, what gives its inputs, and its model."""

    name: str
    step: Step | None
    model: Model


def step(function: Step) -> Step:
    """Mark a function that may run between two models.

    It takes a dict of all that is known by name: what the chain was called with, and the outputs of
    all stages before. It gives all inputs of the next stage by name; or a list of such dicts, for
    each of which the next stage runs. What these runs give is put together along the first axis.
    """
    setattr(function, _MARK, True)
    return function


def load_step(text: str) -> Step:
    """The function that a chain names.

    Raises:
        UsageError: It is not there, or was not marked.
    """
    module, _, name = text.partition(":")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise UsageError(
            f"the step {text} is not there: {error}; it is your code, and its module must be found "
            "where the chain is loaded, as by PYTHONPATH"
        ) from error
    if getattr(found, _MARK, None) is not True:
        raise UsageError(f"{text} is no step; mark it with @hybridc.runtime.chain.step")
    return found  # type: ignore[no-any-return]


class Chain:
    """A loaded chain.

    Attributes:
        stages: Its stages in order; each model has its own status, plan and manifest.
    """

    missed: tuple[str, ...] = ()

    def __init__(self, stages: Sequence[Stage]) -> None:
        self.stages = tuple(stages)

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """The inputs of the first stage."""
        return self.stages[0].model.inputs

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """The outputs of all stages; after a step there may be more rows than these say."""
        return tuple(spec for stage in self.stages for spec in stage.model.outputs)

    @property
    def plan(self) -> dict[str, tuple[str, ...]]:
        """Names of the ONNX nodes that run on each device."""
        nodes: dict[str, tuple[str, ...]] = {}
        for stage in self.stages:
            for device, own in stage.model.plan.items():
                nodes[device] = nodes.get(device, ()) + own
        return nodes

    def __call__(self, /, **arrays: Any) -> dict[str, Array]:
        """Run the chain on arrays given by input name; see :meth:`run`."""
        return self.run(arrays)

    def run(self, arrays: Arrays) -> dict[str, Array]:
        """Run all stages with the steps between them.

        Args:
            arrays: The inputs by name. What has another name is for the steps alone.

        Returns:
            The outputs of all stages by name.

        Raises:
            UsageError: An input is missing or wrong, or a step gave something else than inputs.
        """
        known: dict[str, Any] = dict(arrays)
        results: dict[str, Array] = {}
        for stage in self.stages:
            names = {spec.name for spec in stage.model.inputs}
            calls: list[Arrays] = [{n: array for n, array in arrays.items() if n in names}]
            if stage.step is not None:
                calls = as_calls(f"before {stage.name}", stage.step(dict(known)))
            found = [stage.model.run(own) for own in calls]
            together = found[0] if len(found) == 1 else _together(stage.model.outputs, found)
            known |= together
            results |= together
        return results

    def close(self) -> None:
        """Release all stages."""
        for stage in self.stages:
            stage.model.close()

    def __enter__(self) -> Chain:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def as_calls(name: str, given: Any) -> list[Arrays]:
    """What a step gave, as the inputs of each run of its stage.

    Raises:
        UsageError: It is something else.
    """
    calls = list(given) if isinstance(given, (list, tuple)) else [given]
    for own in calls:
        if not isinstance(own, Mapping):
            raise UsageError(
                f"the step {name} gave a {type(own).__name__} and must give a dict of arrays by "
                "the names of the next model's inputs, or a list of such dicts"
            )
    return calls


def _together(specs: Sequence[TensorSpec], runs: Sequence[Mapping[str, Array]]) -> dict[str, Array]:
    """Outputs of several runs, along the first axis; without a run, arrays without a row."""
    if runs:
        return {s.name: np.concatenate([np.atleast_1d(run[s.name]) for run in runs]) for s in specs}
    dims = {spec.name: [d if isinstance(d, int) else 0 for d in spec.shape[1:]] for spec in specs}
    return {spec.name: np.zeros((0, *dims[spec.name]), dtype_named(spec.dtype)) for spec in specs}


def load_chain(
    path: str | os.PathLike[str],
    *,
    threads: int | None = None,
    remote: str | RemoteSettings | None = None,
) -> Chain:
    """Load a chain.

    Args:
        path: Its folder, or the file in it.
        threads: Threads of one call; see :func:`hybridc.load`.
        remote: Where the server is, for the stages that have a plan with one.

    Raises:
        UsageError: A step is not there; or see :func:`hybridc.load`.
        BundleError: The chain is damaged, or a stage is not the one that it was compiled with.
    """
    folder = chain_folder(Path(path)) or Path(path)
    opened, stages = open_stages(folder), []
    steps = [load_step(spec.step) if spec.step else None for spec, _ in opened]
    try:
        for (own, bundle), function in zip(opened, steps, strict=True):
            settings = remote if bundle.manifest.plans else None
            model = load(folder / own.name, threads=threads, remote=settings)
            stages.append(Stage(own.name, function, model))
    except BaseException:
        Chain(stages).close()
        raise
    return Chain(stages)


def chain_folder(path: Path) -> Path | None:
    """The folder of a chain, given that or the file in it; ``None`` if it is no chain."""
    if path.name == CHAIN and path.is_file():
        return path.parent
    return path if (path / CHAIN).exists() else None


def open_stages(path: Path) -> list[tuple[StageSpec, Bundle]]:
    """The stages of a chain with their bundles, opened; no step is imported.

    Raises:
        UsageError: It is no chain.
        BundleError: It is damaged, or a bundle is not the one that it was written with.
    """
    folder = chain_folder(path) or path
    stages = []
    for spec in read_chain(folder).stages:
        bundle = open_bundle(folder / spec.name)
        if bundle.digest != spec.build:
            raise BundleError(f"{folder}: {spec.name} is not the bundle that it was written with")
        stages.append((spec, bundle))
    return stages


def read_chain(path: Path) -> ChainSpec:
    """What a chain's folder says that it is.

    Raises:
        UsageError: It is no chain.
        BundleError: It is damaged, or of a newer schema.
    """
    try:
        text = (path / CHAIN).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is no chain of models: {error}") from error
    try:
        spec: ChainSpec = build_record(ChainSpec, json.loads(text), "chain")
    except (ValueError, TypeError, RecursionError) as error:
        raise BundleError(f"{path / CHAIN} is damaged: {error}") from error
    if spec.schema.partition(".")[0] != SCHEMA.partition(".")[0]:
        raise BundleError(f"{path / CHAIN} has schema {spec.schema}, and this reads {SCHEMA}")
    if not spec.stages or spec.stages[0].step or not all(s.step for s in spec.stages[1:]):
        raise BundleError(f"{path / CHAIN} is damaged: each stage but the first needs a step")
    if any(
        Path(stage.name).name != stage.name or stage.name in ("", "..") for stage in spec.stages
    ):
        raise BundleError(f"{path / CHAIN} is damaged: a stage is not in its folder")
    return spec
