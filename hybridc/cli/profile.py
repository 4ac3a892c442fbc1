"""``hybridc profile``."""

from __future__ import annotations

import json
import statistics
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hybridc.bundle.files import write_text
from hybridc.cli.options import input_option, seed_option
from hybridc.cli.output import format_option, milliseconds, show, table

if TYPE_CHECKING:
    from hybridc.bundle.read import Bundle
    from hybridc.bundle.tensors import Array
    from hybridc.runtime.loader import Model
    from hybridc.runtime.timeline import Event

_PLAN = "plan.json"
_MOST_KERNELS = 15


@click.command("profile")
@click.argument("bundle", type=click.Path(path_type=Path))
@input_option
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write the timeline of a run as a Chrome trace, for chrome://tracing and Perfetto.",
)
@click.option(
    "--repeat",
    type=click.IntRange(min=1),
    default=10,
    show_default=True,
    help="Runs that the times of parts are medians of.",
)
@seed_option
@click.option("--no-kernels", is_flag=True, help="Show parts and copies only.")
@format_option
def command(
    bundle: Path,
    source: Path | None,
    output: Path | None,
    repeat: int,
    seed: int,
    no_kernels: bool,
    format_: str,
) -> None:
    """Run the BUNDLE and show when each part, copy and kernel was at work, and what was predicted.

    Needs the loader only. Kernels are noted in a run of their own, since that slows small ones
    down.
    """
    from hybridc.bundle.read import open_bundle
    from hybridc.runtime.arrays import random_inputs, read_arrays
    from hybridc.runtime.loader import load_bundle
    from hybridc.runtime.timeline import trace

    opened = open_bundle(bundle)
    predicted = predictions(opened)
    with load_bundle(opened) as model:
        arrays = read_arrays(source, model.inputs) if source else random_inputs(model, seed)
        wall, runs = _observe(model, arrays, repeat, kernels=False)
        last = runs[-1] if no_kernels else _observe(model, arrays, 1, kernels=True)[1][0]
    if output is not None:
        write_text(output, json.dumps(trace(last, predicted)), "the timeline")
    data = _summary(opened, wall, runs, last, predicted)
    show(format_, data, lambda: _as_lines(data))


def predictions(bundle: Bundle) -> dict[str, float]:
    """Seconds of each part by the cost model; empty where the bundle was compiled without costs."""
    if _PLAN not in {file.path for file in bundle.manifest.files}:
        return {}
    plan = json.loads(bytes(bundle.read(_PLAN)))
    found: dict[str, float] = {}
    part_of = {node: part for part in bundle.manifest.parts for node in part.nodes}
    for group in plan["groups"]:
        part = part_of.get(group["nodes"][0])
        for cost in group["costs"]:
            if part is not None and cost["device"] == part.device:
                found[part.name] = found.get(part.name, 0.0) + cost["seconds"]
    return found


def _observe(
    model: Model, arrays: Mapping[str, Array], repeat: int, kernels: bool
) -> tuple[list[float], list[list[Event]]]:
    """Seconds and events of each run, after one that prepares."""
    from hybridc.runtime.timeline import Timeline

    timeline = Timeline()
    seconds, runs = [], []
    with model.observed(timeline, kernels) as observed:
        for _ in range(repeat + 1):
            timeline.events = []
            begin = time.perf_counter()
            observed.run(arrays)
            seconds.append(time.perf_counter() - begin)
            runs.append(timeline.events)
    return seconds[1:], runs[1:]


def _summary(
    bundle: Bundle,
    wall: Sequence[float],
    runs: Sequence[Sequence[Event]],
    last: Sequence[Event],
    predicted: Mapping[str, float],
) -> dict[str, Any]:
    times: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for event in (event for run in runs for event in run):
        times[event.kind, event.track, event.name].append(event.seconds)
    rows = [
        {"kind": kind, "name": name, "on": track, "seconds": statistics.median(values)}
        for (kind, track, name), values in times.items()
    ]
    for row in rows:
        row["predicted"] = predicted.get(str(row["name"]))
    return {
        "seconds": statistics.median(wall),
        "predicted": sum(predicted.values()) if predicted else None,
        "runs": len(wall),
        "parts": rows,
        "kernels": _kernels(last),
    }


def _kernels(events: Sequence[Event]) -> list[dict[str, Any]]:
    """Kernels by the time that they took in all."""
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    for event in events:
        if event.kind == "kernel":
            found[event.part, event.name].append(event.seconds)
    rows = [
        {"part": part, "name": name, "calls": len(values), "seconds": sum(values)}
        for (part, name), values in found.items()
    ]
    return sorted(rows, key=lambda row: -row["seconds"])


def _as_lines(data: dict[str, Any]) -> list[str]:
    head = [f"one run {milliseconds(data['seconds'])}, median of {data['runs']}"]
    if data["predicted"] is not None:
        head[0] += f"; predicted for the parts {milliseconds(data['predicted'])}"
    rows = [["part or copy", "on", "measured", "predicted", "predicted / measured"]]
    for row in data["parts"]:
        ends = ["-", "-"]
        if row["predicted"] is not None:
            ends = [milliseconds(row["predicted"]), f"{row['predicted'] / row['seconds']:.2f}"]
        rows.append([row["name"], row["on"], milliseconds(row["seconds"]), *ends])
    lines = [*head, *table(rows)]
    if not data["kernels"]:
        return lines
    total = sum(row["seconds"] for row in data["kernels"])
    rows = [["kernel", "part", "calls", "time", "share"]]
    for row in data["kernels"][:_MOST_KERNELS]:
        share = f"{row['seconds'] / total:.0%}"
        rows.append(
            [row["name"], row["part"], str(row["calls"]), milliseconds(row["seconds"]), share]
        )
    rest = len(data["kernels"]) - _MOST_KERNELS
    return [*lines, *table(rows), *([f"  and {rest} kernels more"] if rest > 0 else [])]
