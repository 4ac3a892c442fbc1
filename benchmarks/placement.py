"""How long plans of large graphs take, and how good they are proven to be.

    python benchmarks/placement.py                        1,000 and 10,000 groups, 2 and 4 devices
    python benchmarks/placement.py --groups 5000 --devices 3 --seconds 30 --seed 7

The graphs are deep networks of short branches over devices with a memory each, as the tests of the
solvers make them. The bound is the solver's own: no placement is below it. The peak of memory is
that of a process for each problem.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CASES = ((1_000, 2), (1_000, 4), (10_000, 2), (10_000, 4))


def measure(groups: int, devices: int, seconds: float, seed: int) -> dict[str, object]:
    """Solve one problem in this process."""
    sys.path.insert(0, str(ROOT))
    from hybridc.placement.problem import objective
    from hybridc.placement.solvers.choose import solve
    from tests.placement.solvers.problems import make_large

    problem = make_large(groups, devices, seed)
    begin, computing = time.perf_counter(), time.process_time()
    found = solve(problem, seconds)
    taken, computed = time.perf_counter() - begin, time.process_time() - computing
    value = objective(problem, found.placement)
    bound = min(found.bound, value)
    return {
        "groups": groups,
        "devices": devices,
        "seconds": taken,
        "cpu_seconds": computed,
        "solver": found.solver,
        "objective": value,
        "bound": bound,
        "gap": (value - bound) / value,
        "megabytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def measure_apart(groups: int, devices: int, seconds: float, seed: int) -> dict[str, object]:
    """The same in a process of its own, for its peak of memory."""
    numbers = {"--groups": groups, "--devices": devices, "--seconds": seconds, "--seed": seed}
    options = [str(word) for pair in numbers.items() for word in pair]
    command = [sys.executable, __file__, "--here", *options]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, object] = json.loads(result.stdout.splitlines()[-1])
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--groups", type=int, help="groups of the graph")
    parser.add_argument("--devices", type=int, help="devices, with a memory each")
    parser.add_argument("--seconds", type=float, default=10.0, help="time for the solver")
    parser.add_argument("--seed", type=int, default=0, help="seed of the graph")
    parser.add_argument("--here", action="store_true", help="in this process, as JSON")
    options = parser.parse_args(arguments)
    cases = CASES
    if options.groups or options.devices:
        cases = ((options.groups or CASES[0][0], options.devices or CASES[0][1]),)
    if options.here:
        print(json.dumps(measure(*cases[0], options.seconds, options.seed)))
        return
    form = "{:>7} {:>7} {:>8} {:>8} {:>12} {:>12} {:>8} {:>6}  {}"
    names = ("groups", "devices", "seconds", "cpu", "objective", "bound", "gap", "MB", "solver")
    print(form.format(*names))
    for groups, devices in cases:
        row = measure_apart(groups, devices, options.seconds, options.seed)
        numbers = (f"{row['seconds']:.2f}", f"{row['cpu_seconds']:.2f}")
        numbers += (f"{row['objective']:.3f}", f"{row['bound']:.3f}")
        ends = (f"{row['gap']:.3%}", f"{row['megabytes']:.0f}", row["solver"])
        print(form.format(groups, devices, *numbers, *ends), flush=True)


if __name__ == "__main__":
    main()
