"""What the loader costs: start-up time, memory, and the time of a call beside TVM's own.

    python benchmarks/loader.py BUNDLE

A call through the loader is numpy in, numpy out. TVM's virtual machine is called directly with
tensors made beforehand. The two take turns, and the difference of the medians is what the loader
adds. Start-up is measured in fresh processes.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time

START = """
import json, resource, sys, time
begin = time.perf_counter()
import hybridc
import hybridc.runtime
imported = time.perf_counter()
model = hybridc.load(sys.argv[1])
loaded = time.perf_counter()
from hybridc.runtime.arrays import random_inputs
model.run(random_inputs(model, 0))
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
print(json.dumps([imported - begin, loaded - imported, peak]))
"""


def start_up(bundle: str, runs: int = 9) -> None:
    rows = []
    for _ in range(runs):
        output = subprocess.run(
            [sys.executable, "-c", START, bundle], capture_output=True, text=True, check=True
        )
        rows.append(json.loads(output.stdout))
    imports, loads, peaks = zip(*rows, strict=True)
    print(f"import       median {statistics.median(imports):.3f} s, max {max(imports):.3f} s")
    print(f"load         median {statistics.median(loads):.3f} s, max {max(loads):.3f} s")
    print(f"peak memory  median {statistics.median(peaks):.1f} MB, max {max(peaks):.1f} MB")


def call_overhead(bundle: str, rounds: int = 15, calls: int = 20) -> None:
    import hybridc
    from hybridc.runtime.arrays import random_inputs

    model = hybridc.load(bundle)
    arrays = random_inputs(model, 0)
    tensors = model._reader.read(arrays)
    step = model._idle[0]._steps[0]
    ways = {
        "virtual machine": lambda: step.function(*tensors, step.weights),
        "loader": lambda: model.run(arrays),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            begin = time.perf_counter()
            for _ in range(calls):
                way()
            times[name].append((time.perf_counter() - begin) / calls * 1e6)
    medians = {name: statistics.median(values) for name, values in times.items()}
    differences = [a - b for a, b in zip(times["loader"], times["virtual machine"], strict=True)]
    for name, median in medians.items():
        print(f"{name:<16} median {median:9.1f} us a call")
    print(
        f"{'difference':<16} median {statistics.median(differences):9.1f} us a call, pair by pair"
    )


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    start_up(sys.argv[1])
    call_overhead(sys.argv[1])
