"""``hybridc inspect``."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hybridc.bundle.manifest import MANIFEST
from hybridc.bundle.storage import SUFFIX
from hybridc.cli.alternatives import alternative_lines
from hybridc.cli.hybrid import plan_table
from hybridc.cli.output import format_option, shape, show, size, table

if TYPE_CHECKING:
    import onnx_ir as ir

    from hybridc.bundle.manifest import DeviceSpec, Manifest


@click.command("inspect")
@click.argument("path", type=click.Path(path_type=Path))
@click.option(
    "--shape",
    "shapes",
    multiple=True,
    metavar="NAME=DIMENSIONS",
    help="Dimensions, as for hybridc compile; a model's operators are judged at these.",
)
@click.option("--nodes", is_flag=True, help="List every node of the simplified model or the parts.")
@format_option
def command(path: Path, shapes: tuple[str, ...], nodes: bool, format_: str) -> None:
    """Show what the model, bundle or chain at PATH holds.

    Of a model: opset, inputs, outputs, weights, and for each operator how often it occurs, what it
    costs, and whether it compiles and if not why. Of a bundle: its plan, parts, memory, and what
    the machine that loads it needs. Of a chain of bundles: each of them, and the steps between.
    """
    from hybridc.runtime.chain import chain_folder

    if chain_folder(path):
        _show_chain(path, format_, nodes)
        return
    if path.suffix == SUFFIX or (path / MANIFEST).exists():
        from hybridc.bundle.read import open_bundle

        manifest = open_bundle(path).manifest
        show(format_, dataclasses.asdict(manifest), lambda: _bundle_lines(manifest, nodes))
        return
    data = _describe_model(path, shapes)
    show(format_, data, lambda: _model_lines(data, nodes))


def _show_chain(path: Path, format_: str, nodes: bool) -> None:
    """Show the bundles of a chain; its steps are named, and not imported."""
    from hybridc.runtime.chain import open_stages

    stages = open_stages(path)
    data = {
        "stages": [
            {"name": spec.name, "step": spec.step, "manifest": dataclasses.asdict(bundle.manifest)}
            for spec, bundle in stages
        ]
    }

    def lines() -> list[str]:
        found = [f"chain of {len(stages)} bundles"]
        for spec, bundle in stages:
            found += [f"step {spec.step}"] if spec.step else []
            found += [f"stage {spec.name}:"]
            found += [f"  {line}" for line in _bundle_lines(bundle.manifest, nodes)]
        return found

    show(format_, data, lines)


def _describe_model(path: Path, shapes: tuple[str, ...]) -> dict[str, Any]:
    from hybridc.errors import UsageError
    from hybridc.frontend.read import read_model
    from hybridc.frontend.shapes import model_inputs, parse_shapes, specialize
    from hybridc.lowering.ops import default_table
    from hybridc.passes.pipeline import run_passes

    source = read_model(path)
    data: dict[str, Any] = {
        "file": str(path),
        "sha256": source.sha256,
        "ir_version": source.model.ir_version,
        "producer": source.model.producer_name,
        "opsets": dict(source.model.graph.opset_imports),
        "inputs": [_describe_value(value) for value in model_inputs(source.model)],
        "outputs": [_describe_value(value) for value in source.model.graph.outputs],
        "weight_bytes": _weight_bytes(source.model.graph),
        "nodes_in_file": len(source.model.graph),
    }
    try:
        specialize(source.model, parse_shapes(shapes))
    except UsageError as error:
        if shapes:
            raise
        return data | {"operators_in_file": _count(source.model.graph), "note": str(error)}
    model, notes = run_passes(source.model, default_table().lowers, isolate=True)
    return data | _describe_nodes(model.graph) | {"notes": notes}


def _describe_value(value: ir.Value) -> dict[str, Any]:
    dims = [] if value.shape is None else list(value.shape)
    names = [dim if isinstance(dim, int) else str(dim.value or "?") for dim in dims]
    return {"name": value.name, "dtype": _dtype_name(value.dtype), "shape": names}


def _dtype_name(dtype: ir.DataType | None) -> str:
    """An element type's name as in a bundle."""
    if dtype is None or dtype.name == "UNDEFINED":
        return "unknown"
    return "string" if dtype.name == "STRING" else dtype.numpy().name


def _weight_bytes(graph: ir.Graph) -> int:
    values = graph.initializers.values()
    return sum(value.const_value.nbytes for value in values if value.const_value is not None)


def _count(graph: ir.Graph) -> dict[str, int]:
    return dict(Counter(_operator(node) for node in graph).most_common())


def _operator(node: ir.Node) -> str:
    return f"{node.domain}.{node.op_type}" if node.domain else node.op_type


