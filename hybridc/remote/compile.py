"""Compile a model for two ends: an edge bundle, and a model repository for the server.

The stages are those of :mod:`hybridc.compiler`. Placement gives several plans instead of one, and
each is built; what two plans have in common is built once. The edge bundle holds the code of all
parts that run here, and names the build of each part on the server.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import onnx_ir as ir

from hybridc.bundle.manifest import DeviceSpec, Manifest, PartSpec, PlanSpec, RemoteSpec, TensorSpec
from hybridc.bundle.storage import staging_folder
from hybridc.bundle.write import check_destination, publish, storage_error
from hybridc.compiler import (
    Options,
    Prepared,
    Report,
    check_bundle,
    describe_placement,
    keep_memory,
    make_request,
    make_samples,
    origin_of,
    plan_model,
    spec_of,
    target_of,
)
from hybridc.errors import BudgetError, UsageError
from hybridc.frontend.read import Source, read_model
from hybridc.frontend.shapes import model_inputs
from hybridc.packaging import Built, BuiltPart, WeightPool, describe, part_spec, write_bundle
from hybridc.packed_code import keeping
from hybridc.placement.decide import Request
from hybridc.placement.fallback import Placed
from hybridc.placement.plan import Part, Plan
from hybridc.placement.plan_file import PlanFile
from hybridc.placement.problem import COST, LATENCY
from hybridc.progress import Progress
from hybridc.remote.interface import interface_of
from hybridc.remote.kserve import inference_service
from hybridc.remote.plans import Candidate, Chosen, choose_plans, lower, replaceable
from hybridc.remote.repository import (
    CONFIG,
    ServerOptions,
    check_batch,
    check_repository,
    check_tensors,
    write_config,
    write_version,
)
from hybridc.runtime.machine import why_not
from hybridc.runtime.remote_encoding import encodings_of
from hybridc.runtime.serving import build_of, newest_version, open_served
from hybridc.targets.protocol import Artifact, Lowered
from hybridc.targets.registry import find_target
from hybridc.tuning.tune import tuned_target

REMOTE_KIND = "remote"
"""Kind of the server's device in an edge bundle."""

LARGE_BYTES = 8_000_000
"""What KServe takes in one message unless it is told otherwise."""

_ANY_SIZE = (0, 2**31 - 1)


@dataclass
class _Build:
    """What is known before the plans are built, and the parts that were.

    Attributes:
        source: The model as it was read.
        model: The model after the passes.
        prepared: What was found out about it.
        options: What was asked for.
        server: How the server's side is written.
        folder: Where the repository is written.
        plan: The plan for the link that was given.
        pool: Weights of the parts here.
        edge: Parts here, by what they are.
        remote: Parts on the server, by what they are.
    """

    source: Source
    model: ir.Model
    prepared: Prepared
    options: Options
    server: ServerOptions
    folder: Path
    plan: PlanFile
    pool: WeightPool = field(default_factory=WeightPool)
    edge: dict[tuple[str, ...], BuiltPart] = field(default_factory=dict)
    remote: dict[tuple[str, ...], PartSpec] = field(default_factory=dict)

    def make(
        self, parts: tuple[BuiltPart, ...], weights: WeightPool, placed: Placed, plan: bool
    ) -> Built:
        """Some parts as something that can be written."""
        values = (*model_inputs(self.model), *self.model.graph.outputs)
        return Built(
            self.source,
            self.model,
            dataclasses.replace(placed, plan=Plan(tuple(item.part for item in parts))),
            parts,
            weights.arrays,
            {value: spec_of(value, self.source.types) for value in values},
            self.prepared.bound,
            self.prepared.dimensions,
            self.options.tolerance,
            self.plan if plan else None,
        )


def compile_hybrid(
    model: Path,
    output: Path,
    options: Options,
    server: ServerOptions,
    progress: Progress = lambda _line: None,
) -> Report:
    """Compile an ONNX file to an edge bundle at ``output`` and to a model repository.

    Raises:
        UserError: Something the user can mend; its class says of which kind.
    """
    check_destination(output)
    check_repository(server)
    _check_options(options, server)
    progress(f"[1/6] reading {model}")
    source = read_model(model)
    graph_model, placed, plan, prepared = plan_model(source, options, progress)
    request = make_request(options, prepared.dimensions)
    chosen = choose_plans(
        graph_model.graph, request, placed, server.plans, server.encoding, server.rate
    )
    if server.rate is not None:
        best, origin = chosen.cheapest, origin_of(source, options)
        plan = describe_placement(graph_model.graph, best.decision, best.plan, request, origin)
    if server.updates:
        chosen, plan = replaceable(chosen), dataclasses.replace(plan, model_sha256="")
    with staging_folder(server.repository) as there, staging_folder(output) as here:
        building = _Build(source, graph_model, prepared, options, server, there, plan)
        try:
            return _write(building, request, chosen, placed, here, output, progress)
        except OSError as error:
            raise storage_error(error, output) from error


