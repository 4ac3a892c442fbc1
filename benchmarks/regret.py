"""Whether the plan that was chosen is the fastest of those that one could have thought of.

    python benchmarks/regret.py               all models, batch 1, 8, 32, two halves of the CPU
    python benchmarks/regret.py --target llvm --target cuda:sm_90 --target opencl \\
        --jobs 8 --model squeezenet --model resnet50 --budget 500 --output regret.json
    python benchmarks/regret.py --model mtcnn-rnet --batch 1 --plans 4 --clock cpu

Costs of every group are measured on this machine first. Then the chosen plan meets others:
everything on one device, for each device; the greedy plan; and random ones of two kinds, each group
for itself, and one cut through the model's order. In each meeting both take turns, so that a change
of the machine's speed meets both, and the figure is the median ratio over the rounds. The best of
the others meets the chosen plan a second time, both loaded anew and three times as long, since the
best of many is partly lucky, and where a plan's tensors lie is luck, too.

The regret is the time of the chosen plan over that of the best of all, itself included. The time in
``--budget`` is shared out among the cases; random plans for which there is none are left out, and
their number is said. With ``--jobs`` and ``--shares`` several processes share out the plans of a
case, which takes less time where plans take long to build. Results of plans are compared, too.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from placing import (
    Bench,
    Budget,
    Case,
    Way,
    add_options,
    agree,
    fixed,
    loaded,
    plan,
    prepare,
    ratio,
    simple_placements,
    take_turns,
)
from spread import SHARE
from turns import turn

from hybridc.placement.decide import Costs
from hybridc.placement.plan_file import PlanFile
from hybridc.placement.problem import Placement, Problem, objective

BATCHES = (1, 8, 32)
FORM = "{:<24} {:<20} {:>12} {:>12} {:>7}"


def random_placements(problem: Problem, plans: int, seed: int) -> Iterator[tuple[str, Placement]]:
    """Placements by chance, the two kinds in turn."""
    source = random.Random(seed)
    for number in range(plans):
        if number % 2:
            yield f"random {number}", tuple(source.choice(sorted(a)) for a in problem.allowed)
            continue
        order = source.sample(range(len(problem.devices)), len(problem.devices))
        cut = source.randrange(len(problem.groups) + 1)
        wanted = [order[index >= cut] for index in range(len(problem.groups))]
        pairs = zip(wanted, problem.allowed, strict=True)
        yield f"cut {number}", tuple(w if w in allowed else min(allowed) for w, allowed in pairs)


def contenders(costs: Costs, plans: int, seed: int = 0) -> dict[Placement, str]:
    """All that meet the chosen plan, those that matter most first; equal ones meet it once."""
    found: dict[Placement, str] = {costs.solution.placement: "chosen"}
    others = (*simple_placements(costs).items(), *random_placements(costs.problem, plans, seed))
    for name, placement in others:
        same = found.get(placement)
        found[placement] = f"{same}, {name}" if same else name
    return found


def compare(bench: Bench, case: Case, budget: Budget) -> list[dict[str, Any]]:
    """Let the chosen plan of a case meet all others that there is time for; gives one result."""
    found, costs = plan(case, bench.options(case))
    field = contenders(costs, bench.parsed.plans)
    first, *others = field
    others = others[bench.parsed.share :: bench.parsed.shares]
    match = _Match(bench, case, found, costs)
    rows: dict[Placement, dict[str, Any]] = {}
    with match.load(first) as chosen:
        for placement in others:
            is_random = field[placement].split()[0] in ("random", "cut")
            if not is_random or budget.left() > 4 * bench.seconds:
                rows[placement] = match.meet(chosen, placement, bench.seconds)
    best = max(rows, key=lambda placement: rows[placement].get("ratio", 0.0), default=first)
    row = rows.get(best, {})
    if row.get("ratio", 0.0) > 1:
        with match.load(first) as chosen:
            again = match.meet(chosen, best, 3 * bench.seconds)
        row["first ratio"], row["ratio"] = row["ratio"], again.get("ratio", row["ratio"])
    return [
        {
            "model": case.name,
            "batch": case.batch,
            "chosen": field[first],
            "groups by device": count_devices(found),
            "predicted_ms": objective(costs.problem, first) * 1e3,
            "regret": max([1.0, *(row["ratio"] for row in rows.values() if "ratio" in row)]),
            "left out": len(others) - len(rows),
            "plans": [{"plan": field[placement], **row} for placement, row in rows.items()],
        }
    ]


def combine(results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Results of cases, of which each share of the plans may have its own."""
    cases: dict[tuple[str, int], dict[str, Any]] = {}
    for result in results:
        key = (result["model"], result["batch"])
        one = cases.setdefault(key, {**result, "regret": 1.0, "left out": 0, "plans": []})
        one["regret"] = max(one["regret"], result["regret"])
        one["left out"] += result["left out"]
        one["plans"] += result["plans"]
    return list(cases.values())


