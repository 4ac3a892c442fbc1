"""The stages of a compile, in order.

    read -> passes -> place -> lower -> build -> write -> check

Each stage hands a value to the next and keeps nothing. The bundle is written beside its
destination and moved there only when it has passed its own check.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import onnx_ir as ir

from hybridc.bundle.manifest import STRING, UNKNOWN_RANK, Manifest, TensorSpec
from hybridc.bundle.storage import staging_folder
from hybridc.bundle.tensors import Array
from hybridc.bundle.write import check_destination, publish, storage_error
from hybridc.errors import AccuracyError, BudgetError, BundleError, InternalError
from hybridc.frontend.bind import bind_inputs
from hybridc.frontend.read import Source, read_model
from hybridc.frontend.shapes import Range, model_inputs, specialize
from hybridc.frontend.shapes import Request as ShapeRequest
from hybridc.lowering.ops import default_table
from hybridc.packaging import (
    Built,
    BuiltPart,
    WeightPool,
    as_alternative,
    describe,
    describe_alternative,
    part_files,
    runtime_files,
    write_bundle,
)
from hybridc.packed_code import keeping
from hybridc.passes.pipeline import run_passes
from hybridc.placement.decide import Decision, Request
from hybridc.placement.describe import Origin, describe_plan
from hybridc.placement.fallback import Placed, place_and_lower
from hybridc.placement.hardware import Hardware
from hybridc.placement.merged import merged_nodes, trace
from hybridc.placement.plan import Plan
from hybridc.placement.plan_file import PlanFile
from hybridc.placement.problem import LATENCY
from hybridc.placement.rules import Rules, RuleTexts
from hybridc.placement.solvers.choose import DEFAULT_SECONDS
from hybridc.progress import Progress
from hybridc.reference import Sample, run_reference
from hybridc.remote.audit import audit
from hybridc.runtime.arrays import make_inputs, read_arrays
from hybridc.runtime.library import is_absent, load_runtime
from hybridc.runtime.loader import Model
from hybridc.runtime.machine import why_not
from hybridc.runtime.parts import SESSION_KIND, load_part
from hybridc.runtime.tensors import to_tensor
from hybridc.targets.protocol import Device, Target
from hybridc.targets.registry import find_target, strict_target
from hybridc.tuning.tune import TuningJob, tune, tuned_target

DEFAULT_TOLERANCE = 1e-4


@dataclass(frozen=True)
class Options:
    """What a compile is asked for.

    Attributes:
        devices: Devices that parts can be placed on; the first is the default.
        shapes: Dimensions by name of an input or of a dynamic dimension.
        bindings: Values of inputs that are always the same.
        rules: What the placement must keep to.
        hardware: Costs of the devices; without them nodes go to the first device that can run them.
        objective: What the placement minimizes.
        solve_seconds: Time for the placement's solver.
        fixed: Device of each node by name, out of an edited plan.
        remote: Name of the device that is on a server, if one is.
        texts: The options ``--shape`` and ``--bind`` as they were given, for the plan.
        rule_texts: The rules as they were given, for the plan.
        samples: Files with inputs for the check; seeded inputs are made if there are none.
        tolerance: Largest error relative to an output's scale.
        fallback: Whether ONNX Runtime may run what no device's target compiles.
        isolate: Whether native code of others may run in child processes, which is safe only in a
            process without other threads.
        verify: Whether to compare with the reference and run the bundle at the end.
        cache: Folder of built kernels, which targets take from and add to.
        tuning: Choices that were measured, and how long to measure more.
        strict_math: Whether kernels may change sums in nothing but their order.
        alternatives: Devices that run all of the model where those before cannot, in that order.
    """

    devices: tuple[Device, ...]
    shapes: Mapping[str, tuple[ShapeRequest, ...]] = field(default_factory=dict)
    bindings: Mapping[str, Array] = field(default_factory=dict)
    rules: Rules = field(default_factory=Rules)
    hardware: Hardware | None = None
    objective: str = LATENCY
    solve_seconds: float = DEFAULT_SECONDS
    fixed: Mapping[str, str] | None = None
    remote: str | None = None
    texts: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
    rule_texts: RuleTexts = field(default_factory=RuleTexts)
    samples: tuple[Path, ...] = ()
    tolerance: float = DEFAULT_TOLERANCE
    fallback: bool = True
    isolate: bool = False
    verify: bool = True
    cache: Path | None = None
    tuning: TuningJob | None = None
    strict_math: bool = False
    alternatives: tuple[Device, ...] = ()


@dataclass(frozen=True)
class Report:
    """What a compile did.

    Attributes:
        output: Where the bundle is.
        manifest: Its description.
        notes: Steps left out and checks not made, with reasons.
        errors: Error of each output, by sample; empty if nothing was compared.
    """

    output: Path
    manifest: Manifest
    notes: tuple[str, ...]
    errors: tuple[Mapping[str, Any], ...]


def compile_model(
    model: Path, output: Path, options: Options, progress: Progress = lambda _line: None
) -> Report:
    """Compile an ONNX file to a bundle: a folder, or one file if ``output`` ends in ``.hyb``.

    Raises:
        UserError: Something the user can mend; its class says of which kind.
    """
    check_destination(output)
    progress(f"[1/6] reading {model}")
    built, notes = build(read_model(model), options, progress)
    others, more_notes = _build_alternatives(model, options, progress)
    with staging_folder(output) as folder:
        try:
            manifest = _describe_ways(built, others)
            progress("[5/6] computing the reference")
            samples = list(make_samples(model, built, manifest, options))
            manifest = write_bundle(folder, built, manifest, samples, others)
            progress("[6/6] checking the bundle in a fresh process")
            last_notes, errors = check_bundle(folder, manifest, options)
            publish(folder, output, keeping(options.cache))
        except OSError as error:
            raise storage_error(error, output) from error
    return Report(output, manifest, (*notes, *more_notes, *last_notes), errors)


def _build_alternatives(
    model: Path, options: Options, progress: Progress
) -> tuple[list[Built], list[str]]:
    """The model for each device that runs it where those before it are missing; with notes."""
    built, notes = [], []
    for number, device in enumerate(options.alternatives, 1):
        progress(f"      for {device.name}, where the devices before it are missing:")
        alone = dataclasses.replace(
            options, devices=(device,), rules=Rules(), hardware=None, objective=LATENCY, fixed=None
        )
        found, own_notes = build(read_model(model), alone, progress)
        built.append(as_alternative(found, number))
        notes += [f"for {device.name}: {note}" for note in own_notes]
    return built, notes


def _describe_ways(built: Built, others: Sequence[Built]) -> Manifest:
    alternatives = (describe_alternative(other, n) for n, other in enumerate(others, 1))
    return dataclasses.replace(describe(built), alternatives=tuple(alternatives))


def build(
    source: Source, options: Options, progress: Progress = lambda _line: None
) -> tuple[Built, tuple[str, ...]]:
    """Compile a model in memory; returns it with a note for each step that was left out.

    The source's model is changed.
    """
    model, placed, plan, prepared = plan_model(source, options, progress)
    parts = placed.plan.parts
    tuning, tuning_notes = options.tuning, list[str]()
    if tuning is not None:
        tuning, tuning_notes = tune(
            tuning, placed, lambda device: target_of(device, options), progress
        )
    progress(f"[4/6] building {len(parts)} part{'s' * (len(parts) != 1)}")
    pool = WeightPool()
    built_parts = tuple(_build_parts(placed, pool, options, tuning))
    keep_memory(built_parts, options.rules)
    specs = {
        value: spec_of(value, source.types)
        for value in (*model_inputs(model), *model.graph.outputs)
    }
    built = Built(
        source,
        model,
        placed,
        built_parts,
        pool.arrays,
        specs,
        prepared.bound,
        prepared.dimensions,
        options.tolerance,
        plan,
    )
    notes = plan.notes if len(options.devices) > 1 else ()
    return built, (*prepared.notes, *notes, *tuning_notes)


@dataclass(frozen=True)
class Prepared:
    """What was found out about a model before it was placed.

    Attributes:
        bound: Values of inputs that were bound.
        dimensions: Range of each dynamic dimension.
        notes: A line for each pass that was left out.
    """

    bound: Mapping[str, Array]
    dimensions: Mapping[str, Range]
    notes: tuple[str, ...]


def plan_model(
    source: Source, options: Options, progress: Progress = lambda _line: None
) -> tuple[ir.Model, Placed, PlanFile, Prepared]:
    """Simplify and place a model, without building code. The source's model is changed."""
    bound = bind_inputs(source.model, options.bindings)
    dimensions = specialize(source.model, options.shapes)
    progress(f"[2/6] simplifying {len(source.model.graph)} nodes")
    before = trace(source.model.graph)
    model, notes = run_passes(source.model, default_table().lowers, options.isolate)
    progress(f"[3/6] placing {len(model.graph)} nodes")
    request = make_request(options, dimensions)
    placed = place_and_lower(model.graph, request, options.fallback, dimensions)
    if placed.refusals:
        progress(f"      {len(placed.refusals)} of them are left to ONNX Runtime")
    origin = origin_of(source, options, merged_nodes(before, model.graph))
    plan = describe_placement(model.graph, placed.decision, placed.plan, request, origin)
    return model, placed, plan, Prepared(bound, dimensions, tuple(notes))


