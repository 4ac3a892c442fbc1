"""What a pipeline over two halves of the CPU is worth beside one half alone.

    python benchmarks/throughput.py                            ResNet-50, in about three minutes
    python benchmarks/throughput.py --model squeezenet --rounds 40 --seconds 0.2

The groups of the model are measured on one half of the machine's cores, and placed on both by
``--objective throughput``. Then two things take turns on the same inputs, round by round:

    one half    the whole model on as many cores as a half has, one call after the other
    pipeline    ``model.stream`` over both halves

The figure is the pipeline's rate over that of one half. It is given as the median over the rounds,
and as the ratio of the best rounds, which a machine that has other work to do disturbs least. The
time that a thread computed is not disturbed by others at all but for caches: the last line takes it
in place of the time that passed. There the busiest half is what bounds the pipeline.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hybridc.targets.registry import parse_targets
from placing import HALVES, NAMES, Case, calibrate, find_cases, options, plan

import hybridc
from hybridc.compiler import Options, compile_model
from hybridc.runtime.threads import available_threads

ONE, PIPELINE = "one half", "pipeline"


@dataclass
class Times:
    """What was measured of one way to run a model.

    Attributes:
        passed: Seconds for an input, by round.
        computed: Seconds of the busiest thread for an input, by round.
    """

    passed: list[float] = field(default_factory=list)
    computed: list[float] = field(default_factory=list)


def compile_both(case: Case, costs: Path, folder: Path) -> dict[str, Path]:
    """Bundles of the whole model for one device, and of the plan for throughput."""
    paths = {name: folder / f"{name.replace(' ', '-')}.hyb" for name in (ONE, PIPELINE)}
    split = options(case, HALVES, costs, objective="throughput")
    alone = Options(devices=parse_targets(HALVES[:1]), shapes=split.shapes, verify=False)
    compile_model(case.path, paths[ONE], alone)
    compile_model(case.path, paths[PIPELINE], split)
    found, _ = plan(case, split)
    print(f"{case.name}: {describe(found)}", flush=True)
    return paths


def describe(found: Any) -> str:
    """The stages of a plan with their predicted times."""
    busy = found.prediction.busy_seconds
    return "predicted " + ", ".join(f"{name} {value * 1e3:.2f} ms" for name, value in busy.items())


def thread_seconds() -> dict[int, float]:
    """Seconds that each Python thread of this process has computed."""
    found = {}
    for thread in threading.enumerate():
        if thread.ident is not None:
            clock = time.pthread_getcpuclockid(thread.ident)
            found[thread.ident] = time.clock_gettime(clock)
    return found


@contextmanager
def timed(times: Times, count: int) -> Iterator[None]:
    """Note what a round over so many inputs takes."""
    before, begin = thread_seconds(), time.perf_counter()
    yield
    times.passed.append((time.perf_counter() - begin) / count)
    after = thread_seconds()
    most = max(value - before.get(thread, 0.0) for thread, value in after.items())
    times.computed.append(most / count)


def take_turns(
    ways: Mapping[str, Callable[[int], None]], rounds: int, seconds: float
) -> dict[str, Times]:
    """Run all ways in each round, each over as many inputs as take about so many seconds."""
    times = {name: Times() for name in ways}
    counts = {}
    for name, way in ways.items():
        way(4)
        begin = time.perf_counter()
        way(4)
        counts[name] = max(4, int(seconds * 4 / (time.perf_counter() - begin)))
    for _ in range(rounds):
        for name, way in ways.items():
            way(2)
            with timed(times[name], counts[name]):
                way(counts[name])
    return times


def compare(case: Case, paths: Mapping[str, Path], rounds: int, seconds: float) -> float:
    """Measure and print; gives the median ratio of the rates."""
    half = max(1, available_threads() // 2)
    with hybridc.load(paths[ONE], threads=half) as one, hybridc.load(paths[PIPELINE]) as both:
        feeds = {spec.name: case.feeds[spec.name] for spec in one.inputs}

        def run_one(count: int) -> None:
            for _ in range(count):
                one.run(feeds)

        def run_pipeline(count: int) -> None:
            for _ in both.stream(feeds for _ in range(count)):
                pass

        times = take_turns({ONE: run_one, PIPELINE: run_pipeline}, rounds, seconds)
    for name, found in times.items():
        median, best = statistics.median(found.passed), min(found.passed)
        computed = min(found.computed)
        print(
            f"{name:<10} {1 / median:8.2f} runs/s, best {1 / best:8.2f}; busiest thread "
            f"{computed * 1e3:.2f} ms of {best * 1e3:.2f} ms a run"
        )
    first, second = times[ONE], times[PIPELINE]
    ratios = [a / b for a, b in zip(first.passed, second.passed, strict=True)]
    median = statistics.median(ratios)
    best = min(first.passed) / min(second.passed)
    computed = min(first.computed) / min(second.computed)
    print(f"{case.name}: {median:.2f} times the rate of one half (median of {rounds} rounds)")
    print(f"{case.name}: {best:.2f} by the best rounds, {computed:.2f} by the busiest threads")
    return median


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--model", choices=NAMES, default="resnet50")
    parser.add_argument("--rounds", type=int, default=15, help="how often both take turns")
    parser.add_argument("--seconds", type=float, default=1.0, help="time for a turn")
    parser.add_argument("--costs", type=Path, help="a machine's file to use, or to write if new")
    parsed = parser.parse_args(arguments)
    (case,) = find_cases([parsed.model])
    with tempfile.TemporaryDirectory(prefix="hybridc-") as name:
        folder = Path(name)
        costs = parsed.costs or folder / "costs.json"
        if not costs.exists():
            for one in (None, case):
                calibrate(one, HALVES, 0.1, "wall", costs)
        compare(case, compile_both(case, costs, folder), parsed.rounds, parsed.seconds)


if __name__ == "__main__":
    main()
