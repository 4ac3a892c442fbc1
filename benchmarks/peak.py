"""The machine's measured peak on one core: multiply-adds in registers."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

ACCUMULATORS = 12
"""Independent vectors: enough to hide the latency of a multiply-add, few enough to stay in the
registers of every CPU."""

STEPS = 200_000


def peak_flops(target: str) -> float:
    """Floating-point operations per second of float32 multiply-adds that touch no memory."""
    from hybridc.targets.llvm.cpu import parse_cpu

    cpu = parse_cpu(target.partition(":")[2])
    lanes = cpu.vector_bytes // 4
    count = ACCUMULATORS
    function = _build(cpu, count, lanes)
    import tvm

    start = tvm.runtime.tensor(np.full(count * lanes, 0.5, np.float32))
    factor = tvm.runtime.tensor(np.full(lanes, 0.999, np.float32))
    result = tvm.runtime.tensor(np.zeros(count * lanes, np.float32))
    seconds = _best(lambda: function(start, factor, result))
    return 2 * STEPS * count * lanes / seconds


def _build(cpu: Any, count: int, lanes: int) -> Any:
    """A kernel that runs ``count`` chains of dependent vector multiply-adds."""
    import tvm
    from tvm.script import tirx as T

    @T.prim_func(private=True)
    def chains(start: T.handle, factor: T.handle, result: T.handle):
        S = T.match_buffer(start, (count * lanes,), "float32")
        F = T.match_buffer(factor, (lanes,), "float32")
        R = T.match_buffer(result, (count * lanes,), "float32")
        A = T.alloc_buffer((count * lanes,), "float32")
        for i in T.unroll(count):
            for j in T.vectorized(lanes):
                A[i * lanes + j] = S[i * lanes + j]
        for _step in range(STEPS):
            for i in T.unroll(count):
                for j in T.vectorized(lanes):
                    A[i * lanes + j] = A[i * lanes + j] * F[j] + F[j]
        for i in T.unroll(count):
            for j in T.vectorized(lanes):
                R[i * lanes + j] = A[i * lanes + j]

    return tvm.compile(chains.with_attr("global_symbol", "chains"), target=cpu.target)["chains"]


def _best(call: Callable[[], Any], seconds: float = 1.0) -> float:
    """The shortest of many runs."""
    call()
    best = float("inf")
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        begin = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - begin)
    return best
