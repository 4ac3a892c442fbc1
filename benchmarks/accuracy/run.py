"""Accuracy of real models in another precision, on real input that calibration has not seen.

    python benchmarks/accuracy/run.py                              int8, all models
    python benchmarks/accuracy/run.py --model minilm --option=--precision=auto \\
        --option=--accuracy-budget=cosine=0.999

Each model is compiled by the command line with samples to calibrate with. Then the bundle runs on
other inputs beside the original model in ONNX Runtime. What is right to ask of a model is said in
the file of its task: text_lines.py, sentences.py, files.py, speech.py. Results go to
benchmarks/results/ as JSON and as a table, and the exit code is 1 if a figure is missed.

With ``--speed`` the model is compiled in fp32, too. Both bundles take turns in one process, and the
figure is the median over the rounds; the machine should have nothing else to do.

The models, fonts and texts come with ``pip install 'hybridc[bench]'`` and tools/models.py.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from task import Figure, smallest_cosine

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "benchmarks")]

DEFAULT_OPTIONS = ("--precision=int8",)

SECONDS = 30.0
"""Time for the turns of two bundles."""


def tasks() -> dict[str, Any]:
    """All tasks by name."""
    import files
    import sentences
    import speech
    import text_lines

    return {
        "ppocr-rec": text_lines.TASK,
        "minilm": sentences.TASK,
        "magika": files.TASK,
        "wake-word": speech.TASK,
    }


def measure(
    task: Any, samples: int, count: int, options: Sequence[str], with_speed: bool
) -> dict[str, Any]:
    """Compile a task's model in another precision, and judge it."""
    import onnxruntime

    import hybridc
    from models import model_path

    path = model_path(task.model)
    with tempfile.TemporaryDirectory() as folder:
        data, bundle, plain = (Path(folder) / name for name in ("samples", "bundle", "plain"))
        data.mkdir()
        for index, feeds in enumerate(task.calibration(samples)):
            np.savez(data / f"{index:05}.npz", **feeds)
        notes = compile_task(task, path, bundle, f"--calibration={data}", *options)
        if with_speed:
            compile_task(task, path, plain, "--no-verify")
        model = hybridc.load(bundle)
        original = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        cases = list(task.cases(count))
        old = [original.run(None, dict(case.feeds))[0] for case in cases]
        new = [next(iter(model(**case.feeds).values())) for case in cases]
        figures = task.judge(cases, old, new)
        figures.append(Figure("smallest cosine of an output", smallest_cosine(old, new)))
        if with_speed:
            figures += speed_of(model, hybridc.load(plain), cases[0].feeds)
    return {
        "samples": samples,
        "cases": len(cases),
        "notes": notes,
        "figures": [{**asdict(figure), "is_kept": figure.is_kept} for figure in figures],
    }


def compile_task(task: Any, path: Path, bundle: Path, *options: str) -> list[str]:
    """Compile a task's model by the command line; the notes of its report."""
    command = [sys.executable, "-m", "hybridc", "compile", str(path), "-o", str(bundle)]
    command += [*(f"--shape={shape}" for shape in task.shapes), *options, "--format=json"]
    done = subprocess.run(command, cwd=bundle.parent, stdout=subprocess.PIPE, text=True, check=True)
    notes: list[str] = json.loads(done.stdout)["notes"]
    return notes


def speed_of(model: Any, plain: Any, feeds: Mapping[str, Any]) -> list[Figure]:
    """How many times as fast as a bundle in fp32 one is, with the quartiles over the rounds."""
    from engines import PAUSE, take_turns

    ways = {"hybridc": lambda: model(**feeds), "fp32": lambda: plain(**feeds)}
    times = take_turns(ways, PAUSE, SECONDS)
    ratios = [b / a for a, b in zip(times["hybridc"], times["fp32"], strict=True)]
    names = ("lower quartile", "median", "upper quartile")
    quartiles = zip(names, statistics.quantiles(ratios, n=4), strict=True)
    return [Figure(f"times as fast as fp32, {name}", value) for name, value in quartiles]


def markdown(results: dict[str, Any], options: Sequence[str]) -> str:
    """The figures as a table."""
    lines = [f"Options: `{' '.join(options)}`", ""]
    lines += ["| model | inputs | figure | value | wanted |", "|---|---|---|---|---|"]
    for name, result in results.items():
        for figure in result["figures"]:
            sign = ">=" if figure["at_least"] else "<="
            wanted = "" if figure["bound"] is None else f"{sign} {figure['bound']:g}"
            missed = "" if figure["is_kept"] else " (missed)"
            row = [name, str(result["cases"]), figure["name"], f"{figure['value']:.4g}"]
            lines.append(f"| {' | '.join(row)} | {wanted}{missed} |")
    lines += ["", *(f"- {name}: {note}" for name, r in results.items() for note in r["notes"])]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Run the benchmark; the exit code."""
    from report import machine

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", action="append", choices=list(tasks()))
    parser.add_argument("--samples", type=int, default=500, help="samples to calibrate with")
    parser.add_argument("--cases", type=int, help="inputs to judge by; each task has its own")
    parser.add_argument("--option", action="append", help="an option of hybridc compile")
    parser.add_argument("--name", default="accuracy", help="name of the files in results/")
    parser.add_argument("--speed", action="store_true", help="time it beside fp32, too")
    asked = parser.parse_args()
    options = tuple(asked.option or DEFAULT_OPTIONS)
    results = {}
    for name in asked.model or tasks():
        task = tasks()[name]
        count = asked.cases or task.count
        results[name] = measure(task, asked.samples, count, options, asked.speed)
        print(markdown({name: results[name]}, options), flush=True)
    RESULTS.mkdir(exist_ok=True)
    report = {"machine": machine(), "options": options, "results": results}
    (RESULTS / f"{asked.name}.json").write_text(json.dumps(report, indent=1) + "\n")
    (RESULTS / f"{asked.name}.md").write_text(markdown(results, options))
    kept = [f["is_kept"] for result in results.values() for f in result["figures"]]
    return 0 if all(kept) else 1


if __name__ == "__main__":
    sys.exit(main())
