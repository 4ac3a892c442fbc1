"""From built parts to a bundle's files: the manifest, the weights, the runtime, the samples."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import files, version
from pathlib import Path

import onnx_ir as ir

import hybridc
from hybridc.bundle.dtypes import carried
from hybridc.bundle.manifest import (
    SCHEMA,
    AlternativeSpec,
    DeviceSpec,
    FallbackSpec,
    Manifest,
    PartSpec,
    SampleSpec,
    TensorSpec,
    TransferSpec,
)
from hybridc.bundle.strings import pack_strings
from hybridc.bundle.tensors import Array, encode
from hybridc.bundle.write import BundleWriter
from hybridc.frontend.read import Source
from hybridc.frontend.shapes import Range, model_inputs
from hybridc.placement.fallback import Placed
from hybridc.placement.plan import Part, Plan, value_bytes
from hybridc.placement.plan_file import PLAN, PlanFile, plan_to_json
from hybridc.reference import Sample
from hybridc.runtime.workers import is_cpu
from hybridc.targets.protocol import Artifact, Device
from hybridc.targets.registry import find_target

WEIGHTS = "weights.safetensors"


@dataclass(frozen=True)
class BuiltPart:
    """A part with its code and the names that its weights are stored under."""

    part: Part
    artifact: Artifact
    weights: tuple[str, ...]


@dataclass(frozen=True)
class Built:
    """A model compiled, not yet written.

    Attributes:
        source: The model as it was read.
        model: The model after the passes.
        placed: Where its parts run.
        parts: The parts' code, in the plan's order.
        weights: All weights by name, each once.
        specs: Type and shape of the model's inputs and outputs.
        bound: Values of inputs that were bound at compile time.
        dimensions: Range of each dynamic dimension.
        tolerance: Largest error relative to an output's scale.
        plan: Where the groups run and why; ``None`` to write none.
    """

    source: Source
    model: ir.Model
    placed: Placed
    parts: tuple[BuiltPart, ...]
    weights: Mapping[str, Array]
    specs: Mapping[ir.Value, TensorSpec]
    bound: Mapping[str, Array]
    dimensions: Mapping[str, Range]
    tolerance: float
    plan: PlanFile | None


@dataclass
class WeightPool:
    """Weights by name; equal ones are stored once."""

    arrays: dict[str, Array] = field(default_factory=dict)
    names: dict[tuple[str, tuple[int, ...], bytes], str] = field(default_factory=dict)

    def add(self, name: str, array: Array) -> str:
        """Add a weight; returns the name it is stored under."""
        content = array if array.flags.c_contiguous else array.copy()
        digest = hashlib.sha256(content.reshape(-1).view("uint8").data).digest()
        key = (array.dtype.name, array.shape, digest)
        if key not in self.names:
            self.names[key] = name
            self.arrays[name] = array
        return self.names[key]


def as_alternative(built: Built, number: int) -> Built:
    """The same with names for its parts that no other way to run the model has."""
    parts = tuple(
        dataclasses.replace(
            item, part=dataclasses.replace(item.part, name=f"alternative{number}-{item.part.name}")
        )
        for item in built.parts
    )
    plan = Plan(tuple(item.part for item in parts))
    return dataclasses.replace(
        built, parts=parts, placed=dataclasses.replace(built.placed, plan=plan)
    )


def describe_alternative(built: Built, number: int) -> AlternativeSpec:
    """The description of another way to run the model."""
    manifest = describe(built)
    return AlternativeSpec(
        manifest.devices,
        manifest.parts,
        manifest.transfers,
        manifest.runtime,
        f"alternative{number}-{WEIGHTS}",
        manifest.fallbacks,
    )


def describe(built: Built) -> Manifest:
    """The manifest, but for its samples and files."""
    plan = built.placed.plan
    devices = _device_specs(built, plan)
    return Manifest(
        schema=f"{SCHEMA[0]}.{SCHEMA[1]}",
        hybridc=hybridc.__version__,
        tvm=version("apache-tvm"),
        tvm_ffi=version("apache-tvm-ffi"),
        model=built.source.path.name,
        model_sha256=built.source.sha256,
        inputs=tuple(built.specs[value] for value in model_inputs(built.model)),
        outputs=tuple(built.specs[value] for value in built.model.graph.outputs),
        dimensions={name: (size.low, size.high) for name, size in built.dimensions.items()},
        steps={name: size.step for name, size in built.dimensions.items() if size.step > 1},
        devices=devices,
        parts=tuple(part_spec(item) for item in built.parts),
        transfers=_transfers(plan),
        runtime={
            device.architecture: runtime_names(device.architecture, built.parts)
            for device in devices
            if device.architecture
        },
        weights=WEIGHTS,
        tolerance=built.tolerance,
        fallbacks=tuple(
            FallbackSpec(str(node.name), node.op_type, reason)
            for node, reason in built.placed.refusals.items()
        ),
    )


def _device_specs(built: Built, plan: Plan) -> tuple[DeviceSpec, ...]:
    """Devices that run a part, in the order in which they were asked for.

    A CPU under several names is shared out among them, whichever of them the plan uses; so those
    without a part are listed beside one that has some, and need nothing of the machine.
    """
    used = {device: device_spec(device, built.parts) for device in plan.devices()}
    shared = {spec.architecture for spec in used.values() if is_cpu(spec)}
    for device in plan.idle:
        spec = device_spec(device, ())
        if is_cpu(spec) and spec.architecture in shared:
            used[device] = dataclasses.replace(spec, cpu_flags=(), libraries=())
    order = {device: number for number, device in enumerate(built.placed.decision.devices)}
    return tuple(used[device] for device in sorted(used, key=lambda d: order.get(d, len(order))))


def _transfers(plan: Plan) -> tuple[TransferSpec, ...]:
    return tuple(
        TransferSpec(
            str(value.name), source.name if source else "input", to.name, value_bytes(value)
        )
        for value, source, to in plan.crossings()
    )


def device_spec(device: Device, parts: Sequence[BuiltPart]) -> DeviceSpec:
    """What a device needs of the machine, and the memory that its parts plan."""
    needs = find_target(device.kind).compatibility(device.specification)
    memory = sum(item.artifact.memory_bytes for item in parts if item.part.device == device)
    return DeviceSpec(
        device.name,
        device.kind,
        needs.built_for,
        needs.architecture,
        needs.cpu_flags,
        memory,
        needs.packages,
        needs.device_code,
        needs.libraries,
    )


def part_spec(item: BuiltPart) -> PartSpec:
    """A part's description."""
    part = item.part
    return PartSpec(
        name=part.name,
        device=part.device.name,
        library=f"parts/{part.name}{item.artifact.suffix}",
        inputs=tuple(str(value.name) for value in part.inputs),
        outputs=tuple(str(value.name) for value in part.outputs),
        weights=item.weights,
        nodes=tuple(str(node.name) for node in part.nodes),
        memory_bytes=item.artifact.memory_bytes,
        companions=tuple(f"parts/{name}" for name in item.artifact.companions),
        thread_bytes=item.artifact.thread_bytes,
    )


