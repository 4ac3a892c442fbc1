"""The stages of a compile, in order.

    read -> passes -> place -> lower -> build -> write -> check

Each stage hands a value to the next and keeps nothing. The bundle is written beside its
destination and moved there only when it has passed its own check.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
import tvm_ffi

from hybridc.bundle.manifest import Manifest, TensorSpec
from hybridc.bundle.storage import staging_folder
from hybridc.bundle.tensors import Array
from hybridc.bundle.write import check_destination, publish, storage_error
from hybridc.errors import AccuracyError, BundleError, InternalError
from hybridc.frontend.bind import bind_inputs
from hybridc.frontend.read import Source, read_model
from hybridc.frontend.shapes import Request, specialize
from hybridc.lowering.lower import Section, lower
from hybridc.lowering.ops import OperatorTable, default_table
from hybridc.packaging import Built, BuiltPart, WeightPool, describe, write_bundle
from hybridc.passes.pipeline import run_passes
from hybridc.placement.pin import Pin
from hybridc.placement.plan import Plan, make_plan
from hybridc.reference import Sample, run_reference
from hybridc.runtime.arrays import make_inputs, read_arrays
from hybridc.runtime.executor import LoadedPart
from hybridc.runtime.library import load_library
from hybridc.runtime.loader import Model
from hybridc.runtime.machine import why_not
from hybridc.runtime.tensors import to_tensor
from hybridc.targets.protocol import Device
from hybridc.targets.registry import find_target

DEFAULT_TOLERANCE = 1e-4


@dataclass(frozen=True)
class Options:
    """What a compile is asked for.

    Attributes:
        devices: Devices that parts can be placed on; the first is the default.
        shapes: Dimensions by name of an input or of a dynamic dimension.
        bindings: Values of inputs that are always the same.
        pins: Nodes placed by hand.
        samples: Files with inputs for the check; seeded inputs are made if there are none.
        tolerance: Largest error relative to an output's scale.
        verify: Whether to compare with the reference and run the bundle at the end.
    """

    devices: tuple[Device, ...]
    shapes: Mapping[str, tuple[Request, ...]] = field(default_factory=dict)
    bindings: Mapping[str, Array] = field(default_factory=dict)
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


Progress = Callable[[str], None]


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
    with staging_folder(output) as folder:
        try:
            manifest = describe(built)
            progress("[5/6] computing the reference")
            samples = list(_samples(model, built, manifest, options)) if options.verify else []
            manifest = write_bundle(folder, built, manifest, samples)
            progress("[6/6] checking the bundle in a fresh process")
            more_notes, errors = _check(folder, manifest, options)
            publish(folder, output)
        except OSError as error:
            raise storage_error(error, output) from error
    return Report(output, manifest, (*notes, *more_notes), errors)


def build(
    source: Source, options: Options, progress: Progress = lambda _line: None
) -> tuple[Built, tuple[str, ...]]:
    """Compile a model in memory; returns it with a note for each step that was left out.

    The source's model is changed.
    """
    bound = bind_inputs(source.model, options.bindings)
    dimensions = specialize(source.model, options.shapes)
    progress(f"[2/6] simplifying {len(source.model.graph)} nodes")
    table = default_table()
    model, notes = run_passes(source.model, table.lowers)
    progress(f"[3/6] placing {len(model.graph)} nodes")
    plan = make_plan(model.graph, options.devices, options.pins)
    progress(f"[4/6] building {len(plan.parts)} part{'s' * (len(plan.parts) != 1)}")
    pool = WeightPool()
    specs = {value: _spec(value) for value in model.graph.inputs}
    parts = tuple(_build_parts(plan, model.graph, table, pool, specs))
    built = Built(
        source, model, plan, parts, pool.arrays, specs, bound, dimensions, options.tolerance
    )
    return built, tuple(notes)


def _build_parts(
    plan: Plan,
    graph: ir.Graph,
    table: OperatorTable,
    pool: WeightPool,
    specs: dict[ir.Value, TensorSpec],
) -> Iterator[BuiltPart]:
    """Lower and build each part; its weights go to ``pool``, its outputs' types to ``specs``."""
    for part in plan.parts:
        section = Section(part.nodes, part.inputs, part.outputs, graph.opset_imports)
        lowered = lower(section, table)
        for value, (shape, dtype) in zip(part.outputs, lowered.results, strict=True):
            _note_result(value, shape, dtype)
            specs[value] = _spec(value)
        artifact = find_target(part.device.kind).build(lowered.module, part.device.specification)
        names = tuple(pool.add(name, array) for name, array in lowered.weights.items())
        yield BuiltPart(part, artifact, names)


def _note_result(value: ir.Value, shape: tuple[Any, ...], dtype: str) -> None:
    """Set what lowering found out on a value that crosses between parts."""
    dims = [dim if isinstance(dim, int) else ir.SymbolicDim(str(dim)) for dim in shape]
    value.shape = ir.Shape(dims)
    value.dtype = ir.DataType.from_numpy(np.dtype(getattr(ml_dtypes, dtype, dtype)))


def _spec(value: ir.Value) -> TensorSpec:
    if value.shape is None or value.dtype is None:
        raise InternalError(f"value {value.name!r} has no shape or type")
    dims = tuple(dim if isinstance(dim, int) else str(dim.value) for dim in value.shape)
    return TensorSpec(str(value.name), value.dtype.numpy().name, dims)


def load_built(built: Built) -> Model:
    """Load a model that was compiled in memory, in this process, without writing a bundle."""
    manifest = describe(built)
    parts = [
        LoadedPart(
            spec,
            load_library(spec.library, item.artifact.library),
            tvm_ffi.Array([to_tensor(built.weights[name]) for name in spec.weights]),
        )
        for spec, item in zip(manifest.parts, built.parts, strict=True)
    ]
    return Model(manifest, parts)


def _samples(model: Path, built: Built, manifest: Manifest, options: Options) -> Iterator[Sample]:
    """Reference results for the samples given, or for seeded ones at the ends of the ranges."""
    if options.samples:
        for path in options.samples:
            yield run_reference(model, read_arrays(path, manifest.inputs), built.bound)
        return
    ends = [{name: bounds[end] for name, bounds in manifest.dimensions.items()} for end in (0, 1)]
    for seed, sizes in enumerate(ends if manifest.dimensions else ends[:1]):
        yield run_reference(model, make_inputs(manifest.inputs, sizes, seed), built.bound)


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
    answer = _run_loader(folder)
    if "fault" in answer:
        raise BundleError(f"the bundle does not load: {answer['fault']}")
    wrong = [error for error in answer["errors"] if not error["within"]]
    if wrong:
        raise AccuracyError(_accuracy_message(wrong, options.tolerance))
    return [], tuple(answer["errors"])


def _run_loader(folder: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "hybridc.runtime", str(folder)]
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


def _accuracy_message(wrong: Sequence[Mapping[str, Any]], tolerance: float) -> str:
    lines = [
        f"  output {error['output']!r} of sample {error['sample']}: {error['error']:.3g}"
        for error in wrong
    ]
    head = f"results differ from the reference by more than {tolerance:g} relative"
    return "\n".join([f"{head}; no bundle was written:", *lines])
