"""Memory of hybridc beside ONNX Runtime, and the planned peak beside what a run really takes.

    python benchmarks/memory.py                      six models, 2 threads
    python benchmarks/memory.py --model squeezenet --threads 1

Each number comes out of fresh processes that import an engine, load a model and run it, and is the
median of several. Linux keeps the largest resident set of a process, and sets it back on request:

    peak      from just after the imports to the end of the third run
    after     what is resident then
    private   the part of that which no other process can share: all but pages of mapped files
    run       growth of the peak in the runs, once the model is loaded

Against ``run`` stands what the manifest says of intermediate tensors and of what each thread works
in. It is measured in processes of its own, in which the pages of all mapped files, the weights and
the code, are touched before the first run. Besides it has the outputs.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from adapters import Asked
from children import run_child
from engines import CATALOG, LIGHT, RESULTS, find_model
from report import machine

MODELS = ("resnet50", "vgg19", "squeezenet", "densenet121", "ppocr-det", "minilm")
RUNS = 3
REPEATS = 3
MIB = 2**20
FIELDS = ("peak", "after", "private")


def resident(field: str) -> int:
    """Bytes by a field of /proc/self/status, such as ``VmRSS``, ``VmHWM`` or ``RssAnon``."""
    for row in Path("/proc/self/status").read_text().splitlines():
        if row.startswith(f"{field}:"):
            return int(row.split()[1]) * 1024
    raise KeyError(field)


def reset_peak() -> int:
    """Set the largest resident set back to the present one, which is returned."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    return resident("VmRSS")


def touch_files() -> None:
    """Make the pages of all mapped files resident."""
    for row in Path("/proc/self/maps").read_text().splitlines():
        span, permissions, _, _, inode, *_ = row.split()
        if inode == "0" or not permissions.startswith("r"):
            continue
        start, end = (int(text, 16) for text in span.split("-"))
        _touch(start, end)


def _touch(start: int, end: int) -> None:
    import ctypes

    page = os.sysconf("SC_PAGE_SIZE")
    for address in range(start, end, page):
        ctypes.c_ubyte.from_address(address).value  # noqa: B018


def load_hybridc(path: str, threads: int) -> Callable[[Mapping[str, np.ndarray]], Any]:
    """A loaded bundle."""
    import hybridc

    return hybridc.load(path, threads=threads).run


def load_onnxruntime(path: str, threads: int) -> Callable[[Mapping[str, np.ndarray]], Any]:
    """A session with all optimizations."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return lambda feeds: session.run(None, dict(feeds))


def measure(
    engine: str, path: str, feeds_path: str, threads: int, run_only: bool
) -> dict[str, int]:
    """Bytes by the fields that the head of this file explains, of this process.

    Args:
        engine: ``hybridc`` or ``onnxruntime``.
        path: A bundle, or a model.
        feeds_path: Its inputs, as npz.
        threads: Threads that compute.
        run_only: Measure the field ``run``, and not the others.
    """
    load = {"hybridc": load_hybridc, "onnxruntime": load_onnxruntime}[engine]
    __import__({"hybridc": "hybridc.runtime.loader"}.get(engine, engine))
    with np.load(feeds_path) as file:
        feeds = {name: file[name] for name in file.files}
    base, private = reset_peak(), resident("RssAnon")
    run = load(path, threads)
    if run_only:
        touch_files()
        base = reset_peak()
    for _ in range(RUNS):
        run(feeds)
    growth = resident("VmHWM") - base
    if run_only:
        return {"run": growth}
    after = resident("VmRSS") - base
    return {"peak": growth, "after": after, "private": resident("RssAnon") - private}


def in_processes(
    engine: str, path: Path, feeds: Path, threads: int, run_only: bool
) -> dict[str, float]:
    """Medians over fresh processes, in MiB; see :func:`measure`."""
    arguments = [engine, str(path), str(feeds), "--threads", str(threads)]
    arguments += ["--run-only"] * run_only
    rows: list[dict[str, int]] = []
    for _ in range(REPEATS):
        done = run_child(__file__, arguments)
        rows.append(json.loads(done.stdout.splitlines()[-1]))
    return {name: statistics.median(row[name] for row in rows) / MIB for name in rows[0]}


def compile_bundle(
    model: Path, feeds: Mapping[str, np.ndarray], bundle: Path, target: str, threads: int
) -> int:
    """Compile a model for the shapes of its inputs; returns its planned peak in bytes."""
    command = [sys.executable, "-P", "-m", "hybridc", "compile", str(model), "-o", str(bundle)]
    command += ["--target", target, "--no-verify", "--no-fallback", "--format", "json"]
    command += [Asked(target).shape(name, array) for name, array in feeds.items() if array.ndim]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    parts = json.loads(done.stdout)["manifest"]["parts"]
    return sum(part["memory_bytes"] + threads * part["thread_bytes"] for part in parts)


def compare(name: str, threads: int, target: str) -> dict[str, Any]:
    """All figures of one model, in MiB."""
    path, feeds = find_model(name, 1)
    with tempfile.TemporaryDirectory() as folder:
        inputs, bundle = Path(folder) / "inputs.npz", Path(folder) / "model.hyb"
        np.savez(inputs, **feeds)
        planned = compile_bundle(path, feeds, bundle, target, threads)
        engines = {
            "hybridc": in_processes("hybridc", bundle, inputs, threads, False),
            "onnxruntime": in_processes("onnxruntime", path, inputs, threads, False),
        }
        run = in_processes("hybridc", bundle, inputs, threads, True)
    figures = {"planned": planned / MIB, **run}
    return {"model": name, "threads": threads, **figures, "engines": engines}


def markdown(report: Mapping[str, Any]) -> str:
    """The results as a table."""
    head = ["model", "planned", "run", "run / planned"]
    head += [f"{engine} {field}" for field in FIELDS for engine in ("hybridc", "ONNX Runtime")]
    rows = [head, ["---"] * len(head)]
    for result in report["results"]:
        ours, theirs = result["engines"]["hybridc"], result["engines"]["onnxruntime"]
        figures = [result["planned"], result["run"]]
        row = [result["model"], *(f"{figure:.1f}" for figure in figures)]
        row.append(f"{figures[1] / figures[0]:.2f}")
        row += [f"{engine[field]:.1f}" for field in FIELDS for engine in (ours, theirs)]
        rows.append(row)
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    about = report["machine"]
    title = f"{about['cpu']}, {about['cores']} cores; MiB; target `{report['target']}`."
    return "\n".join([title, "", *lines, ""])


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", action="append", choices=[*LIGHT, *CATALOG])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--target", default="llvm")
    parser.add_argument("--output", type=Path, default=RESULTS / "memory.json")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--run-only", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(measure(*options.child, options.threads, options.run_only)))
        return
    results = []
    for name in options.model or MODELS:
        results.append(compare(name, options.threads, options.target))
        print(json.dumps(results[-1]), flush=True)
    report = {"machine": machine(), "target": options.target, "results": results}
    options.output.parent.mkdir(exist_ok=True)
    options.output.write_text(json.dumps(report, indent=1) + "\n")
    options.output.with_suffix(".md").write_text(markdown(report))


if __name__ == "__main__":
    main()
