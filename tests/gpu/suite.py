"""ONNX's own tests on a device: how many pass, how many are refused, and which are wrong.

    python -m tests.gpu.suite cuda:sm_90 [TEST ...] [--jobs 16] [--list FILE]

Every test is compiled for the target alone, so what it cannot run is refused; results are judged as
the suite judges them; disputed are those whose expected values are further from the exact ones than
ours. The exit code is the number of wrong results and of processes that ended.
Needs the device and the compiler.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing.pool
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

from tests.conformance.disputed import dispute
from tests.conformance.suite import Case, cases, is_nearer, run

PASSED, REFUSED, DISPUTED = "passed", "refused", "disputed"
WRONG, ENDED = "wrong", "ended"


def judge(case: Case, target: str) -> tuple[str, str]:
    """What became of a test, and why."""
    from hybridc.errors import UnsupportedError

    try:
        fault = run(case, target=target)
    except UnsupportedError as error:
        return REFUSED, " ".join(str(error).split())[-200:]
    except Exception as error:
        return WRONG, f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    found = dispute(case.name)
    if fault and found and is_nearer(case, target):
        return DISPUTED, found[0]
    return (WRONG, fault) if fault else (PASSED, "")


def work(target: str, names: list[str], seconds: float) -> None:
    """Judge tests one by one; a line of JSON for each, before which its name is printed."""
    begin = time.monotonic()
    for name in names:
        if time.monotonic() - begin > seconds:
            return
        print(json.dumps([name]), flush=True)
        print(json.dumps([name, *judge(cases()[name], target)]), flush=True)


def run_all(target: str, names: list[str], seconds: float) -> dict[str, tuple[str, str]]:
    """Judge tests in a process of their own, and in another one behind each that ends it."""
    found: dict[str, tuple[str, str]] = {}
    begin = time.monotonic()
    while names:
        command = [sys.executable, "-m", "tests.gpu.suite", "--work", target, *names]
        left = max(begin + seconds - time.monotonic(), 0.0)
        command += ["--seconds", str(left)]
        done = subprocess.run(command, capture_output=True, text=True)
        lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
        found.update({line[0]: (line[1], line[2]) for line in lines if len(line) == 3})
        started = [line[0] for line in lines if len(line) == 1]
        if not done.returncode:
            break
        last = started[-1] if started else names[0]
        found.setdefault(last, (ENDED, f"exit code {done.returncode}: {done.stderr[-300:]}"))
        names = names[names.index(last) + 1 :]
    return found


def main() -> int:
    """Run the suite on a target."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target")
    parser.add_argument("names", nargs="*")
    parser.add_argument("--jobs", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=3600.0, help="stop after so long")
    parser.add_argument("--list", type=Path, help="where to write what is not passed, as JSON")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work:
        work(arguments.target, arguments.names, arguments.seconds)
        return 0
    names = sorted(arguments.names or cases())
    shares = [names[index :: arguments.jobs] for index in range(arguments.jobs)]
    with multiprocessing.pool.ThreadPool(arguments.jobs) as pool:
        results = pool.starmap(
            run_all, [(arguments.target, share, arguments.seconds) for share in shares]
        )
    found = {name: result for share in results for name, result in share.items()}
    counts = Counter(outcome for outcome, _ in found.values())
    print(f"{arguments.target}: {len(found)} of {len(names)} tests: {dict(counts)}")
    for name, (outcome, reason) in sorted(found.items()):
        if outcome in (WRONG, ENDED):
            print(f"{outcome:8} {name}: {reason}")
    if arguments.list:
        left = {name: result for name, result in sorted(found.items()) if result[0] != PASSED}
        arguments.list.write_text(json.dumps(left, indent=1) + "\n")
    return counts[WRONG] + counts[ENDED]


if __name__ == "__main__":
    sys.exit(main())
