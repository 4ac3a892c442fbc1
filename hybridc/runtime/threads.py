"""How many threads a model's kernels use.

TVM keeps a pool of workers per calling thread. The pool is sized when a thread first calls a
model, and again only when it calls one that asks for another number.
"""

from __future__ import annotations

import os
import threading

import tvm_ffi

_ALL_CORES_ALIKE = 1
"""TVM's affinity mode that prefers no particular cores."""

_pool = threading.local()
"""The size of this thread's pool: a fact about the thread, which TVM does not tell."""


def available_threads() -> int:
    """As many threads as the process may use cores."""
    return len(os.sched_getaffinity(0))


def use_threads(count: int) -> None:
    """Let kernels that this thread calls use ``count`` threads, itself included."""
    if getattr(_pool, "count", None) != count:
        tvm_ffi.get_global_func("runtime.config_threadpool")(_ALL_CORES_ALIKE, count)
        _pool.count = count
