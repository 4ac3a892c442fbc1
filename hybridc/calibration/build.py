"""Build a calibration bundle: micro-kernels, and every group of the models that matter.

Each group is built as a part of its own by every target that can compile it, in the way in which a
compile builds parts. :mod:`hybridc.calibration.kernel` says what is done to time it as it would run
in the middle of a part. What a target can compile of a model in one piece is built as a whole, too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

import onnx_ir as ir

import hybridc
from hybridc.bundle.manifest import SCHEMA as BUNDLE_SCHEMA
from hybridc.bundle.manifest import Manifest, PartSpec, TensorSpec
from hybridc.bundle.storage import staging_folder
from hybridc.bundle.tensors import Array, encode
from hybridc.bundle.write import BundleWriter, check_destination, publish, storage_error
from hybridc.calibration.micro import micro_model
from hybridc.calibration.record import (
    BANDWIDTH,
    CALIBRATION,
    CALL,
    GROUP,
    LAUNCH,
    SCHEMA,
    WHOLE,
    Calibration,
    Code,
    Kernel,
    to_json,
)
from hybridc.cost_models.group_work import GroupWork, describe_group
from hybridc.errors import UnsupportedError, UsageError
from hybridc.frontend.bind import bind_inputs
from hybridc.frontend.read import read_model
from hybridc.frontend.shapes import Request as ShapeRequest
from hybridc.frontend.shapes import specialize
from hybridc.lowering.ops import default_table
from hybridc.packaging import (
    WEIGHTS,
    BuiltPart,
    WeightPool,
    device_spec,
    part_spec,
    runtime_names,
    write_runtime,
)
from hybridc.passes.pipeline import run_passes
from hybridc.placement.decide import Request
from hybridc.placement.fallback import place_and_lower, unfit_nodes
from hybridc.placement.group import Group, make_groups, read_values
from hybridc.placement.plan import Part, Plan
from hybridc.progress import Progress
from hybridc.targets.protocol import Artifact, Device, Section
from hybridc.targets.registry import find_target


@dataclass(frozen=True)
class ModelRequest:
    """A model whose groups are to be measured.

    Attributes:
        path: The ONNX file.
        shapes: Sizes of its dynamic dimensions, all of them single numbers.
        bindings: Values of inputs that are always the same.
    """

    path: Path
    shapes: Mapping[str, tuple[ShapeRequest, ...]] = field(default_factory=dict)
    bindings: Mapping[str, Array] = field(default_factory=dict)


@dataclass(frozen=True)
class Candidate:
    """A group, or a whole, that may be built.

    Attributes:
        section: Its nodes with their border.
        purpose: What it is for, see :mod:`hybridc.calibration.record`.
        work: What it does.
        footprint: Bytes of all weights of the model that it is from.
        groups: Signatures of the groups in a whole.
        only: The device whose target it is for; ``None`` for all.
    """

    section: Section
    purpose: str
    work: GroupWork
    footprint: int = 0
    groups: tuple[str, ...] = ()
    only: Device | None = None

    @property
    def key(self) -> tuple[str, Device | None]:
        """What is built once."""
        return self.work.signature, self.only


@dataclass
class _Collected:
    """Parts built so far, with what describes them."""

    pool: WeightPool = field(default_factory=WeightPool)
    parts: list[BuiltPart] = field(default_factory=list)
    specs: list[PartSpec] = field(default_factory=list)
    kernels: list[Kernel] = field(default_factory=list)
    inputs: dict[str, TensorSpec] = field(default_factory=dict)
    outputs: dict[str, TensorSpec] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Report:
    """What was built.

    Attributes:
        output: Where the bundle is.
        kernels: Number of kernels by device.
        notes: Groups that were left out, with reasons.
    """

    output: Path
    kernels: Mapping[str, int]
    notes: tuple[str, ...]


def build_calibration(
    output: Path,
    devices: Sequence[Device],
    models: Sequence[ModelRequest] = (),
    progress: Progress = lambda _line: None,
) -> Report:
    """Build a calibration bundle for some devices.

    Raises:
        UserError: A model cannot be read or has dynamic sizes, or the output cannot be written.
    """
    check_destination(output)
    codes = _codes(devices)
    candidates = list(_micro_candidates())
    for request in models:
        progress(f"reading {request.path}")
        candidates += _model_candidates(request, devices)
    candidates = list({one.key: one for one in reversed(candidates)}.values())[::-1]
    collected = _Collected()
    for index, code in enumerate(codes):
        device = Device(code.devices[0], code.kind, code.specification)
        for number, candidate in enumerate(candidates):
            if candidate.only not in (None, device):
                continue
            progress(f"{code.kind}: kernel {number + 1} of {len(candidates)}")
            _build(collected, candidate, device, index, f"k{number}")
    _write(output, devices, codes, collected)
    counts = {
        name: sum(kernel.code == index for kernel in collected.kernels)
        for index, code in enumerate(codes)
        for name in code.devices
    }
    return Report(output, counts, tuple(collected.notes))


def _codes(devices: Sequence[Device]) -> tuple[Code, ...]:
    """Each target once, with its devices."""
    found: dict[tuple[str, str], list[str]] = {}
    for device in devices:
        found.setdefault((device.kind, device.specification), []).append(device.name)
    return tuple(Code(*key, tuple(names)) for key, names in found.items())


def _micro_candidates() -> Iterator[Candidate]:
    graph = ir.from_proto(micro_model()).graph
    nodes = [node for node in graph if str(node.name).startswith(LAUNCH)]
    others = [node for node in graph if node not in nodes]
    for group in (Group(tuple(nodes)), *make_groups(others)):
        purpose = group.name.partition(".")[0]
        purpose = purpose if purpose in (CALL, LAUNCH, BANDWIDTH) else GROUP
        yield _candidate(graph, group, purpose)


def _model_candidates(request: ModelRequest, devices: Sequence[Device]) -> list[Candidate]:
    """Groups of a model, cut as a compile for these devices would cut them."""
    source = read_model(request.path)
    bind_inputs(source.model, request.bindings)
    ranges = specialize(source.model, request.shapes)
    if ranges:
        name, size = next(iter(ranges.items()))
        raise UsageError(
            f"{request.path}: {name} is {size}, and what is measured has one size: give a number"
        )
    model, _ = run_passes(source.model, default_table().lowers, isolate=True)
    refused: set[ir.Node] = set()
    parts: list[Part] = []
    for device in devices:
        placed = place_and_lower(model.graph, Request((device,)), True, ranges)
        refused |= set(placed.refusals)
        parts += [part for part in placed.plan.parts if part.device == device]
    groups = make_groups(list(model.graph), refused)
    found = [_candidate(model.graph, group, GROUP) for group in groups]
    footprint = sum(one.work.weight_bytes for one in found)
    measurable = [
        dataclasses.replace(one, footprint=footprint)
        for one in found
        if one.work.is_known and not one.work.is_view
    ]
    wholes = (_whole(part, measurable, model.graph.opset_imports) for part in parts)
    return [*measurable, *(one for one in wholes if len(one.groups) > 1)]


def _whole(part: Part, groups: Sequence[Candidate], opsets: Mapping[str, int]) -> Candidate:
    """A part of a model with the groups in it, of those that are measured."""
    nodes = set(part.nodes)
    inside = tuple(one.work.signature for one in groups if one.section.nodes[0] in nodes)
    section, work = part.section(opsets, {}), describe_group(part.nodes)
    return Candidate(section, WHOLE, work, groups=inside, only=part.device)


def _candidate(graph: ir.Graph, group: Group, purpose: str) -> Candidate:
    inside = set(group.nodes)
    read = dict.fromkeys(value for node in group.nodes for value in read_values(node))
    inputs = [
        value
        for value in read
        if value.producer() not in inside and value.const_value is None and value.graph is graph
    ]
    outputs = [
        value
        for node in group.nodes
        for value in node.outputs
        if value.is_graph_output() or any(use.node not in inside for use in value.uses())
    ]
    section = Section(group.nodes, inputs, outputs, graph.opset_imports)
    return Candidate(section, purpose, describe_group(group.nodes))


def _build(
    collected: _Collected, candidate: Candidate, device: Device, code: int, name: str
) -> None:
    """Build a group by a target and add it; what the target refuses is left out with a note."""
    section = candidate.section
    label = f"{section.nodes[0].name} on {device.kind}"
    fault = _why_not(section, device)
    if fault is not None:
        collected.notes.append(f"{label}: {fault}")
        return
    target = find_target(device.kind)
    try:
        lowered = target.lower(section, device.specification)
        artifact = target.build(lowered, device.specification)
    except UnsupportedError as error:
        reasons = {reason for _, _, reason in error.reasons} or {str(error)}
        collected.notes.append(f"{label}: {'; '.join(sorted(reasons))}")
        return
    _add(collected, candidate, artifact, device, code, name)


def _why_not(section: Section, device: Device) -> str | None:
    """Why a group cannot be measured by itself; ``None`` if it can."""
    for value in (*section.inputs, *section.outputs):
        if value.shape is None or value.dtype is None or not value.shape.is_static():
            return f"the size of {value.name!r} is not known"
        if value.dtype == ir.DataType.STRING or not isinstance(value.type, ir.TensorType):
            return f"{value.name!r} is no tensor of numbers"
    return next((reason for _, reason in unfit_nodes(section)), None)


def _add(
    collected: _Collected,
    candidate: Candidate,
    artifact: Artifact,
    device: Device,
    code: int,
    name: str,
) -> None:
    """Take a built group in, with borders under names of its own."""
    section = candidate.section
    part = Part(
        f"{device.kind}-{code}-{name}",
        device,
        tuple(section.nodes),
        tuple(section.inputs),
        tuple(section.outputs),
    )
    stored = tuple(
        collected.pool.add(f"{name}.{weight}", array) for weight, array in artifact.weights.items()
    )
    built = BuiltPart(part, artifact, stored)
    ends = [
        {f"{prefix}.{end}{index}": value for index, value in enumerate(values)}
        for prefix, end, values in ((name, "x", section.inputs), (part.name, "y", section.outputs))
    ]
    collected.parts.append(built)
    collected.specs.append(
        dataclasses.replace(part_spec(built), inputs=tuple(ends[0]), outputs=tuple(ends[1]))
    )
    collected.kernels.append(
        Kernel(
            part.name,
            code,
            candidate.purpose,
            candidate.work,
            candidate.footprint,
            candidate.groups,
        )
    )
    collected.inputs.update({key: _spec(key, value) for key, value in ends[0].items()})
    collected.outputs.update({key: _spec(key, value) for key, value in ends[1].items()})


def _spec(name: str, value: ir.Value) -> TensorSpec:
    assert value.shape is not None
    assert value.dtype is not None
    return TensorSpec(name, value.dtype.numpy().name, tuple(value.shape.numpy()))


def _write(
    output: Path, devices: Sequence[Device], codes: tuple[Code, ...], collected: _Collected
) -> None:
    """Write the bundle."""
    versions = {"hybridc": hybridc.__version__, "tvm": version("apache-tvm")}
    calibration = Calibration(SCHEMA, versions, codes, tuple(collected.kernels))
    with staging_folder(output) as folder:
        try:
            writer = BundleWriter(folder)
            for item, spec in zip(collected.parts, collected.specs, strict=True):
                writer.put(spec.library, [item.artifact.library])
                for path, data in zip(
                    spec.companions, item.artifact.companions.values(), strict=True
                ):
                    writer.put(path, [data])
            writer.put(WEIGHTS, encode(collected.pool.arrays))
            writer.put(CALIBRATION, [to_json(calibration)])
            manifest = _manifest(devices, collected)
            write_runtime(writer, manifest, Plan(tuple(item.part for item in collected.parts)))
            writer.finish(manifest)
            publish(folder, output)
        except OSError as error:
            raise storage_error(error, output) from error


def _manifest(devices: Sequence[Device], collected: _Collected) -> Manifest:
    specs = tuple(device_spec(device, collected.parts) for device in devices)
    architectures = dict.fromkeys(spec.architecture for spec in specs if spec.architecture)
    return Manifest(
        schema=f"{BUNDLE_SCHEMA[0]}.{BUNDLE_SCHEMA[1]}",
        hybridc=hybridc.__version__,
        tvm=version("apache-tvm"),
        tvm_ffi=version("apache-tvm-ffi"),
        model="calibration",
        model_sha256="",
        inputs=tuple(collected.inputs.values()),
        outputs=tuple(collected.outputs.values()),
        dimensions={},
        devices=specs,
        parts=tuple(collected.specs),
        transfers=(),
        runtime={name: runtime_names(name, collected.parts) for name in architectures},
        weights=WEIGHTS,
    )