def _write(
    building: _Build,
    request: Request,
    chosen: Chosen,
    placed: Placed,
    staging: Path,
    output: Path,
    progress: Progress,
) -> Report:
    """Build the plans and check them; then both ends appear at their places.

    Args:
        building: What is known.
        request: What the placement was asked for.
        chosen: The plans.
        placed: The first of them.
        staging: Where the edge bundle is written.
        output: Where it goes.
        progress: Is told of each step.
    """
    options, server = building.options, building.server
    progress(f"[4/6] building {len(chosen.all)} plans")
    plans, edge, notes = _build_plans(building, request, chosen, placed)
    manifest = _edge_manifest(building, edge, plans, chosen)
    progress("[5/6] computing the reference")
    samples = list(make_samples(building.source.path, edge, manifest, options))
    manifest = write_bundle(staging, edge, manifest, samples)
    progress("[6/6] checking every plan in a fresh process")
    more_notes, errors = _check(staging, building.folder, manifest, options)
    _publish_repository(building.folder, server)
    manifest = _publish_edge(staging, output, edge, manifest, building)
    return Report(output, manifest, (*building.prepared.notes, *notes, *more_notes), errors)


def _publish_edge(
    staging: Path, output: Path, edge: Built, manifest: Manifest, building: _Build
) -> Manifest:
    """Move the edge bundle to its place; without what depends on a server's part, if need be."""
    pack = keeping(building.options.cache)
    if not building.server.updates:
        publish(staging, output, pack)
        return manifest
    with staging_folder(output) as bare:
        manifest = write_bundle(bare, edge, dataclasses.replace(manifest, files=()), [])
        publish(bare, output, pack)
    return manifest


def _check_options(options: Options, server: ServerOptions) -> None:
    if options.objective not in (LATENCY, COST):
        raise UsageError(f"--remote minimizes latency or cost, not {options.objective}")
    if options.objective == COST and server.rate is None:
        raise UsageError(
            "--objective cost with --remote needs --requests-per-second: a server is paid by the "
            "hour, whether it has work or not"
        )
    if options.objective != COST and server.rate is not None:
        raise UsageError(
            "--requests-per-second is for prices; give it with --objective cost, since the "
            f"placement minimizes {options.objective} now"
        )
    if options.tuning is not None and options.tuning.seconds is not None:
        raise UsageError("--tune measures for one end; give its file to the compile with --remote")
    if options.fixed is not None:
        raise UsageError("--remote makes several plans; an edited --plan cannot be given with it")


def _build_plans(
    building: _Build, request: Request, chosen: Chosen, first: Placed
) -> tuple[list[PlanSpec], Built, list[str]]:
    """Build all plans; those whose code breaks a limit on memory are left out."""
    notes = [] if chosen.local else [f"no plan runs without the server: {chosen.why_not_local}"]
    plans: list[PlanSpec] = []
    refusals: dict[ir.Node, str] = {}
    broken: BudgetError | None = None
    graph = building.model.graph
    for name, candidate in _named(chosen, str(request.remote)):
        placed = first
        if candidate.decision is not first.decision:
            options, ranges = building.options, building.prepared.dimensions
            placed = lower(graph, request, candidate, options.fallback, ranges)
        try:
            plans.append(_build_plan(building, name, candidate, placed))
        except BudgetError as error:
            notes.append(f"plan {name} is left out: {error}")
            broken = error
            continue
        refusals.update(placed.refusals)
        notes += _large(candidate)
    if broken is not None and not any(plan.round_trips for plan in plans):
        raise broken
    profiles = [f"{d.name} as {d.profile.name}" for d in building.plan.devices if d.profile]
    notes.append(f"planned for {', '.join(profiles)}")
    used = {part.name for plan in plans for part in plan.parts}
    parts = tuple(item for item in building.edge.values() if item.part.name in used)
    placed = dataclasses.replace(first, refusals=refusals)
    plans.sort(key=lambda plan: _rank(plan, chosen))
    return plans, building.make(parts, building.pool, placed, plan=True), notes


