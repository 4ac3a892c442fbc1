"""What is checked in processes that hold the loader alone: ``opencl_loader.py CHECK PATH...``.

Prints what was found, as JSON.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import tvm_ffi

import hybridc
from hybridc.runtime.arrays import random_inputs


def threads(path: str) -> dict[str, Any]:
    """Four threads call one model at once, each with inputs of its own."""
    with hybridc.load(path) as model:
        inputs = [random_inputs(model, seed) for seed in range(4)]
        expected = [model.run(arrays) for arrays in inputs]
        same: list[bool] = []

        def work(index: int) -> None:
            for _ in range(50):
                same.append(_equal(model.run(inputs[index]), expected[index]))

        workers = [threading.Thread(target=work, args=(index,)) for index in range(4)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    distinct = not any(_equal(expected[0], other) for other in expected[1:])
    return {"calls": len(same), "same": sum(same), "distinct": distinct}


def two_models(*paths: str) -> dict[str, Any]:
    """Two models loaded at once give what each gives alone."""
    alone = []
    for path in paths:
        with hybridc.load(path) as model:
            alone.append(model.run(random_inputs(model, 1)))
    same = []
    with hybridc.load(paths[0]) as one, hybridc.load(paths[1]) as two:
        for _ in range(5):
            for model, expected in zip((one, two), alone, strict=True):
                same.append(_equal(model.run(random_inputs(model, 1)), expected))
    return {"calls": len(same), "same": sum(same)}


def cycles(path: str) -> dict[str, Any]:
    """Resident memory in kB after 50 and after 200 times of loading, calling and closing."""
    resident = []
    for _ in range(200):
        with hybridc.load(path) as model:
            model.run(random_inputs(model, 0))
        resident.append(_resident())
    return {"early": max(resident[20:60]), "late": min(resident[160:])}


def times(path: str) -> dict[str, Any]:
    """Calls and nanoseconds of each kernel in three calls of the model."""
    read = "hybridc.opencl.kernel_times"
    with hybridc.load(path) as model:
        for _ in range(3):
            model.run(random_inputs(model, 0))
        found = tvm_ffi.get_global_func(read)(0)
        again = tvm_ffi.get_global_func(read)(0)
    return {"times": {str(k): list(v) for k, v in found.items()}, "left": len(again)}


def outputs(path: str) -> dict[str, Any]:
    """The results for the same inputs in every process."""
    with hybridc.load(path) as model:
        results = model.run(random_inputs(model, 0))
    return {name: array.tolist() for name, array in results.items()}


def _equal(left: dict[str, Any], right: dict[str, Any]) -> bool:
    return all(np.array_equal(left[name], right[name]) for name in right)


def _resident() -> int:
    with open("/proc/self/status", encoding="utf-8") as file:
        line = next(line for line in file if line.startswith("VmRSS"))
    return int(line.split()[1])


CHECKS: dict[str, Callable[..., dict[str, Any]]] = {
    check.__name__: check for check in (threads, two_models, cycles, times, outputs)
}

if __name__ == "__main__":
    found = CHECKS[sys.argv[1]](*sys.argv[2:])
    assert "tvm" not in sys.modules, "the loader has imported the compiler"
    print(json.dumps(found))
