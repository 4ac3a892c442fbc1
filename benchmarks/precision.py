"""Speed and size of int8 beside float32, and beside ONNX Runtime on the same quantized model.

    python benchmarks/precision.py                      four models, one thread, this machine's CPU
    python benchmarks/precision.py --target llvm:x86-64-v3 --model resnet50

Each model is quantized by ``hybridc compile --precision int8`` with seeded samples around the
inputs of engines.py, and ``--keep-model`` gives the same model to ONNX Runtime. In one process per
model the bundles and sessions take turns; ratios are medians over the rounds, and above 1 hybridc's
int8 is faster. Accuracy is not judged here: see benchmarks/accuracy/. Where the target has fewer
instructions than this machine, ONNX Runtime uses more of them than the bundles do.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from adapters import Asked, Engine, Feeds, onnxruntime
from children import run_child
from engines import CATALOG, LIGHT, PAUSE, RESULTS, find_model, take_turns
from report import geometric_mean, machine

MODELS = ("resnet50", "ppocr-det", "ppocr-rec", "minilm")
SAMPLES = 16
"""Enough to find ranges; more would change no kernel."""

OTHERS = {
    "fp32": "hybridc fp32",
    "onnxruntime": "ONNX Runtime fp32",
    "onnxruntime-int8": "ONNX Runtime int8",
}
"""What int8 is compared with, and what the table calls it."""


def samples(feeds: Feeds) -> Iterator[Feeds]:
    """Inputs like the given ones: floats moved by noise, integers drawn from among themselves."""
    generator = np.random.default_rng(0)
    for _ in range(SAMPLES):
        yield {name: _like(array, generator) for name, array in feeds.items()}


def _like(array: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    if array.dtype.kind == "f":
        noise = generator.standard_normal(array.shape) * array.std()
        return (array + 0.2 * noise).astype(array.dtype)
    return generator.permuted(array.ravel()).reshape(array.shape)


def compile_both(path: Path, feeds: Feeds, target: str, folder: Path) -> None:
    """Bundles ``fp32.hyb`` and ``int8.hyb``, and ``int8.onnx``, in a folder."""
    data = folder / "samples"
    data.mkdir()
    for index, sample in enumerate(samples(feeds)):
        np.savez(data / f"{index:03}.npz", **sample)
    common = [sys.executable, "-P", "-m", "hybridc", "compile", str(path), "--target", target]
    common += ["--no-verify", "--no-fallback"]
    common += [Asked(target).shape(name, array) for name, array in feeds.items() if array.ndim]
    int8 = ["--precision=int8", f"--calibration={data}", f"--keep-model={folder / 'int8.onnx'}"]
    for name, options in {"fp32": [], "int8": int8}.items():
        output = str(folder / f"{name}.hyb")
        subprocess.run([*common, "-o", output, *options], check=True, capture_output=True)


def measure(name: str, threads: int, target: str) -> dict[str, Any]:
    """Times and sizes of one model in this process, which is bound to as many cores."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])
    path, feeds = find_model(name, 1)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        compile_both(path, feeds, target, folder)
        ways: dict[str, Engine] = {
            "hybridc": _loaded(folder / "int8.hyb", feeds, threads),
            "fp32": _loaded(folder / "fp32.hyb", feeds, threads),
            "onnxruntime": onnxruntime(path, feeds, threads, Asked(target)),
            "onnxruntime-int8": onnxruntime(folder / "int8.onnx", feeds, threads, Asked(target)),
        }
        times = take_turns(ways, PAUSE if threads > 1 else 0.0)
        sizes = {kind: (folder / f"{kind}.hyb").stat().st_size for kind in ("int8", "fp32")}
    return {"model": name, "threads": threads, "bytes": sizes, **_figures(times)}


def _loaded(bundle: Path, feeds: Feeds, threads: int) -> Engine:
    import hybridc

    model = hybridc.load(bundle, threads=threads)
    return lambda: model.run(feeds)


def _figures(times: Mapping[str, list[float]]) -> dict[str, Any]:
    """Medians in milliseconds, and the medians of each round's ratios."""
    ours = times["hybridc"]
    ratios = {
        other: statistics.median(a / b for a, b in zip(times[other], ours, strict=True))
        for other in OTHERS
    }
    medians = {engine: statistics.median(values) for engine, values in times.items()}
    return {"ms": medians, "ratios": ratios}


def markdown(report: Mapping[str, Any]) -> str:
    """The results as a table."""
    head = ["model", "threads", "int8, ms", *(f"over {name}" for name in OTHERS.values()), "size"]
    rows = [head, ["---"] * len(head)]
    for row in report["results"]:
        size = row["bytes"]["int8"] / row["bytes"]["fp32"]
        ratios = [f"{row['ratios'][other]:.2f}" for other in OTHERS]
        cells = [row["model"], str(row["threads"]), f"{row['ms']['hybridc']:.2f}", *ratios]
        rows.append([*cells, f"{size:.2f}"])
    means = [f"**{report['means'][other]:.2f}**" for other in OTHERS]
    rows.append(["geometric mean", "", "", *means, ""])
    about = report["machine"]
    title = f"{about['cpu']}, {about['cores']} cores; target `{report['target']}`."
    note = "Ratios above 1: hybridc's int8 is faster. Size: of fp32's bundle."
    return "\n".join([title, "", note, "", *("| " + " | ".join(row) + " |" for row in rows), ""])


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", action="append", choices=[*LIGHT, *CATALOG])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--target", default="llvm:host")
    parser.add_argument("--output", type=Path, default=RESULTS / "precision.json")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(measure(options.child, options.threads, options.target)))
        return
    results = []
    for name in options.model or MODELS:
        arguments = [name, "--threads", str(options.threads), "--target", options.target]
        done = run_child(__file__, arguments)
        results.append(json.loads(done.stdout.splitlines()[-1]))
        print(json.dumps(results[-1]), flush=True)
    means = {o: geometric_mean([row["ratios"][o] for row in results]) for o in OTHERS}
    report = {"machine": machine(), "target": options.target, "results": results, "means": means}
    options.output.parent.mkdir(exist_ok=True)
    options.output.write_text(json.dumps(report, indent=1) + "\n")
    options.output.with_suffix(".md").write_text(markdown(report))
    print(markdown(report))


if __name__ == "__main__":
    main()