def origin_of(source: Source, options: Options, merged: Mapping[str, str] | None = None) -> Origin:
    """Where a plan of a compile comes from, and what became of nodes that are gone."""
    texts = (*options.texts, options.rule_texts)
    return Origin(source.path.name, source.sha256, *texts, merged or {})


def describe_placement(
    graph: ir.Graph, decision: Decision, plan: Plan, request: Request, origin: Origin
) -> PlanFile:
    """The file of a placement, with what crosses to a server if there is one."""
    file = describe_plan(decision, request, origin)
    if request.remote is None:
        return file
    sizes = {tensor.name: tensor.bytes for tensor in file.tensors}
    return dataclasses.replace(file, audit=audit(graph, plan, request.rules, request.remote, sizes))


def make_request(options: Options, dimensions: Mapping[str, Range]) -> Request:
    """What a placement is asked for, by a compile's options."""
    return Request(
        options.devices,
        options.rules,
        options.hardware,
        options.objective,
        options.solve_seconds,
        {name: size.high for name, size in dimensions.items()},
        options.fixed,
        options.remote,
        options.strict_math,
    )


def target_of(device: Device, options: Options) -> Target:
    """The target that builds for a device."""
    return strict_target(find_target(device.kind, options.cache), options.strict_math)


def _build_parts(
    placed: Placed, pool: WeightPool, options: Options, tuning: TuningJob | None
) -> Iterator[BuiltPart]:
    """Build each part; its weights go to ``pool``."""
    for part, lowered in zip(placed.plan.parts, placed.lowered, strict=True):
        target = tuned_target(target_of(part.device, options), part.device, tuning)
        artifact = target.build(lowered, part.device.specification)
        names = tuple(pool.add(name, array) for name, array in artifact.weights.items())
        yield BuiltPart(part, artifact, names)


