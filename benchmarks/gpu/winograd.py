"""Latency of convolutions by Winograd's algorithm on an NVIDIA GPU, beside the implicit product.

    python benchmarks/gpu/winograd.py                  all layers at batch 1, 8 and 32
    python benchmarks/gpu/winograd.py --batch 32 --jobs 8 --kernels
    python benchmarks/gpu/winograd.py --layer 64,64,56

Each layer, channels and filters of 3 x 3 and size of the image, is built with each algorithm: 0 is
the implicit product, 2 and 4 are the outputs of Winograd's tiles in each axis. Calls follow each
other in one CUDA graph, and the algorithms take turns, round by round. Printed are microseconds of
a call, the median of the rounds, with the device model's estimate in thousands of clocks behind it;
the algorithm that the model chooses, and the implicit product's time over this one's. ``--kernels``
adds the microseconds of each kernel, as CUPTI sees them.

One process builds and measures one layer. They build ``--jobs`` at a time, and measure one by one.

Needs a GPU and hybridc[compiler]; ``--kernels`` needs torch.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace

from engines import READY, wait_until_ready
from hybridc.targets.cuda.architectures import parse_gpu
from hybridc.targets.cuda.measure import convolutions
from hybridc.targets.gpu.schedules.winograd_choice import Geometry, clocks, winograd_choices

LAYERS = (
    *((64, 64, 56), (128, 128, 28), (256, 256, 14), (512, 512, 7)),  # ResNet-50
    *((16, 64, 54), (32, 128, 27), (64, 256, 13)),  # SqueezeNet
    *((128, 128, 112), (256, 256, 56), (512, 512, 28)),  # VGG-16
)

WEIGHT_BYTES = 2**26
ROUNDS, SECONDS = 9, 0.05

Run = Callable[[int], None]


def time_runs(runs: dict[int, Run], step: int) -> dict[int, float]:
    """Microseconds of a call, by algorithm."""
    counts = {}
    for size, run in runs.items():
        run(step)
        begin = time.perf_counter()
        run(step)
        each = (time.perf_counter() - begin) / step
        counts[size] = step * max(1, int(SECONDS / each) // step)
    times: dict[int, list[float]] = {size: [] for size in runs}
    for _ in range(ROUNDS):
        for size, run in runs.items():
            begin = time.perf_counter()
            run(counts[size])
            times[size].append((time.perf_counter() - begin) / counts[size] * 1e6)
    return {size: statistics.median(values) for size, values in times.items()}


def time_kernels(run: Run, step: int) -> str:
    """Microseconds of each kernel of a call."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as found:
        run(4 * step)
    events = [event for event in found.key_averages() if event.device_time_total > 0]
    return "  ".join(f"{e.key[:28]} {e.device_time_total / (4 * step):.1f}" for e in events)


def measure(layer: tuple[int, int, int], batch: int, kernels: bool) -> str:
    """The line of one layer; waits for a line of input to measure."""
    channels, filters, size = layer
    geometry = Geometry(batch, channels, filters, size, size, size, size, 1, 1)
    bench = convolutions(parse_gpu("sm_90"))
    choices = {size: choice for choice, size in winograd_choices(geometry).items()}
    codes = {size: bench.code(geometry, choice) for size, choice in choices.items()}
    print(READY, flush=True)
    input()
    started = {
        size: bench.start(geometry, choices[size], code, WEIGHT_BYTES)
        for size, code in codes.items()
    }
    runs = {size: run for size, run in sorted(started.items()) if run is not None}
    times = time_runs(runs, bench.bench.at_once)
    chosen = next(iter(choices))
    texts = [
        f"{size}: {us:8.1f} us ({clocks(replace(geometry, size=size)) / 1e3:6.1f})"
        for size, us in times.items()
    ]
    line = f"{batch:2} x {channels:3} -> {filters:3}, {size:3} x {size:3}  {'  '.join(texts)}"
    line += f"  chosen {chosen}, ratio {times[0] / times[chosen]:.2f}"
    line += f", best {times[0] / min(times.values()):.2f}"
    if kernels:
        for size, run in runs.items():
            line += f"\n    {size}: {time_kernels(run, bench.bench.at_once)}"
    return line


def start(case: tuple[tuple[int, int, int], int], kernels: bool) -> subprocess.Popen[str]:
    """A process that builds and measures one layer."""
    layer, batch = case
    command = [sys.executable, __file__, "--one", "--layer", ",".join(map(str, layer))]
    command += ["--batch", str(batch), *["--kernels"] * kernels]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT, text=True)


def _layer(text: str) -> tuple[int, int, int]:
    channels, filters, size = map(int, text.split(","))
    return channels, filters, size


def main() -> None:
    """Measure all that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layer", action="append", type=_layer)
    parser.add_argument("--batch", action="append", type=int)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--kernels", action="store_true")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    layers, batches = arguments.layer or LAYERS, arguments.batch or (1, 8, 32)
    if arguments.one:
        print(measure(layers[0], batches[0], arguments.kernels))
        return
    cases = [(layer, batch) for batch, layer in itertools.product(batches, layers)]
    for first in range(0, len(cases), arguments.jobs):
        group = cases[first : first + arguments.jobs]
        processes = [start(case, arguments.kernels) for case in group]
        texts = list(map(wait_until_ready, processes))
        for case, process, text in zip(group, processes, texts, strict=True):
            output, _ = process.communicate("\n")
            failed = f"{case} failed: {(text + output)[-1500:]}"
            print(failed if process.returncode else output.rstrip(), flush=True)


if __name__ == "__main__":
    main()