def runtime_names(architecture: str, parts: Sequence[BuiltPart]) -> tuple[str, ...]:
    """Paths of the runtime's libraries that parts need, in the order of loading."""
    stems = dict.fromkeys(stem for item in parts for stem in item.artifact.runtime)
    return tuple(f"lib/{architecture}/lib{stem}.so" for stem in stems)


def part_files(built: Built) -> dict[str, bytes]:
    """The parts' libraries by their path in the bundle."""
    files: dict[str, bytes] = {}
    for item in built.parts:
        spec = part_spec(item)
        files[spec.library] = item.artifact.library
        files.update(zip(spec.companions, item.artifact.companions.values(), strict=True))
    return files


def write_bundle(
    folder: Path,
    built: Built,
    manifest: Manifest,
    samples: Sequence[Sample],
    alternatives: Sequence[Built] = (),
) -> Manifest:
    """Write all files of a bundle into a folder; returns the manifest as written.

    Args:
        folder: The folder.
        built: The first way to run the model.
        manifest: The bundle's description, the other ways included.
        samples: Inputs with the outputs of a reference.
        alternatives: The other ways.
    """
    writer = BundleWriter(folder)
    for way, item in zip(manifest.ways(), (built, *alternatives), strict=True):
        for name, data in part_files(item).items():
            writer.put(name, [data])
        writer.put(way.weights, encode(item.weights))
        write_runtime(writer, way, item.placed.plan)
    if built.plan is not None:
        plan = dataclasses.replace(built.plan, bindings=())  # they may name files of this machine
        writer.put(PLAN, [plan_to_json(plan).encode()])
    for name in ("LICENSE", "NOTICE"):
        writer.put(name, [_license_text(name)])
    stored = tuple(_write_sample(writer, i, sample) for i, sample in enumerate(samples))
    return writer.finish(dataclasses.replace(manifest, samples=stored))


def write_runtime(writer: BundleWriter, manifest: Manifest, plan: Plan) -> None:
    """Write the runtime's libraries that the manifest names, for the devices of a plan."""
    for name, read in runtime_files(manifest, plan).items():
        if name not in writer.files:
            writer.put(name, [read()])


def runtime_files(manifest: Manifest, plan: Plan) -> dict[str, Callable[[], bytes]]:
    """What gives the content of each of the runtime's libraries, by its path in a bundle."""
    found: dict[str, Callable[[], bytes]] = {}
    for device in plan.devices():
        target = find_target(device.kind)
        architecture = target.compatibility(device.specification).architecture
        for name in manifest.runtime.get(architecture, ()):
            stem = Path(name).stem.removeprefix("lib")
            give = functools.partial(target.runtime_library, stem, device.specification)
            found.setdefault(name, give)
    return found


def _license_text(name: str) -> bytes:
    """A license file, out of the installed distribution or the source tree behind it."""
    for file in files("hybridc") or ():
        if file.name == name and "licenses" in file.parts:
            return file.read_binary()
    return (Path(__file__).resolve().parent.parent / name).read_bytes()


def _write_sample(writer: BundleWriter, index: int, sample: Sample) -> SampleSpec:
    inputs = writer.put(f"samples/{index}-inputs.safetensors", _encode(sample.inputs))
    outputs = writer.put(f"samples/{index}-outputs.safetensors", _encode(sample.outputs))
    return SampleSpec(inputs, outputs, sample.reference)


def _encode(arrays: Mapping[str, Array]) -> list[bytes | memoryview]:
    return encode(
        {n: pack_strings(a) if a.dtype.kind in "UO" else carried(a) for n, a in arrays.items()}
    )
