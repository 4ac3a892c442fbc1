"""Check the loader on a GPU: ``python loader.py FOLDER``, with the bundles of ``bundles.py``.

Needs the loader and nothing else; with PyTorch there, also tensors that are on the GPU already.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import hybridc
from hybridc.runtime.arrays import random_inputs


def threads(folder: Path) -> str:
    """Four threads call one model at once, each with inputs of its own."""
    with hybridc.load(folder / "branches") as model:
        inputs = [random_inputs(model, seed) for seed in range(4)]
        expected = [model.run(arrays)["y"] for arrays in inputs]
        wrong: list[int] = []

        def work(index: int) -> None:
            for _ in range(250):
                if not np.array_equal(model.run(inputs[index])["y"], expected[index]):
                    wrong.append(index)

        workers = [threading.Thread(target=work, args=(index,)) for index in range(4)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    assert not wrong, f"{len(wrong)} of 1000 calls gave another result"
    return "1000 calls from 4 threads"


def two_models(folder: Path) -> str:
    """Two models loaded at once give what each gives alone."""
    names = ("matmul", "softmax")
    alone = []
    for name in names:
        with hybridc.load(folder / name) as model:
            alone.append(model.run(random_inputs(model, 1))["y"])
    with hybridc.load(folder / "matmul") as one, hybridc.load(folder / "softmax") as two:
        for _ in range(20):
            for model, expected in zip((one, two), alone, strict=True):
                assert np.array_equal(model.run(random_inputs(model, 1))["y"], expected)
    return "two models in turn"


def memory(folder: Path) -> str:
    """Calls and load/close cycles leave the memory of the GPU and of the process as it was.

    The GPU's is that of all processes, so nothing else may start on it meanwhile.
    """
    with hybridc.load(folder / "matmul") as model:
        inputs = random_inputs(model, 0)
        for _ in range(100):
            model.run(inputs)
        before = _free(), _resident()
        for _ in range(10_000):
            model.run(inputs)
        after = _free(), _resident()
    cycles = []
    for _ in range(100):
        with hybridc.load(folder / "matmul") as model:
            model.run(inputs)
        cycles.append((_free(), _resident()))
    calls = f"10000 calls: GPU {(before[0] - after[0]) >> 10} kB, host {after[1] - before[1]} kB"
    lost = cycles[10][0] - cycles[-1][0], cycles[-1][1] - cycles[10][1]
    text = f"{calls}; 90 loads: GPU {lost[0] >> 10} kB, host {lost[1]} kB"
    assert before[0] - after[0] < 4 << 20, text
    assert lost[0] < 4 << 20, text
    assert after[1] - before[1] < 4096, text
    assert lost[1] < 16384, text
    return text


def on_device(folder: Path) -> str:
    """A tensor of PyTorch's on the GPU is taken as it is."""
    try:
        import torch
    except ImportError:
        return "skipped: no PyTorch"
    with hybridc.load(folder / "matmul") as model:
        arrays = random_inputs(model, 3)
        expected = model.run(arrays)["y"]
        tensors = {name: torch.from_numpy(array).cuda() for name, array in arrays.items()}
        torch.cuda.synchronize()
        assert np.array_equal(model.run(tensors)["y"], expected)
        kept = _best(lambda: model.run(arrays)), _best(lambda: model.run(tensors))
    return f"call {kept[0] * 1e3:.3f} ms from the host, {kept[1] * 1e3:.3f} ms from the GPU"


def refusals(folder: Path) -> str:
    """Wrong inputs are refused in words, and the model works on."""
    from hybridc.errors import UsageError

    with hybridc.load(folder / "matmul") as model:
        try:
            model.run({"x": np.zeros((1, 2), "float32")})
        except UsageError as error:
            message = str(error)
        else:
            raise AssertionError("a wrong shape was taken")
        model.run(random_inputs(model, 0))
    return message


def _best(call: Callable[[], Any]) -> float:
    times = []
    for _ in range(200):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)


def _free() -> int:
    """Bytes of the GPU's memory that are free."""
    import ctypes

    runtime = ctypes.CDLL("libcuda.so.1")
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    status = runtime.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total))
    assert status == 0, f"cuMemGetInfo gave {status}"
    return free.value


def _resident() -> int:
    """Memory of this process in kB."""
    with open("/proc/self/status", encoding="utf-8") as file:
        line = next(line for line in file if line.startswith("VmRSS"))
    return int(line.split()[1])


CHECKS = (refusals, threads, two_models, memory, on_device)


def main() -> int:
    """Run all checks, or those named; returns how many failed."""
    folder, *names = sys.argv[1:]
    failed = 0
    for check in CHECKS:
        if names and check.__name__ not in names:
            continue
        try:
            line = f"ok    {check(Path(folder))}"
        except Exception:
            failed += 1
            line = f"FAILED {' | '.join(traceback.format_exc().splitlines()[-6:])[:1500]}"
        print(f"loader: {check.__name__:18} {line}", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
