"""The stages of a compile, in order.

    read -> passes -> place -> lower -> build -> write -> verify

Each stage hands a value to the next and keeps nothing. The bundle is written beside its
destination and moved there only when it has passed its own check.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import onnx_ir as ir

import hybridc
from hybridc.bundle.manifest import (
    SCHEMA,
    DeviceSpec,
    Manifest,
    PartSpec,
    SampleSpec,
    TensorSpec,
    TransferSpec,
)
from hybridc.bundle.storage import staging_folder
from hybridc.bundle.tensors import Array, encode
from hybridc.bundle.write import BundleWriter, check_destination, publish, storage_error
from hybridc.errors import AccuracyError, BundleError, InternalError
from hybridc.frontend.read import Source, read_model
from hybridc.frontend.shapes import Request, model_inputs, specialize
from hybridc.lowering.lower import Lowered, Section, lower
from hybridc.lowering.ops import OperatorTable, default_table
from hybridc.passes.pipeline import run_passes
from hybridc.placement.pin import Pin
from hybridc.placement.plan import Part, Plan, make_plan, value_bytes
from hybridc.reference import Sample, run_reference
from hybridc.runtime.arrays import make_inputs, read_arrays
from hybridc.runtime.machine import why_not
from hybridc.targets.protocol import Artifact, Device
from hybridc.targets.registry import find_target

WEIGHTS = "weights.safetensors"
DEFAULT_TOLERANCE = 1e-4


@dataclass(frozen=True)
class Options:
    """What a compile is asked for.

    Attributes:
        model: The ONNX file.
        output: The bundle to write: a folder, or a file if it ends in ``.hyb``.
        devices: Devices that parts can be placed on; the first is the default.
        shapes: Dimensions by name of an input or of a dynamic dimension.
        pins: Nodes placed by hand.
        samples: Files with inputs for the check; seeded inputs are made if there are none.
        tolerance: Largest error relative to an output's scale.
        verify: Whether to compare with the reference and run the bundle at the end.
    """

    model: Path
    output: Path
    devices: tuple[Device, ...]
    shapes: Mapping[str, tuple[Request, ...]] = dataclasses.field(default_factory=dict)
    pins: tuple[Pin, ...] = ()
    samples: tuple[Path, ...] = ()
    tolerance: float = DEFAULT_TOLERANCE
    verify: bool = True


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


@dataclass(frozen=True)
class Prepared:
    """A model ready to be placed.

    Attributes:
        source: As it was read.
        model: After the passes.
        dimensions: Range of each dynamic dimension.
        notes: Optional steps that were left out.
    """

    source: Source
    model: ir.Model
    dimensions: Mapping[str, tuple[int, int]]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class BuiltPart:
    """A part with its code and the names of its weights."""

    part: Part
    artifact: Artifact
    weights: tuple[str, ...]


Progress = Callable[[str], None]


def compile_model(options: Options, progress: Progress = lambda _line: None) -> Report:
    """Compile a model to a bundle.

    Raises:
        UserError: Something the user can mend; its class says of which kind.
    """
    check_destination(options.output)
    progress(f"[1/6] reading {options.model}")
    prepared = prepare(options.model, options.shapes, progress)
    progress("[3/6] placing")
    plan = make_plan(prepared.model.graph, options.devices, options.pins)
    progress(f"[4/6] building {len(plan.parts)} part{'s' * (len(plan.parts) != 1)}")
    weights: dict[str, Array] = {}
    specs: dict[ir.Value, TensorSpec] = {}
    built = list(build_parts(plan, prepared.model.graph, weights, specs))
    with staging_folder(options.output) as folder:
        try:
            writer = BundleWriter(folder)
            manifest = describe(prepared, plan, built, specs, options)
            progress("[5/6] computing the reference")
            samples = list(_samples(manifest, options)) if options.verify else []
            manifest = _write(writer, manifest, built, weights, samples, options)
            progress("[6/6] checking the bundle in a fresh process")
            notes, errors = _check(folder, manifest, options)
            publish(folder, options.output)
        except OSError as error:
            raise storage_error(error, options.output) from error
    return Report(options.output, manifest, (*prepared.notes, *notes), errors)


def prepare(
    path: Path, shapes: Mapping[str, tuple[Request, ...]], progress: Progress = lambda _line: None
) -> Prepared:
    """Read a model, set its shapes and run the passes."""
    source = read_model(path)
    dimensions = specialize(source.model, shapes)
    progress(f"[2/6] simplifying {len(source.model.graph)} nodes")
    model, notes = run_passes(source.model)
    return Prepared(source, model, dimensions, tuple(notes))


def build_parts(
    plan: Plan, graph: ir.Graph, weights: dict[str, Array], specs: dict[ir.Value, TensorSpec]
) -> Iterator[BuiltPart]:
    """Lower and build each part; adds its weights to ``weights`` and its borders to ``specs``."""
    table = default_table()
    pool = _WeightPool(weights, {})
    for value in graph.inputs:
        specs[value] = _spec(value)
    for part in plan.parts:
        lowered = _lower_part(part, graph, table)
        for value, (shape, dtype) in zip(part.outputs, lowered.results, strict=True):
            _note_result(value, shape, dtype)
            specs[value] = _spec(value)
        artifact = find_target(part.device.kind).build(lowered.module, part.device.specification)
        names = tuple(pool.add(name, array) for name, array in lowered.weights.items())
        yield BuiltPart(part, artifact, names)


def _lower_part(part: Part, graph: ir.Graph, table: OperatorTable) -> Lowered:
    section = Section(part.nodes, part.inputs, part.outputs, graph.opset_imports)
    return lower(section, table)


def _note_result(value: ir.Value, shape: tuple[Any, ...], dtype: str) -> None:
    """Set what lowering found out on a value that crosses between parts."""
    dims = [dim if isinstance(dim, int) else ir.SymbolicDim(str(dim)) for dim in shape]
    value.shape = ir.Shape(dims)
    value.dtype = ir.DataType.from_numpy(_numpy_dtype(dtype))


def _numpy_dtype(name: str) -> Any:
    import ml_dtypes
    import numpy

    return numpy.dtype(getattr(ml_dtypes, name, name))


def _spec(value: ir.Value) -> TensorSpec:
    if value.shape is None or value.dtype is None:
        raise InternalError(f"value {value.name!r} has no shape or type")
    dims = tuple(dim if isinstance(dim, int) else str(dim.value) for dim in value.shape)
    return TensorSpec(str(value.name), value.dtype.numpy().name, dims)


@dataclass
class _WeightPool:
    """Weights by name; equal ones are stored once."""

    arrays: dict[str, Array]
    names: dict[tuple[str, tuple[int, ...], str], str]

    def add(self, name: str, array: Array) -> str:
        """Add a weight; returns the name it is stored under."""
        content = array if array.flags.c_contiguous else array.copy()
        digest = hashlib.sha256(content.reshape(-1).view("uint8").data).hexdigest()
        key = (array.dtype.name, array.shape, digest)
        if key not in self.names:
            self.names[key] = name
            self.arrays[name] = array
        return self.names[key]


def describe(
    prepared: Prepared,
    plan: Plan,
    built: Sequence[BuiltPart],
    specs: Mapping[ir.Value, TensorSpec],
    options: Options,
) -> Manifest:
    """The manifest, but for its samples and files."""
    graph = prepared.model.graph
    devices = tuple(_device_spec(device, built) for device in _used(plan))
    return Manifest(
        schema=f"{SCHEMA[0]}.{SCHEMA[1]}",
        hybridc=hybridc.__version__,
        tvm=version("apache-tvm"),
        tvm_ffi=version("apache-tvm-ffi"),
        model=prepared.source.path.name,
        model_sha256=prepared.source.sha256,
        inputs=tuple(specs[value] for value in model_inputs(prepared.model)),
        outputs=tuple(specs[value] for value in graph.outputs),
        dimensions=dict(prepared.dimensions),
        devices=devices,
        parts=tuple(_part_spec(item) for item in built),
        transfers=tuple(
            TransferSpec(
                str(value.name), source.name if source else "input", to.name, value_bytes(value)
            )
            for value, source, to in plan.crossings()
        ),
        runtime={d.architecture: _runtime_names(d.architecture, built) for d in devices},
        weights=WEIGHTS,
        tolerance=options.tolerance,
    )


def _used(plan: Plan) -> list[Device]:
    return list(dict.fromkeys(part.device for part in plan.parts))


def _device_spec(device: Device, built: Sequence[BuiltPart]) -> DeviceSpec:
    needs = find_target(device.kind).compatibility(device.specification)
    memory = sum(item.artifact.memory_bytes for item in built if item.part.device == device)
    return DeviceSpec(
        device.name, device.kind, needs.built_for, needs.architecture, needs.cpu_flags, memory
    )


def _part_spec(item: BuiltPart) -> PartSpec:
    part = item.part
    return PartSpec(
        name=part.name,
        device=part.device.name,
        library=f"parts/{part.name}.so",
        inputs=tuple(str(value.name) for value in part.inputs),
        outputs=tuple(str(value.name) for value in part.outputs),
        weights=item.weights,
        nodes=tuple(str(node.name) for node in part.nodes),
        memory_bytes=item.artifact.memory_bytes,
    )


def _runtime_names(architecture: str, built: Sequence[BuiltPart]) -> tuple[str, ...]:
    stems = dict.fromkeys(stem for item in built for stem in item.artifact.runtime)
    return tuple(f"lib/{architecture}/lib{stem}.so" for stem in stems)


def _samples(manifest: Manifest, options: Options) -> Iterator[Sample]:
    """Reference results for the samples given, or for seeded ones at the ends of the ranges."""
    if options.samples:
        for path in options.samples:
            yield run_reference(options.model, read_arrays(path, manifest.inputs))
        return
    ends = [{name: bounds[end] for name, bounds in manifest.dimensions.items()} for end in (0, 1)]
    for seed, sizes in enumerate(ends if manifest.dimensions else ends[:1]):
        yield run_reference(options.model, make_inputs(manifest.inputs, sizes, seed))


def _write(
    writer: BundleWriter,
    manifest: Manifest,
    built: Sequence[BuiltPart],
    weights: Mapping[str, Array],
    samples: Sequence[Sample],
    options: Options,
) -> Manifest:
    for item, spec in zip(built, manifest.parts, strict=True):
        writer.put(spec.library, [item.artifact.library])
    writer.put(WEIGHTS, encode(weights))
    _write_runtime(writer, manifest, options.devices)
    for name in ("LICENSE", "NOTICE"):
        writer.put(name, [_license_text(name)])
    stored = tuple(_write_sample(writer, i, sample) for i, sample in enumerate(samples))
    return writer.finish(dataclasses.replace(manifest, samples=stored))


def _write_runtime(writer: BundleWriter, manifest: Manifest, devices: Sequence[Device]) -> None:
    for device in devices:
        target = find_target(device.kind)
        architecture = target.compatibility(device.specification).architecture
        for name in manifest.runtime.get(architecture, ()):
            if name not in writer.files:
                stem = Path(name).stem.removeprefix("lib")
                writer.put(name, [target.runtime_library(stem, device.specification)])


def _license_text(name: str) -> bytes:
    from importlib.metadata import files

    for file in files("hybridc") or ():
        if file.name == name and "licenses" in file.parts:
            return file.read_binary()
    return (Path(__file__).resolve().parent.parent / name).read_bytes()


def _write_sample(writer: BundleWriter, index: int, sample: Sample) -> SampleSpec:
    inputs = writer.put(f"samples/{index}-inputs.safetensors", encode(sample.inputs))
    outputs = writer.put(f"samples/{index}-outputs.safetensors", encode(sample.outputs))
    return SampleSpec(inputs, outputs, sample.reference)


def _check(
    folder: Path, manifest: Manifest, options: Options
) -> tuple[list[str], tuple[Mapping[str, Any], ...]]:
    """Run the finished bundle in a process that has only the loader.

    Raises:
        AccuracyError: An output differs from the reference by more than the tolerance.
    """
    if not options.verify:
        return ["the bundle was not run: --no-verify"], ()
    for device in manifest.devices:
        reason = why_not(device)
        if reason:
            return [f"the bundle was not run: {device.name}: {reason}"], ()
    command = [sys.executable, "-m", "hybridc.runtime", str(folder)]
    environment = {**os.environ, "PYTHONSAFEPATH": "1"}  # import nothing from the user's folder
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    try:
        answer = json.loads(result.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        raise InternalError(
            f"the bundle broke the process that loaded it (exit {result.returncode}): "
            f"{result.stderr.strip()[-2000:]}"
        ) from None
    if "fault" in answer:
        raise BundleError(f"the bundle does not load: {answer['fault']}")
    wrong = [error for error in answer["errors"] if not error["within"]]
    if wrong:
        raise AccuracyError(_accuracy_message(wrong, options.tolerance))
    return [], tuple(answer["errors"])


def _accuracy_message(wrong: Sequence[Mapping[str, Any]], tolerance: float) -> str:
    lines = [
        f"  output {error['output']!r} of sample {error['sample']}: {error['error']:.3g}"
        for error in wrong
    ]
    head = f"results differ from the reference by more than {tolerance:g} relative"
    return "\n".join([f"{head}; no bundle was written:", *lines])