def count_devices(found: PlanFile) -> dict[str, int]:
    """How many groups are on each device that has some."""
    names = [group.device for group in found.groups]
    return {name: names.count(name) for name in dict.fromkeys(names)}


@dataclass(frozen=True)
class _Match:
    """Plans of a case that meet."""

    bench: Bench
    case: Case
    found: PlanFile
    costs: Costs

    def load(self, placement: Placement) -> AbstractContextManager[Way]:
        """Build and load a plan."""
        where = fixed(self.found, self.costs, placement)
        return loaded(self.case, self.bench.options(self.case, fixed=where))

    def meet(self, chosen: Way, placement: Placement, seconds: float) -> dict[str, Any]:
        """Times of a plan beside the chosen one; a plan that fails says why."""
        row: dict[str, Any] = {"predicted_ms": objective(self.costs.problem, placement) * 1e3}
        try:
            with self.load(placement) as way:
                if not agree(chosen.results, way.results):
                    return {**row, "fails": "it gives other results"}
                with turn():
                    own, other = take_turns((chosen, way), seconds, self.bench.clock)
        except Exception as error:  # one plan that fails must not end a run of hours
            return {**row, "fails": (str(error).splitlines() or [type(error).__name__])[0]}
        times = {"chosen_ms": statistics.median(own) * 1e3, "ms": statistics.median(other) * 1e3}
        return {**row, **times, "ratio": ratio(own, other)}


def show(result: Mapping[str, Any]) -> None:
    """Print what was found of a case."""
    key = f"{result['model']}, batch {result['batch']}"
    for row in result["plans"]:
        texts = [row.get("fails", "")[:12], ""]
        if "ratio" in row:
            texts = [f"{row['ms']:.3f}", f"{row['ratio']:.2f}"]
        print(FORM.format(key, row["plan"][:20], f"{row['predicted_ms']:.3f}", *texts))
    note = f", {result['left out']} random plans left out" if result["left out"] else ""
    where = ", ".join(f"{name} {n}" for name, n in result["groups by device"].items())
    print(f"{key}: regret {result['regret']:.2f}; chosen: {where}{note}", flush=True)


def summarize(results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The figures of all cases together."""
    regrets = [result["regret"] for result in results]
    return {
        "median_regret": statistics.median(regrets),
        "largest_regret": max(regrets),
        "within_5_percent": sum(regret <= 1.05 for regret in regrets),
        "cases": len(regrets),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    add_options(parser, BATCHES)
    parser.add_argument("--plans", type=int, default=20, help="random plans for each case")
    parser.add_argument("--shares", type=int, default=1, help="processes for a case, see --jobs")
    parser.add_argument(SHARE, type=int, default=0, help=argparse.SUPPRESS)
    parsed = parser.parse_args(arguments)
    results: list[dict[str, Any]] = []
    with prepare(parsed, BATCHES, __file__, arguments) as bench:
        print(FORM.format("case", "plan", "predicted ms", "measured ms", "ratio"))
        for found in bench.judge_all(compare, parsed.shares):
            results = combine([*results, *found])
            show(found[0])
            bench.save(results, **summarize(results))
    if results:
        print("; ".join(f"{name} {value:.4g}" for name, value in summarize(results).items()))


if __name__ == "__main__":
    main()
