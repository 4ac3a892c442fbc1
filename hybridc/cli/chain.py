"""Compile models with steps between them: each stage by itself, then a chain of the bundles.

A step runs where the chain is loaded, so what is between two stages is on this end, and the time of
the whole is the sum of the stages' times: placing each by itself is placing all of them.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from hybridc.bundle.storage import SUFFIX, staging_folder
from hybridc.errors import DeviceError, RemoteMissing, UsageError
from hybridc.frontend.pipe import Stage

if TYPE_CHECKING:
    from hybridc.compiler import Report

Values = Mapping[str, Any]
CompileStage = Callable[[Stage, Path, Values, Sequence[Path]], "Report"]

_NAMED = ("shapes", "bindings", "pin", "forbid", "release", "private", "residency")
"""Options whose texts begin with a name in a model."""

_OF_THE_WHOLE = {
    "max_latency": "the time of all stages together",
    "memory": "the memory of all stages together",
    "plan_file": "one bundle",
    "rules_file": "one bundle; give its rules as options",
}


def compile_chain(
    stages: Sequence[Stage],
    output: Path,
    values: Values,
    samples: Sequence[Path],
    compile_stage: CompileStage,
) -> dict[str, Report]:
    """Compile stages to bundles in a folder, with a description of the chain.

    Args:
        stages: The stages.
        output: The folder.
        values: The options of the command line.
        samples: Inputs of the first stage; those of the others come from running what was compiled.
        compile_stage: Compiles one of them.

    Returns:
        What came of each stage, by its name.

    Raises:
        UsageError: An option is for one bundle only, or the folder cannot be written.
    """
    _check(output, values)
    if values["remote"] is not None and values["repository"] is None:
        values = {**values, "repository": output.with_name(f"{output.name}-repository")}
    with staging_folder(output) as folder, TemporaryDirectory() as scratch:
        known = _Samples(samples, Path(scratch))
        reports = _compile_stages(stages, folder, values, known, compile_stage)
        _refuse_idle_server(values, reports)
        _write_chain(stages, folder)
        _publish(folder, output)
    return {
        name: dataclasses.replace(report, output=output / name) for name, report in reports.items()
    }


def _compile_stages(
    stages: Sequence[Stage],
    folder: Path,
    values: Values,
    known: _Samples,
    compile_stage: CompileStage,
) -> dict[str, Report]:
    """Compile each stage to a bundle in a folder, with inputs that those before it give."""
    reports = {}
    for stage in stages:
        own, given = _values_of(stage, stages, values), known.before(stage)
        reports[stage.name] = _compile(stage, folder / stage.name, own, given, compile_stage)
        if stage is not stages[-1]:
            known.after(folder / stage.name)
    return reports


def _write_chain(stages: Sequence[Stage], folder: Path) -> None:
    """Write what the chain of the bundles in a folder is."""
    from hybridc.bundle.read import open_bundle
    from hybridc.runtime.chain import CHAIN, SCHEMA, ChainSpec, StageSpec

    specs = tuple(
        StageSpec(stage.name, open_bundle(folder / stage.name).digest, stage.step)
        for stage in stages
    )
    text = json.dumps(dataclasses.asdict(ChainSpec(SCHEMA, specs)), indent=1)
    (folder / CHAIN).write_text(text + "\n", "utf-8")


def _publish(folder: Path, output: Path) -> None:
    """Move a chain to its place, where one that was there before goes; an empty folder stays."""
    folder.chmod(0o755)
    if output.exists():
        shutil.rmtree(output)
    os.rename(folder, output)
    folder.mkdir()


def _check(output: Path, values: Values) -> None:
    from hybridc.runtime.chain import CHAIN

    for name, what in _OF_THE_WHOLE.items():
        if values[name]:
            option = f"--{name.removesuffix('_file').replace('_', '-')}"
            raise UsageError(f"{option} is for {what}, and a --step makes a chain of several")
    if output.suffix == SUFFIX:
        raise UsageError(f"a --step makes a chain, which is a folder; give -o without {SUFFIX}")
    if output.exists() and not (output / CHAIN).exists():
        raise UsageError(f"{output} is in the way and is no chain; choose another -o")


def _compile(
    stage: Stage,
    place: Path,
    values: Values,
    samples: Sequence[Path],
    compile_stage: CompileStage,
) -> Report:
    """A stage, without the server if nothing of it may or should run there."""
    from hybridc.remote.plans import NothingForServer

    try:
        return compile_stage(stage, place, values, samples)
    except NothingForServer as error:
        report = compile_stage(stage, place, _without_server(values), samples)
        note = f"{stage.name} runs here: {error}"
        return dataclasses.replace(report, notes=(*report.notes, note))


def _refuse_idle_server(values: Values, reports: Mapping[str, Report]) -> None:
    if values["remote"] is None or any(own.manifest.plans for own in reports.values()):
        return
    from hybridc.remote.plans import NothingForServer

    reasons = "; ".join(report.notes[-1] for report in reports.values())
    raise NothingForServer(f"the server has nothing to do in any stage: {reasons}")


def _without_server(values: Values) -> Values:
    """The options of a compile for this end alone."""
    server = str(values["remote"]).partition("=")[0]

    def stays(text: str) -> bool:
        return server not in text.partition("=")[0].split("-")

    none = dict.fromkeys(("private", "residency", "region", "release"), ())
    kept = {name: tuple(filter(stays, values[name])) for name in ("links", "profiles")}
    return {**values, **none, **kept, "remote": None, "objective": "latency"}


def _values_of(stage: Stage, stages: Sequence[Stage], values: Values) -> dict[str, Any]:
    """The options that are about a stage; what a step gives is as private as the inputs are."""
    everyone = [prefix for other in stages for prefix in other.prefixes]
    inputs, dimensions = _names_of(stage)
    elsewhere = {name for other in stages for name in _names_of(other)[1]} - dimensions

    def is_own(text: str) -> bool:
        owner = max((p for p in everyone if text.startswith(p)), key=len, default=None)
        name = text.partition("=")[0]
        return owner in stage.prefixes if owner is not None else name not in elsewhere

    own = {name: tuple(filter(is_own, values[name])) for name in _NAMED}
    own["keep_on"] = tuple(pair for pair in values["keep_on"] if is_own(pair[1]))
    if stage.step:
        regions = {text.rpartition("=")[2] for text in values["residency"] if "=" in text}
        bound = {text.partition("=")[0] for text in own["bindings"]}
        given = [name for name in inputs if name not in bound]
        if values["private"]:
            own["private"] = (*own["private"], *(n for n in given if n not in own["private"]))
        own["residency"] += tuple(f"{name}={region}" for name in given for region in regions)
    return {**values, **own}


def _names_of(stage: Stage) -> tuple[list[str], set[str]]:
    """Inputs of a stage as they are called in it, and its dynamic dimensions."""
    import onnx

    fed = {text.partition("=")[2] for text in stage.pipes}
    inputs, dimensions = [], set()
    for path, prefix in zip(stage.paths, stage.prefixes, strict=True):
        graph = onnx.load(path, load_external_data=False).graph
        weights = {tensor.name for tensor in graph.initializer}
        for value in graph.input:
            if value.name not in weights and f"{path.stem}:{value.name}" not in fed:
                inputs.append(prefix + value.name)
            dimensions |= {dim.dim_param for dim in value.type.tensor_type.shape.dim}
    return inputs, dimensions - {""}


class _Samples:
    """Inputs of each stage in turn, as far as they are known.

    Args:
        paths: Those of the first stage.
        folder: Where those of the others are written.
    """

    def __init__(self, paths: Sequence[Path], folder: Path) -> None:
        self._paths, self._folder = list(paths), folder
        self._known: list[dict[str, Any]] = []

    def before(self, stage: Stage) -> list[Path]:
        """Files with a stage's inputs; none if they are not known."""
        from hybridc.runtime.arrays import write_arrays
        from hybridc.runtime.chain import as_calls, load_step

        if not stage.step:
            return self._paths
        paths: list[Path] = []
        for known in self._known:
            for own in as_calls(stage.step, load_step(stage.step)(dict(known))):
                paths.append(self._folder / f"{stage.name}-{len(paths)}.npz")
                write_arrays(paths[-1], own)
        self._paths = paths
        return paths

    def after(self, bundle: Path) -> None:
        """Run a stage on its samples; one that cannot run here leaves the next without any."""
        from hybridc.runtime.arrays import read_arrays
        from hybridc.runtime.loader import load

        if not self._paths:
            self._known = []
            return
        try:
            with load(bundle) as model:
                inputs = [read_arrays(path, model.inputs) for path in self._paths]
                self._known = [{**own, **model.run(own)} for own in inputs]
        except (DeviceError, RemoteMissing):
            self._known = []