def _rank(plan: PlanSpec, chosen: Chosen) -> tuple[float, float]:
    """What the best plan has least of: dollars where they count, then seconds."""
    waiting = plan.round_trips * chosen.link.round_trip_seconds
    moving = plan.bytes / chosen.link.bytes_per_second
    seconds = plan.edge_seconds + plan.server_seconds + waiting + moving
    return plan.price.dollars_per_hour if plan.price else 0.0, seconds


def _named(chosen: Chosen, remote: str) -> Iterator[tuple[str, Candidate]]:
    """The candidates with names."""
    if chosen.local is not None:
        yield "local", chosen.local
    number = 0
    for candidate in chosen.remote:
        if all(part.device.name == remote for part in candidate.plan.parts):
            yield "remote", candidate
        else:
            number += 1
            yield f"cut{number}", candidate


def _large(candidate: Candidate) -> list[str]:
    return [
        f"{crossing.tensor!r} has {crossing.bytes} bytes; KServe and others take 8 MB in a message "
        "unless they are told otherwise"
        for crossing in candidate.crossings
        if crossing.bytes > LARGE_BYTES
    ]


def _build_plan(building: _Build, name: str, candidate: Candidate, placed: Placed) -> PlanSpec:
    """Build the parts of a plan that were not built for another.

    Raises:
        BudgetError: The code that was built takes more memory here than it may.
    """
    own: dict[tuple[str, ...], BuiltPart] = {}
    pairs = list(zip(placed.plan.parts, placed.lowered, strict=True))
    for part, lowered in pairs:
        key = _key(part)
        if part.device.name == building.options.remote:
            continue
        if key not in building.edge:
            named = dataclasses.replace(part, name=f"part{len(building.edge)}")
            building.edge[key] = _built(named, lowered, building.pool, building.options)
        own[key] = building.edge[key]
    for part, lowered in pairs:
        key = _key(part)
        if part.device.name == building.options.remote and key not in building.remote:
            there = _build_remote(building, name, part, lowered, placed, tuple(own.values()))
            building.remote[key] = there
    keys = [_key(part) for part, _ in pairs]
    specs = [part_spec(own[key]) if key in own else building.remote[key] for key in keys]
    keep_memory(list(own.values()), building.options.rules)
    return PlanSpec(
        name,
        tuple(specs),
        candidate.edge_seconds,
        candidate.server_seconds,
        candidate.round_trips,
        candidate.bytes,
        candidate.crossings,
        building.server.tolerance if any(p.remote and p.remote.encodings for p in specs) else None,
        candidate.price,
    )


def _key(part: Part) -> tuple[str, ...]:
    """What a part is, whichever plan it is in."""
    names = [[str(v.name) for v in part.inputs], [str(v.name) for v in part.outputs]]
    nodes = [str(node.name) for node in part.nodes]
    return (part.device.name, "nodes", *nodes, "inputs", *names[0], "outputs", *names[1])


def _built(part: Part, lowered: Lowered, pool: WeightPool, options: Options) -> BuiltPart:
    target = tuned_target(target_of(part.device, options), part.device, options.tuning)
    artifact: Artifact = target.build(lowered, part.device.specification)
    names = tuple(pool.add(name, array) for name, array in artifact.weights.items())
    return BuiltPart(part, artifact, names)


def _build_remote(
    building: _Build,
    plan: str,
    part: Part,
    lowered: Lowered,
    placed: Placed,
    own: Sequence[BuiltPart],
) -> PartSpec:
    """Build a part for the server and write its model; returns what the edge bundle says of it.

    Args:
        building: What is known, and the parts that were built.
        plan: The plan that the part is built for.
        part: The part.
        lowered: It in its target's own form.
        placed: The placement that it is of.
        own: The parts that run here by that plan.
    """
    name = _free_model_name(building, plan)
    pool = WeightPool()
    named = dataclasses.replace(part, name="part0")
    item = _built(named, lowered, pool, building.options)
    built = building.make((item,), pool, dataclasses.replace(placed, refusals={}), plan=False)
    manifest = _remote_manifest(building, built, part)
    if building.server.updates:
        manifest = dataclasses.replace(manifest, interface=interface_of(own, manifest))
    check_batch(manifest, building.server.batch)
    return PartSpec(
        name,
        part.device.name,
        library="",
        inputs=tuple(spec.name for spec in manifest.inputs),
        outputs=tuple(spec.name for spec in manifest.outputs),
        weights=(),
        nodes=tuple(str(node.name) for node in part.nodes),
        remote=_write_model(building, name, built, manifest),
    )