def keep_memory(parts: Sequence[BuiltPart], rules: Rules) -> None:
    """Hold the built code to the limits on memory: weights, intermediate tensors, one thread's."""
    for rule in rules.limits:
        own = [item for item in parts if item.part.device.name == rule.device]
        weights = {name: array.nbytes for item in own for name, array in _weights(item)}
        work = (item.artifact.memory_bytes + item.artifact.thread_bytes for item in own)
        used = sum(weights.values()) + sum(work)
        if rule.option == "memory" and used > rule.most:
            raise BudgetError(
                f"{rule} is not kept: the code that was built takes {used} bytes there, "
                f"{sum(weights.values())} of them for weights"
            )


def _weights(item: BuiltPart) -> Iterator[tuple[str, Array]]:
    """A part's weights by the name that they are stored under."""
    return zip(item.weights, item.artifact.weights.values(), strict=True)


def spec_of(value: ir.Value, types: Mapping[str, str]) -> TensorSpec:
    """Name, type and shape of a value; ``types`` has the text of what is no tensor."""
    name = str(value.name)
    text = types.get(name, "")
    if text and not text.startswith("tensor("):
        return TensorSpec(name, text, ())
    if value.dtype is None:
        raise InternalError(f"value {value.name!r} has no type")
    dtype = STRING if value.dtype == ir.DataType.STRING else value.dtype.numpy().name
    if value.shape is None:
        return TensorSpec(name, dtype, (UNKNOWN_RANK,))
    return TensorSpec(name, dtype, tuple(map(_dimension, value.shape)))