def _describe_nodes(graph: ir.Graph) -> dict[str, Any]:
    from hybridc.cost_models.work import count_work
    from hybridc.support import unsupported_nodes

    reasons = unsupported_nodes(graph)
    rows = []
    for node in graph:
        work = count_work(node)
        rows.append(
            {
                "name": node.name,
                "operator": _operator(node),
                "outputs": [value.name for value in node.outputs],
                "operations": None if work is None else work.operations,
                "bytes": None if work is None else work.bytes,
                "unsupported": reasons.get(str(node.name)),
            }
        )
    return {"nodes": rows, "targets": {"llvm": {"unsupported": len(reasons)}}}


def _model_lines(data: Mapping[str, Any], nodes: bool) -> list[str]:
    opsets = ", ".join(f"{d or 'ai.onnx'} {v}" for d, v in data["opsets"].items())
    lines = [
        f"{data['file']}: ONNX, IR version {data['ir_version']}, {opsets}",
        f"{data['nodes_in_file']} nodes, {size(data['weight_bytes'])} of weights",
    ]
    for kind in ("inputs", "outputs"):
        lines.append(f"{kind}:")
        lines += table([[v["name"], v["dtype"], shape(v["shape"])] for v in data[kind]])
    if "nodes" not in data:
        lines += ["operators in the file:"]
        lines += table([[name, str(count)] for name, count in data["operators_in_file"].items()])
        return [*lines, f"note: {data['note']}"]
    lines += [f"{len(data['nodes'])} nodes after simplification:", *_operator_table(data["nodes"])]
    if nodes:
        lines += ["nodes:", *table([_node_row(row) for row in data["nodes"]])]
    return lines + [f"note: {note}" for note in data["notes"]]


def _operator_table(rows: list[dict[str, Any]]) -> list[str]:
    """One line per operator: count, operations, and whether llvm compiles it."""
    counts = Counter(row["operator"] for row in rows)
    lines = [["operator", "count", "operations", "llvm"]]
    for operator, count in counts.most_common():
        own = [row for row in rows if row["operator"] == operator]
        total = sum(row["operations"] or 0 for row in own)
        bad = [row for row in own if row["unsupported"]]
        state = "yes" if not bad else f"no ({len(bad)} of {count}): {bad[0]['unsupported']}"
        lines.append([operator, str(count), f"{total / 1e6:.1f} M", state])
    return table(lines)


def _node_row(row: Mapping[str, Any]) -> list[str]:
    return [row["name"], row["operator"], ", ".join(row["outputs"]), row["unsupported"] or ""]


def _bundle_lines(manifest: Manifest, nodes: bool) -> list[str]:
    total = sum(file.bytes for file in manifest.files)
    lines = [
        f"bundle of {manifest.model}, schema {manifest.schema}, by hybridc {manifest.hybridc}",
        f"{len(manifest.files)} files, {size(total)}",
        f"needs apache-tvm-ffi {manifest.tvm_ffi}; carries the runtime of TVM {manifest.tvm}",
    ]
    for kind, specs in (("inputs", manifest.inputs), ("outputs", manifest.outputs)):
        lines.append(f"{kind}:")
        lines += table([[spec.name, spec.dtype, shape(spec.shape)] for spec in specs])
    steps = {name: f"/{step}" for name, step in manifest.steps.items()}
    ranges = [
        [name, f"{low}..{high}{steps.get(name, '')}"]
        for name, (low, high) in manifest.dimensions.items()
    ]
    lines += ["dimensions:", *table(ranges)] if ranges else []
    for device in manifest.devices:
        lines += _device_lines(device)
    lines += _plan_lines(manifest, nodes)
    return lines + alternative_lines(manifest) + plan_table(manifest)


def _device_lines(device: DeviceSpec) -> list[str]:
    place = f" ({device.architecture})" if device.architecture else ""
    lines = [
        f"device {device.name}: {device.kind} for {device.built_for}{place}, "
        f"{size(device.memory_bytes)} of intermediate tensors"
    ]
    if device.cpu_flags:
        lines.append(f"  CPU flags: {' '.join(device.cpu_flags)}")
    if device.packages:
        lines.append(f"  packages: {' '.join(device.packages)}")
    return lines


def _plan_lines(manifest: Manifest, nodes: bool) -> list[str]:
    lines = ["parts:"]
    rows = [
        [part.name, part.device, f"{len(part.nodes)} nodes", size(part.memory_bytes)]
        for part in manifest.parts
    ]
    lines += table(rows)
    if nodes:
        for part in manifest.parts:
            lines += [f"nodes of {part.name}:", *(f"  {name}" for name in part.nodes)]
    if manifest.fallbacks:
        lines.append("nodes left to ONNX Runtime:")
        lines += table([[f.node, f.operator, f.reason] for f in manifest.fallbacks])
    if manifest.transfers:
        lines.append("tensors that cross:")
        crossing = [
            [t.tensor, t.source, "->", t.destination, size(t.bytes)] for t in manifest.transfers
        ]
        lines += table(crossing)
    return lines
