"""Check one bundle with the loader alone: ``python check.py BUNDLE``; prints one line.

Checks the files, the results on the stored samples, and the time of a call.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

RUNS, SECONDS = 200, 3.0
"""A call is timed so often, or for so long if that is sooner."""


def check(path: Path) -> str:
    """Errors and times of a bundle in one line; raises what the loader raises."""
    from hybridc.bundle.read import open_bundle
    from hybridc.runtime.arrays import random_inputs
    from hybridc.runtime.loader import load_bundle
    from hybridc.runtime.samples import run_samples

    bundle = open_bundle(path)
    bundle.check_all()
    errors = run_samples(bundle)
    start = time.perf_counter()
    with load_bundle(bundle) as model:
        loaded = time.perf_counter() - start
        inputs = random_inputs(model, 0)
        model.run(inputs)
        times = _times(lambda: model.run(inputs))
    worst = max((error.error for error in errors), default=0.0)
    state = "ok   " if errors and all(error.within for error in errors) else "WRONG"
    wrong = " ".join(f"{e.output}:{e.error:.1e}" for e in errors if not e.within)
    return (
        f"{state} error {worst:8.1e}  load {loaded * 1e3:6.0f} ms  "
        f"call {min(times) * 1e3:8.3f} ms best, {sorted(times)[len(times) // 2] * 1e3:8.3f} median"
        f"  {wrong}"
    )


def _times(call: object) -> list[float]:
    times: list[float] = []
    end = time.perf_counter() + SECONDS
    while len(times) < RUNS and time.perf_counter() < end:
        start = time.perf_counter()
        call()  # type: ignore[operator]
        times.append(time.perf_counter() - start)
    return times


def main() -> int:
    """Check the bundle named on the command line; 0 if its results are right."""
    path = Path(sys.argv[1])
    try:
        line = check(path)
    except Exception as error:
        line = f"FAILED {type(error).__name__}: {' '.join(str(error).split())[:1500]}"
    print(f"{path.name:26} {line}", flush=True)
    return int("ok " not in line)


if __name__ == "__main__":
    sys.exit(main())
