"""Accuracy of real models in another precision, on real input that calibration has not seen.

    python benchmarks/accuracy/run.py                              int8, all models
    python benchmarks/accuracy/run.py --model minilm --option=--precision=auto \\
        --option=--accuracy-budget=cosine=0.999

Each model is compiled by the command line with samples to calibrate with. Then the bundle runs on
other inputs beside the original model in ONNX Runtime. What is right to ask of a model is said in
the file of its task: text_lines.py, sentences.py, files.py, speech.py. Results go to
benchmarks/results/ as JSON and as a table, and the exit code is 1 if a figure is missed.

The models, fonts and texts come with ``pip install 'hybridc[bench]'`` and tools/models.py.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "benchmarks")]

DEFAULT_OPTIONS = ("--precision=int8",)


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


def measure(task: Any, samples: int, count: int, options: Sequence[str]) -> dict[str, Any]:
    """Compile a task's model in another precision, and judge it."""
    import onnxruntime

    import hybridc
    from models import model_path

    path = model_path(task.model)
    with tempfile.TemporaryDirectory() as folder:
        data, bundle = Path(folder) / "samples", Path(folder) / "bundle"
        data.mkdir()
        for index, feeds in enumerate(task.calibration(samples)):
            np.savez(data / f"{index:05}.npz", **feeds)
        command = [sys.executable, "-m", "hybridc", "compile", str(path), "-o", str(bundle)]
        command += [f"--shape={shape}" for shape in task.shapes]
        command += [f"--calibration={data}", *options, "--format=json"]
        done = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, text=True, check=True)
        model = hybridc.load(bundle)
        original = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        cases = list(task.cases(count))
        old = [original.run(None, dict(case.feeds))[0] for case in cases]
        new = [next(iter(model(**case.feeds).values())) for case in cases]
    figures = task.judge(cases, old, new)
    return {
        "samples": samples,
        "cases": len(cases),
        "notes": json.loads(done.stdout)["notes"],
        "figures": [{**asdict(figure), "is_kept": figure.is_kept} for figure in figures],
    }


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
    asked = parser.parse_args()
    options = tuple(asked.option or DEFAULT_OPTIONS)
    results = {}
    for name in asked.model or tasks():
        task = tasks()[name]
        results[name] = measure(task, asked.samples, asked.cases or task.count, options)
        print(markdown({name: results[name]}, options), flush=True)
    RESULTS.mkdir(exist_ok=True)
    report = {"machine": machine(), "options": options, "results": results}
    (RESULTS / f"{asked.name}.json").write_text(json.dumps(report, indent=1) + "\n")
    (RESULTS / f"{asked.name}.md").write_text(markdown(results, options))
    kept = [f["is_kept"] for result in results.values() for f in result["figures"]]
    return 0 if all(kept) else 1


if __name__ == "__main__":
    sys.exit(main())
