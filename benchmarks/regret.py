"""Whether the plan that was chosen is the fastest of those that one could have thought of.

    python benchmarks/regret.py                               all models on two halves of the CPU
    python benchmarks/regret.py --model mtcnn-rnet --plans 20 --batch 8

Costs of every group are measured on this machine first. Then the chosen plan, everything on one
device, the greedy plan and random plans are built and run. The regret is the measured time of the
chosen plan over that of the best of all. Random plans are of two kinds: each group for itself, and
one cut through the model's order.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from placing import HALVES, NAMES, Case, calibrate, find_cases, options, plan, run

from hybridc.placement.decide import Costs
from hybridc.placement.plan_file import PlanFile
from hybridc.placement.problem import objective
from hybridc.placement.solvers.greedy import Greedy
from hybridc.placement.solvers.local_search import preferring

Placement = tuple[int, ...]


def placements(costs: Costs, plans: int, seed: int) -> Iterator[tuple[str, Placement]]:
    """The plans to compare, by name."""
    problem = costs.problem
    yield "chosen", costs.solution.placement
    for device, name in enumerate(problem.devices):
        if any(device in allowed for allowed in problem.allowed):
            yield f"all on {name}", tuple(preferring(problem, device))
    yield "greedy", tuple(Greedy().solve(problem, 1.0).placement)
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


def fixed(found: PlanFile, costs: Costs, placement: Placement) -> dict[str, str]:
    """The device of each node."""
    names = costs.problem.devices
    pairs = zip(found.groups, placement, strict=True)
    return {node: names[device] for group, device in pairs for node in group.nodes}


def compare(case: Case, costs_file: Path, plans: int, seconds: float, clock: str) -> float:
    """Run all plans of a model; prints them and gives the regret."""
    found, costs = plan(case, options(case, HALVES, costs_file))
    times: dict[str, float] = {}
    known: dict[Placement, float] = {}
    for name, placement in placements(costs, plans, seed=0):
        if placement not in known:
            chosen = options(case, HALVES, costs_file, fixed=fixed(found, costs, placement))
            known[placement] = run(case, chosen, seconds, clock).seconds
        times[name] = known[placement]
        predicted = objective(costs.problem, placement)
        row = (case.name, name, f"{predicted * 1e3:.3f}", f"{times[name] * 1e3:.3f}")
        print("{:<14} {:<20} {:>12} {:>12}".format(*row), flush=True)
    best = min(times, key=times.__getitem__)
    regret = times["chosen"] / times[best]
    print(f"{case.name}: regret {regret:.2f}; the best is {best}", flush=True)
    return regret


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--model", action="append", choices=NAMES, help="repeatable; default: all")
    parser.add_argument("--batch", type=int, default=1, help="batch of the inputs")
    parser.add_argument("--plans", type=int, default=20, help="random plans for each model")
    parser.add_argument("--seconds", type=float, default=1.0, help="time for each measurement")
    parser.add_argument(
        "--clock", choices=("wall", "cpu"), default="wall", help="as for prediction.py"
    )
    parsed = parser.parse_args(arguments)
    cases = find_cases(parsed.model or NAMES, parsed.batch)
    print("{:<14} {:<20} {:>12} {:>12}".format("model", "plan", "predicted ms", "measured ms"))
    with tempfile.TemporaryDirectory(prefix="hybridc-") as folder:
        costs = Path(folder) / "costs.json"
        calibrate(cases, HALVES, parsed.seconds / 2, costs)
        how = (parsed.plans, parsed.seconds, parsed.clock)
        found = [compare(case, costs, *how) for case in cases]
    print(f"regret: median {statistics.median(found):.2f}, largest {max(found):.2f}")


if __name__ == "__main__":
    main()
