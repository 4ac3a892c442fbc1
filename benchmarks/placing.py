"""What benchmarks of placement share: models, costs measured on this machine, and plans that run.

Everything happens in one process: kernels are built and measured first, and each plan is built in
memory and called through the loader. Plans are compared in pairs that take turns.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from engines import CATALOG, LIGHT, find_model
from hybridc.targets.registry import parse_targets
from report import machine as this_machine
from spread import ONLY_COSTS, RESULTS, Spread
from turns import turn

import hybridc
from hybridc.calibration.build import ModelRequest, build_calibration
from hybridc.calibration.known import read_known
from hybridc.calibration.machine import to_json
from hybridc.calibration.run import run_calibration
from hybridc.compiler import Options, build, load_built, plan_model
from hybridc.frontend.read import read_model
from hybridc.frontend.shapes import parse_shapes
from hybridc.placement.decide import Costs
from hybridc.placement.fallback import fallback_device
from hybridc.placement.hardware import Hardware, load_hardware
from hybridc.placement.plan_file import PlanFile
from hybridc.placement.problem import Placement
from hybridc.placement.solvers.greedy import Greedy
from hybridc.placement.solvers.local_search import preferring

NAMES = (*LIGHT, *CATALOG)
HALVES = ("llvm:0", "llvm:1")

CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}

ROUNDS = 11
"""Turns of each plan in a comparison."""

FEWEST_ROUNDS = 3
"""The same where they take several times as long as a comparison should."""

PAUSE = 0.02
"""Seconds before a turn, after which idle threads of the plan before do not spin any more."""

CASES = "cases"
"""Field of a machine's file with the cases whose groups it has."""


@dataclass(frozen=True)
class Case:
    """A model with inputs of a batch and the options that fix its sizes."""

    name: str
    path: Path
    feeds: Mapping[str, Any]
    batch: int = 1

    @property
    def key(self) -> str:
        """What tells it from others."""
        return f"{self.name}, batch {self.batch}"

    @property
    def shapes(self) -> list[str]:
        """``--shape`` options for all inputs that have dimensions."""
        return [
            f"{name}={'x'.join(map(str, array.shape))}"
            for name, array in self.feeds.items()
            if array.shape
        ]


def find_cases(names: Iterable[str], batch: int = 1) -> list[Case]:
    """Models by name, with inputs of a batch; those that have a batch of their own are left out."""
    found = []
    for name in names:
        try:
            found.append(Case(name, *find_model(name, batch), batch))
        except ValueError as error:
            print(f"{name} is left out at batch {batch}: {error}", file=sys.stderr)
    return found


def calibrate(
    case: Case | None, targets: Sequence[str], seconds: float, clock: str, file: Path
) -> None:
    """Measure the groups of a case on some devices of this machine, and add them to its file.

    Without a case the machine itself is measured, into a new file.
    """
    requests = [ModelRequest(case.path, parse_shapes(case.shapes))] if case else []
    with tempfile.TemporaryDirectory(prefix="hybridc-") as folder:
        bundle = Path(folder) / "calibration"
        build_calibration(bundle, parse_targets(targets), requests)
        with turn():
            known = read_known(file) if case else None
            machine = run_calibration(bundle, seconds, clock=CLOCKS[clock], known=known)
        found = known.with_more(machine) if known else asdict(machine)
        cases = [*found.get(CASES, []), *([case.key] if case else [])]
        file.write_text(to_json({**found, CASES: cases}))


def without(file: Path, signatures: set[str], output: Path) -> None:
    """A machine's file without measurements of some groups, as if they had never been seen."""
    data = json.loads(file.read_text())
    for device in data["devices"].values():
        rows = device["measurements"]
        device["measurements"] = [r for r in rows if r["work"]["signature"] not in signatures]
    output.write_text(json.dumps(data))


def hardware(targets: Sequence[str], file: Path) -> Hardware:
    """The devices with the costs of a machine's file."""
    devices = parse_targets(targets)
    versions = {"hybridc": hybridc.__version__, "tvm": version("apache-tvm")}
    profiles = {device.name: str(file) for device in devices}
    found = load_hardware(devices, fallback_device(devices), profiles, {}, versions)
    assert found is not None
    return found


def options(case: Case, targets: Sequence[str], file: Path, **others: Any) -> Options:
    """Options of a compile by the costs of a machine's file."""
    return Options(
        devices=parse_targets(targets),
        shapes=parse_shapes(case.shapes),
        hardware=hardware(targets, file),
        verify=False,
        **others,
    )


def plan(case: Case, chosen: Options) -> tuple[PlanFile, Costs]:
    """The plan of a model, with the figures that it rests on."""
    _, placed, found, _ = plan_model(read_model(case.path), chosen)
    assert placed.decision.costs is not None
    return found, placed.decision.costs