def _free_model_name(building: _Build, plan: str) -> str:
    """A name for a model of a plan that no other on the server has."""
    base = f"{building.server.name}-{plan}"
    taken = {spec.remote.model for spec in building.remote.values() if spec.remote}
    return base if base not in taken else f"{base}-{1 + sum(n.startswith(base) for n in taken)}"


def _remote_manifest(building: _Build, built: Built, part: Part) -> Manifest:
    """The description of a server's bundle: that of its part alone."""
    inputs = tuple(spec_of(value, {}) for value in part.inputs)
    outputs = tuple(spec_of(value, {}) for value in part.outputs)
    check_tensors((*inputs, *outputs))
    encoding = building.server.encoding
    return dataclasses.replace(
        describe(built),
        inputs=inputs,
        outputs=outputs,
        dimensions=_dimensions(inputs, building.prepared),
        transfers=(),
        encodings=encodings_of((*inputs, *outputs), encoding) if encoding is not None else (),
    )


def _write_model(building: _Build, name: str, built: Built, manifest: Manifest) -> RemoteSpec:
    """Write a model's version into the repository; returns how it is asked for."""
    server = building.server
    folder = building.folder / name / str(server.version)
    destination = write_version(folder)
    with staging_folder(destination) as staging:
        write_bundle(staging, built, manifest, [])
        publish(staging, destination)
    version = "" if server.updates else str(server.version)
    build = build_of(open_served(folder))
    return RemoteSpec(name, version, build, manifest.inputs, manifest.outputs, manifest.encodings)


def _dimensions(inputs: Sequence[TensorSpec], prepared: Prepared) -> Mapping[str, tuple[int, int]]:
    """Range of each dimension at the cut; one that only running will tell may be anything."""
    known = {name: (size.low, size.high) for name, size in prepared.dimensions.items()}
    dims = [dim for spec in inputs for dim in spec.shape if isinstance(dim, str)]
    return {dim: known.get(dim, _ANY_SIZE) for dim in dims}


def _edge_manifest(
    building: _Build, edge: Built, plans: Sequence[PlanSpec], chosen: Chosen
) -> Manifest:
    device = next(d for d in building.options.devices if d.name == building.options.remote)
    needs = find_target(device.kind).compatibility(device.specification)
    remote = DeviceSpec(device.name, REMOTE_KIND, needs.built_for, "")
    main = next((plan for plan in plans if not plan.round_trips), plans[0])
    manifest = describe(edge)
    if building.server.updates:
        manifest = dataclasses.replace(manifest, model_sha256="")
    return dataclasses.replace(
        manifest,
        parts=main.parts,
        devices=(*manifest.devices, remote),
        transfers=(),
        plans=tuple(plans),
        link=chosen.link,
    )


def _check(
    here: Path, there: Path, manifest: Manifest, options: Options
) -> tuple[list[str], tuple[Mapping[str, Any], ...]]:
    """Run each plan with the finished bundles of both ends, in a process of the loader alone."""
    parts = [part.remote for plan in manifest.plans for part in plan.parts if part.remote]
    if options.verify:
        for part in parts:
            folder = there / part.model
            version = part.version or newest_version(folder)
            served = open_served(folder / version).manifest
            for device in served.devices:
                reason = why_not(device)
                if reason:
                    return [f"the plans were not run: {device.name}: {reason}"], ()
    return check_bundle(here, manifest, options, there)


def _publish_repository(staging: Path, server: ServerOptions) -> None:
    """Move the new versions to their places; a configuration comes after what it names."""
    server.repository.mkdir(exist_ok=True)
    server.repository.chmod(0o755)
    for model in sorted(staging.iterdir()):
        folder = server.repository / model.name
        folder.mkdir(exist_ok=True)
        version = folder / str(server.version)
        os.rename(model / version.name, version)
        try:
            write_config(folder, server)
        except UsageError:
            shutil.rmtree(version)
            if not (folder / CONFIG).exists():
                shutil.rmtree(folder)
            raise
    if server.storage is not None:
        (server.repository / "kserve.yaml").write_text(inference_service(server), "utf-8")