def _dimension(dim: int | ir.SymbolicDim) -> int | str:
    return dim if isinstance(dim, int) else str(dim.value or "?")


def load_built(built: Built) -> Model:
    """Load a model that was compiled in memory, in this process, without writing a bundle."""
    manifest = describe(built)
    libraries = runtime_files(manifest, built.placed.plan)
    for names in manifest.runtime.values():
        absent = [name for name in names if is_absent(name)]
        load_runtime(manifest, lambda name: libraries[name](), absent)
    weights = {name: to_tensor(array) for name, array in built.weights.items()}
    files = part_files(built)
    parts = [load_part(manifest, spec, files.__getitem__, weights) for spec in manifest.parts]
    return Model(manifest, parts)


def make_samples(
    model: Path, built: Built, manifest: Manifest, options: Options
) -> Iterator[Sample]:
    """Reference results for the samples given, or for seeded ones at the ends of the ranges."""
    if not options.verify or _incomparable(manifest):
        return
    sessions = (device for device in options.devices if device.kind == SESSION_KIND)
    operators = [device.specification for device in sessions if device.specification]
    if options.samples:
        for path in options.samples:
            yield run_reference(model, read_arrays(path, manifest.inputs), built.bound, operators)
        return
    ends = [{name: bounds[end] for name, bounds in manifest.dimensions.items()} for end in (0, 1)]
    for seed, sizes in enumerate(ends if manifest.dimensions else ends[:1]):
        inputs = make_inputs(manifest.inputs, sizes, seed)
        yield run_reference(model, inputs, built.bound, operators)


def check_bundle(
    folder: Path, manifest: Manifest, options: Options, repository: Path | None = None
) -> tuple[list[str], tuple[Mapping[str, Any], ...]]:
    """Run the finished bundle in a process that has only the loader.

    Args:
        folder: The bundle.
        manifest: Its description.
        options: What was asked for.
        repository: The model repository that its plans with a server are run with.

    Raises:
        AccuracyError: An output differs from the reference by more than the tolerance.
    """
    if not options.verify:
        return ["the bundle was not run: --no-verify"], ()
    notes = [note for way in manifest.ways() for note in _reasons_not_to_run(way)]
    if len(notes) == len(manifest.ways()):
        return notes, ()
    answer = _run_loader(folder, repository)
    if "fault" in answer:
        raise BundleError(f"the bundle does not load: {answer['fault']}")
    loose = _incomparable(manifest)
    if loose:
        return [*notes, f"nothing was compared: {loose[0].name!r} is a {loose[0].dtype}"], ()
    wrong = [error for error in answer["errors"] if not error["within"]]
    if wrong:
        raise AccuracyError(_accuracy_message(wrong))
    return notes, tuple(answer["errors"])


def _reasons_not_to_run(way: Manifest) -> list[str]:
    """Why this machine cannot run a way to run the model, in one line; none if it can."""
    reasons = ((device, why_not(device)) for device in way.devices)
    found = [f"the bundle was not run: {device.name}: {why}" for device, why in reasons if why]
    return found[:1]


def _incomparable(manifest: Manifest) -> list[TensorSpec]:
    """Inputs and outputs that no sample can hold: sequences, maps and optionals."""
    return [spec for spec in (*manifest.inputs, *manifest.outputs) if not spec.is_tensor]


def _run_loader(folder: Path, repository: Path | None) -> dict[str, Any]:
    command = [sys.executable, "-m", "hybridc.runtime", str(folder)]
    if repository is not None:
        command.append(str(repository))
    environment = {**os.environ, "PYTHONSAFEPATH": "1"}  # import nothing from the user's folder
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    try:
        answer: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        raise InternalError(
            f"the bundle broke the process that loaded it (exit {result.returncode}): "
            f"{result.stderr.strip()[-2000:]}"
        ) from None
    return answer


def _accuracy_message(wrong: Sequence[Mapping[str, Any]]) -> str:
    lines = [
        f"  output {error['output']!r} of sample {error['sample']}"
        f"{error['plan'] and ' by ' + error['plan']}: {error['error']:.3g}"
        for error in wrong
    ]
    head = f"results differ from the reference by more than {wrong[0]['limit']:g} relative"
    return "\n".join([f"{head}; no bundle was written:", *lines])