@contextmanager
def loaded(case: Case, chosen: Options) -> Iterator[Way]:
    """Build a plan and load it: something that runs it so many times, and its results."""
    built, _ = build(read_model(case.path), chosen)
    with load_built(built) as model:
        names = {spec.name for spec in model.inputs}
        arrays = {name: array for name, array in case.feeds.items() if name in names}

        def call(count: int) -> None:
            for _ in range(count):
                model.run(arrays)

        yield Way(call, model.run(arrays))


@dataclass(frozen=True)
class Way:
    """A plan that is loaded: what runs it so many times, and what it gives."""

    call: Callable[[int], None]
    results: Mapping[str, Any]


def take_turns(ways: Sequence[Way], seconds: float, clock: str) -> list[list[float]]:
    """Seconds of a run, for each way and round; in every round each has a turn.

    Whatever the machine does besides meets all of them, so ratios within a round are to be trusted
    more than times.

    Args:
        ways: What to run.
        seconds: Time for all of it, about.
        clock: ``wall``, or ``cpu`` for the time that the process has computed: the same on a
            machine that others use too, for devices of one core each, one at work at a time.
    """
    now = CLOCKS[clock]
    taken = []
    for way in ways:
        way.call(1)
        begin = now()
        way.call(1)
        taken.append(max(now() - begin, 1e-6))
    counts = [max(1, int(seconds / ROUNDS / len(ways) / one)) for one in taken]
    rounds = min(ROUNDS, max(FEWEST_ROUNDS, int(4 * seconds / sum(taken))))
    times: list[list[float]] = [[] for _ in ways]
    for _ in range(rounds):
        for own, way, count in zip(times, ways, counts, strict=True):
            time.sleep(PAUSE)
            way.call(1)
            begin = now()
            way.call(count)
            own.append((now() - begin) / count)
    return times


def ratio(first: Sequence[float], second: Sequence[float]) -> float:
    """How many times longer the first takes: the median over the rounds."""
    return statistics.median(a / b for a, b in zip(first, second, strict=True))


def agree(first: Mapping[str, Any], second: Mapping[str, Any]) -> bool:
    """Whether two plans give the same, as far as kernels of different devices do."""
    for name, array in first.items():
        a, b = np.asarray(array, np.float64), np.asarray(second[name], np.float64)
        if not np.abs(a - b).max(initial=0.0) <= 1e-2 * max(1.0, np.abs(a).max(initial=0.0)):
            return False
    return True


@dataclass(frozen=True)
class Budget:
    """Time for all cases of a benchmark, shared out as it goes: what one leaves, others get."""

    end: float

    @classmethod
    def of(cls, seconds: float) -> Budget:
        """A budget that begins now."""
        return cls(time.monotonic() + seconds)

    def left(self) -> float:
        """Seconds that are left; below zero if they are over."""
        return self.end - time.monotonic()

    def share(self, cases: int) -> Budget:
        """The budget of the next of so many cases."""
        return Budget.of(self.left() / max(cases, 1))


def collect(
    cases: Sequence[Case],
    targets: Sequence[str],
    parsed: argparse.Namespace,
    budget: Budget,
    file: Path,
) -> None:
    """Measure the groups of cases, one after the other, into a machine's file.

    Those for which the time runs out are left out.
    """
    for case in cases:
        if budget.left() < 0:
            print(f"{case.key} is left out: no time to measure it", file=sys.stderr)
            continue
        print(f"measuring {case.key}", file=sys.stderr)
        calibrate(case, targets, parsed.kernel_seconds, parsed.clock, file)


