"""How far predicted times are from measured ones, over the models of the project.

    python benchmarks/prediction.py                          all models, two halves of the CPU
    python benchmarks/prediction.py --target llvm --target cuda:sm_90 --target opencl \\
        --model squeezenet --model resnet50 --budget 500 --output prediction.json
    python benchmarks/prediction.py --model squeezenet --model mtcnn-rnet --clock cpu

Each model runs all on one device, for each device; as it is placed for latency; and, where that
differs, greedily. Each of these runs is predicted with three kinds of costs:

    measured   every group of the model was measured on this machine
    learned    no group of the model was: by trees on the micro-kernels' roofline, where trees know
               the device, and by a roofline fitted to all that was measured of other models
    roofline   the same without trees

With ``--splits N`` so many random cuts of the model's order into two and three parts are run, too.

An error is |predicted / measured - 1|; medians are also given for runs on one device, and for those
that hand something over. The runs of a model take turns, but its groups were measured before, so
the machine should have nothing else to do. Where it has, ``--clock cpu`` takes the time that this
process has computed; that is a run's time for halves of one core each, and says nothing about a GPU
or about the whole CPU, whose threads wait for each other by turning.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import statistics
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from hybridc.cost_models.cost import Ranked
from hybridc.cost_models.learned import Learned
from placing import (
    Bench,
    Budget,
    Case,
    Way,
    add_options,
    fixed,
    hardware,
    loaded,
    plan,
    prepare,
    simple_placements,
    take_turns,
    without,
)
from turns import turn

from hybridc.placement.decide import Costs
from hybridc.placement.hardware import Hardware, make_problem
from hybridc.placement.problem import SECONDS, Placement, Problem, total

BATCHES = (1,)
MEASURED, LEARNED, ROOFLINE = SOURCES = ("measured", "learned", "roofline")
FORM = "{:<24} {:<20} {:>12} {:>9} {:>9} {:>9}"


def contenders(costs: Costs, splits: int = 0) -> dict[Placement, str]:
    """The placements to predict; equal ones once."""
    named = {"chosen": tuple(costs.solution.placement), **simple_placements(costs)}
    named |= cuts(costs.problem, splits)
    found: dict[Placement, str] = {}
    for name, placement in named.items():
        found[placement] = f"{found[placement]}, {name}" if placement in found else name
    return found


def cuts(problem: Problem, count: int, seed: int = 0) -> dict[str, Placement]:
    """Placements of two and three stretches of the model's order in turn, by chance."""
    source, groups, found = random.Random(seed), len(problem.groups), {}
    for number in range(count):
        parts = 2 + number % 2
        borders = sorted(source.randrange(groups + 1) for _ in range(parts - 1))
        first = source.sample(range(len(problem.devices)), 2)
        wanted = [first[sum(g >= b for b in borders) % 2] for g in range(groups)]
        pairs = zip(wanted, problem.allowed, strict=True)
        found[f"{parts} parts {number}"] = tuple(w if w in a else min(a) for w, a in pairs)
    return found


def problems(bench: Bench, costs: Costs) -> dict[str, Problem]:
    """The same problem with each kind of costs."""
    own = {group.work.signature for group in costs.graph.groups}
    file = bench.cache.with_name("unseen.json")
    without(bench.costs, own, file)
    unseen = hardware(bench.targets, file)
    plain = dataclasses.replace(
        unseen,
        models={
            name: dataclasses.replace(
                model, models=Ranked([m for m in model.models.models if not isinstance(m, Learned)])
            )
            for name, model in unseen.models.items()
        },
    )

    def again(other: Hardware) -> Problem:
        return make_problem(costs.graph, other, costs.problem.allowed)

    return {MEASURED: costs.problem, LEARNED: again(unseen), ROOFLINE: again(plain)}


def judge(bench: Bench, case: Case, _budget: Budget) -> list[dict[str, Any]]:
    """Measure the runs of a case, which take turns, and predict each in all ways."""
    found, costs = plan(case, bench.options(case))
    known = problems(bench, costs)
    rows = []
    with ExitStack() as stack:
        ways: dict[Placement, tuple[str, Way]] = {}
        for placement, name in contenders(costs, bench.parsed.splits).items():
            chosen = bench.options(case, fixed=fixed(found, costs, placement))
            try:
                ways[placement] = name, stack.enter_context(loaded(case, chosen))
            except Exception as error:  # one plan that fails must not end a run of hours
                print(f"{case.key}, {name}: {error}", file=sys.stderr)
        seconds = bench.seconds * len(ways)
        with turn():
            times = take_turns([way for _, way in ways.values()], seconds, bench.clock)
    for (placement, (name, _)), own in zip(ways.items(), times, strict=True):
        predicted = {source: total(p, SECONDS, placement) for source, p in known.items()}
        row = describe(case, name, statistics.median(own), predicted)
        rows.append({**row, "devices": len(set(placement))})
    return rows


def describe(
    case: Case, name: str, measured: float, predicted: Mapping[str, float]
) -> dict[str, Any]:
    """A row of the results; ratios are predicted over measured."""
    return {
        "model": case.name,
        "batch": case.batch,
        "plan": name,
        "run_ms": measured * 1e3,
        **{f"predicted_by_{source}_ms": seconds * 1e3 for source, seconds in predicted.items()},
        **{source: seconds / measured for source, seconds in predicted.items()},
    }


def show(row: Mapping[str, Any]) -> None:
    ratios = [f"{row[source]:.2f}" for source in SOURCES]
    case = f"{row['model']}, batch {row['batch']}"
    print(FORM.format(case, row["plan"][:20], f"{row['run_ms']:.3f}", *ratios), flush=True)


def summarize(results: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Median absolute errors by kind of costs: of runs on one device, on several, and of all."""
    kinds = {
        "one device": [row for row in results if row["devices"] == 1],
        "several devices": [row for row in results if row["devices"] > 1],
        "all": results,
    }
    return {
        f"{source}, {kind}": statistics.median(abs(row[source] - 1) for row in rows)
        for kind, rows in kinds.items()
        for source in SOURCES
        if rows
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    add_options(parser, BATCHES)
    parser.add_argument("--splits", type=int, default=0, help="random cuts for each model")
    parsed = parser.parse_args(arguments)
    results: list[dict[str, Any]] = []
    with prepare(parsed, BATCHES, __file__, arguments) as bench:
        print(FORM.format("case", "plan", "run ms", *SOURCES))
        for rows in bench.judge_all(judge):
            results += rows
            for row in rows:
                show(row)
            bench.save(results, median_errors=summarize(results))
    print(f"median errors of {len(results)} runs")
    for name, error in summarize(results).items():
        print(f"  {name}: {error:.1%}")


if __name__ == "__main__":
    main()
