"""Results of a benchmark as a table in Markdown and as a plot."""

from __future__ import annotations

import math
import os
import platform
import statistics
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = (
    "hybridc",
    "apache-tvm",
    "onnxruntime",
    "openvino",
    "iree-base-compiler",
    "iree-base-runtime",
    "numpy",
)


def machine() -> dict[str, Any]:
    """The machine and the versions that results belong to."""
    text = Path("/proc/cpuinfo").read_text()
    names = (row.partition(":")[2].strip() for row in text.splitlines() if "model name" in row)
    return {
        "cpu": next(names, ""),
        "cores": os.cpu_count(),
        "system": platform.system(),
        "versions": {name: _version(name) for name in PACKAGES},
    }


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def geometric_means(results: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Geometric mean of the ratios against each engine, over the models that it ran."""
    ratios: dict[str, list[float]] = {}
    for result in results:
        for engine, row in result["engines"].items():
            if engine != "hybridc":
                ratios.setdefault(engine, []).append(row["ratio"])
    return {name: geometric_mean(own) for name, own in ratios.items()}


def geometric_mean(ratios: Sequence[float]) -> float:
    """Of positive numbers."""
    return math.exp(statistics.fmean(map(math.log, ratios)))


def markdown(report: Mapping[str, Any]) -> str:
    """The results as a table: median (minimum) in ms, and how much faster hybridc is."""
    engines = list(report["means"])
    head = ["model", "batch", "threads", "hybridc", *engines, *(f"vs. {e}" for e in engines)]
    rows = [head, ["---"] * len(head)]
    for result in report["results"]:
        found = result["engines"]
        times = [_time(found.get(name)) for name in ("hybridc", *engines)]
        ratios = [f"{found[name]['ratio']:.2f}" if name in found else "" for name in engines]
        rows.append([result["model"], *map(str, (result["batch"], result["threads"]))])
        rows[-1] += [*times, *ratios]
    means = [f"**{report['means'][name]:.2f}**" for name in engines]
    rows.append(["geometric mean", "", "", *[""] * (len(engines) + 1), *means])
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    about = report["machine"]
    found = about["versions"].items()
    versions = ", ".join(f"{name} {number}" for name, number in found if number)
    title = f"{about['cpu']}, {about['cores']} cores; target `{report['target']}`; {versions}."
    note = "Milliseconds: median (minimum). Ratios: medians over rounds; above 1 hybridc is faster."
    return "\n".join([title, "", note, "", *lines, ""])


def _time(row: Mapping[str, float] | None) -> str:
    return "fails" if row is None else f"{row['median_ms']:.2f} ({row['min_ms']:.2f})"


def plot(report: Mapping[str, Any], path: Path) -> None:
    """The ratios as horizontal bars, one group for each model, batch and number of threads."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    results, engines = report["results"], list(report["means"])
    labels = [f"{r['model']}, batch {r['batch']}, {r['threads']} threads" for r in results]
    figure, axes = pyplot.subplots(figsize=(8, 1.5 + 0.16 * len(labels) * (len(engines) + 1)))
    height = 0.8 / max(len(engines), 1)
    for index, engine in enumerate(engines):
        ratios = [r["engines"].get(engine, {}).get("ratio", 0.0) for r in results]
        places = [place + index * height for place in range(len(results))]
        axes.barh(places, ratios, height, label=f"against {engine}")
    axes.set_yticks([place + 0.4 - height / 2 for place in range(len(labels))], labels, fontsize=7)
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.set_xlabel("time of the other engine / time of hybridc")
    axes.invert_yaxis()
    axes.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