def merge(known: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """A machine's file with the groups of further cases; the first measurement of each stays."""
    for name, device in known["devices"].items():
        rows = device["measurements"]
        seen = {row["work"]["signature"] for row in rows}
        others = new["devices"].get(name, {"measurements": []})["measurements"]
        rows += [row for row in others if row["work"]["signature"] not in seen]
    return {**known, CASES: list(dict.fromkeys((*known[CASES], *new[CASES])))}


def fixed(found: PlanFile, costs: Costs, placement: Placement) -> dict[str, str]:
    """The device of each node in a placement of the plan's groups."""
    names = costs.problem.devices
    pairs = zip(found.groups, placement, strict=True)
    return {node: names[device] for group, device in pairs for node in group.nodes}


def simple_placements(costs: Costs) -> dict[str, Placement]:
    """Everything on one device as far as it may, for each; and what is chosen greedily."""
    problem = costs.problem
    found = {
        f"all on {name}": tuple(preferring(problem, device))
        for device, name in enumerate(problem.devices)
        if any(device in allowed for allowed in problem.allowed)
    }
    return {**found, "greedy": tuple(Greedy().solve(problem, 1.0).placement)}


def add_options(parser: argparse.ArgumentParser, batches: Sequence[int]) -> None:
    """The options that benchmarks of plans share."""
    add = parser.add_argument
    add("--model", action="append", choices=NAMES, help="repeatable; default: all")
    add("--batch", action="append", type=int, help=f"repeatable; default: {list(batches)}")
    add("--target", action="append", help="repeatable; default: two halves of the CPU")
    add("--seconds", type=float, default=1.0, help="time for each comparison of two plans")
    add("--kernel-seconds", type=float, default=0.1, help="longest time for a kernel")
    add("--budget", type=float, default=3600.0, help="seconds for all of it, about")
    add("--costs", type=Path, help="a machine's file to use and add to; default: a new one")
    add("--output", type=Path, help="where to write the results as JSON, case by case")
    add("--clock", choices=CLOCKS, default="wall", help="cpu: time that the process computes")
    add("--jobs", type=int, default=1, help="processes that prepare; one measures at a time")
    add(ONLY_COSTS, action="store_true", help="measure groups for --costs, and no plan")


@dataclass(frozen=True)
class Bench:
    """What a benchmark of plans was asked for, with costs that were measured.

    Attributes:
        cases: What to judge.
        targets: The devices.
        costs: A machine's file.
        cache: Folder of kernels that were built.
        budget: Time that is left for all cases.
        parsed: The command line.
        spread: How to run the script for some cases.
    """

    cases: Sequence[Case]
    targets: Sequence[str]
    costs: Path
    cache: Path
    budget: Budget
    parsed: argparse.Namespace
    spread: Spread

    @property
    def seconds(self) -> float:
        """Time for each comparison of two plans."""
        return float(self.parsed.seconds)

    @property
    def clock(self) -> str:
        """The clock's name."""
        return str(self.parsed.clock)

    def options(self, case: Case, **others: Any) -> Options:
        """Options of a compile; kernels that were built before are taken again."""
        return options(case, self.targets, self.costs, cache=self.cache, **others)

    def save(self, results: Sequence[Mapping[str, Any]], **summary: Any) -> None:
        """Write what there is so far."""
        if self.parsed.output is not None:
            head = {"machine": this_machine(), "targets": self.targets, "clock": self.clock}
            data = {**head, **summary, RESULTS: results}
            self.parsed.output.write_text(json.dumps(data, indent=1) + "\n")

    def judge_all(self, judge: Judge, shares: int = 1) -> Iterator[list[dict[str, Any]]]:
        """Results of all cases: with ``--jobs`` by processes of their own, otherwise here.

        Args:
            judge: Gives the results of a case; gets the time for it.
            shares: Processes that share out the plans of a case, where there are processes.
        """
        count = len(self.cases)
        if self.spread.jobs > 1:
            keys = [(case.name, case.batch) for case in self.cases]
            rounds = max(1, count * shares / self.spread.jobs)
            seconds = self.budget.left() / rounds
            yield from self.spread.judge(keys, self.costs, seconds, shares)
            return
        for number, case in enumerate(self.cases):
            if self.budget.left() < 0:
                print(f"{case.key} is left out: no time for it", file=sys.stderr)
                continue
            yield judge(self, case, self.budget.share(count - number))


Judge = Callable[[Bench, Case, Budget], list[dict[str, Any]]]


@contextmanager
def prepare(
    parsed: argparse.Namespace,
    batches: Sequence[int],
    script: str,
    arguments: Sequence[str] | None = None,
) -> Iterator[Bench]:
    """Models with their costs on this machine; measuring gets half of the time at most.

    A file of costs that is there is added to, and cases that it has are not measured again.
    """
    budget, spread = Budget.of(parsed.budget), Spread.of(script, arguments)
    targets = parsed.target or HALVES
    with tempfile.TemporaryDirectory(prefix="hybridc-") as name:
        file = parsed.costs or Path(name) / "costs.json"
        cases = [c for b in parsed.batch or batches for c in find_cases(parsed.model or NAMES, b)]
        if not file.exists():
            calibrate(None, targets, parsed.kernel_seconds, parsed.clock, file)
        known = json.loads(file.read_text())
        missing = [case for case in cases if case.key not in known[CASES]]
        if spread.jobs > 1:
            for one in spread.costs([(case.name, case.batch) for case in missing], file):
                known = merge(known, one)
                file.write_text(json.dumps(known))
        else:
            collect(missing, targets, parsed, budget.share(2), file)
            known = json.loads(file.read_text())
        wanted = [] if parsed.only_costs else [c for c in cases if c.key in known[CASES]]
        yield Bench(wanted, targets, file, Path(name) / "cache", budget, parsed, spread)
