"""How far predicted times are from measured ones, over the models of the project.

    python benchmarks/prediction.py                                   all models
    python benchmarks/prediction.py --model squeezenet --model mtcnn-rnet --seconds 2
    python benchmarks/prediction.py --clock cpu                       on a machine in use

    whole    the whole CPU, every group of the model measured on it
    half     half of the CPU (``llvm:0`` of ``llvm:0`` and ``llvm:1``), measured likewise
    unseen   the same, by a roofline fitted to micro-kernels and to groups of the other models
    split    a run of the plan for throughput over both halves

An error is |predicted / measured - 1|. Groups and runs are measured one after the other, so the
machine should have nothing else to do. Where it has, ``--clock cpu`` takes the time that this
process has computed; that is a run's time for halves of one core each, and says nothing about the
whole CPU, whose threads wait for each other by turning.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path

from placing import HALVES, NAMES, WHOLE, Case, calibrate, find_cases, options, plan, run, without


def judge(
    case: Case, targets: Sequence[str], costs: Path, seconds: float, clock: str, objective: str
) -> tuple[float, float, float]:
    """Predicted and measured seconds of a run, and the spread of the measured ones."""
    chosen = options(case, targets, costs, objective=objective)
    found, _ = plan(case, chosen)
    assert found.prediction is not None
    time = run(case, chosen, seconds, clock)
    return found.prediction.latency_seconds, time.seconds, time.spread


def predict_unseen(case: Case, targets: Sequence[str], costs: Path, folder: Path) -> float:
    """Predicted seconds of a run with none of the model's groups measured."""
    found, _ = plan(case, options(case, targets, costs))
    own = {group.work.signature for group in found.groups if group.work}
    unseen = folder / "unseen.json"
    without(costs, own, unseen)
    again, _ = plan(case, options(case, targets, unseen))
    assert again.prediction is not None
    return again.prediction.latency_seconds


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--model", action="append", choices=NAMES, help="repeatable; default: all")
    parser.add_argument("--seconds", type=float, default=1.0, help="time for each measurement")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall", help="see above")
    parsed = parser.parse_args(arguments)
    cases = find_cases(parsed.model or NAMES)
    errors: dict[str, list[float]] = {}
    form = "{:<14} {:<11} {:>12} {:>12} {:>7} {:>7}"
    print(form.format("model", "costs", "predicted ms", "measured ms", "ratio", "spread"))

    def show(case: Case, source: str, predicted: float, measured: float, spread: float) -> None:
        ratio = predicted / measured
        errors.setdefault(source, []).append(abs(ratio - 1))
        numbers = (f"{predicted * 1e3:.3f}", f"{measured * 1e3:.3f}", f"{ratio:.2f}")
        print(form.format(case.name, source, *numbers, f"{spread:.0%}"), flush=True)

    with tempfile.TemporaryDirectory(prefix="hybridc-") as name:
        folder = Path(name)
        whole, halves = folder / "whole.json", folder / "halves.json"
        with_whole = parsed.clock == "wall"
        if with_whole:
            calibrate(cases, WHOLE, parsed.seconds / 2, whole)
        calibrate(cases, HALVES, parsed.seconds / 2, halves)
        for case in cases:
            how = (parsed.seconds, parsed.clock)
            if with_whole:
                show(case, "whole", *judge(case, WHOLE, whole, *how, "latency"))
            predicted, measured, spread = judge(case, HALVES, halves, *how, "latency")
            show(case, "half", predicted, measured, spread)
            unseen = predict_unseen(case, HALVES, halves, folder)
            show(case, "unseen", unseen, measured, spread)
            show(case, "split", *judge(case, HALVES, halves, *how, "throughput"))
    for source, found in errors.items():
        print(f"{source}: median absolute error {statistics.median(found):.0%} of {len(found)}")


if __name__ == "__main__":
    main()
