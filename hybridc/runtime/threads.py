"""How many threads a model's kernels use, and on which cores.

TVM keeps a pool of workers per calling thread. The pool is sized when a thread first calls a
model, and again only when it calls one that asks for another number or other cores.

A worker that has nothing to do gives its core away and looks again, so many times before it sleeps.
TVM's default is to look for 50 ms and more, on each core, after each call. Where every request has
a thread of its own, pools of threads that ended do the same, the longer the more of them there are.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Sequence

import tvm_ffi

Cores = tuple[int, ...]
"""Numbers of cores, as the kernel counts them, in order."""

_SHARE_CORES = -3
"""TVM's affinity mode in which the caller and its workers share the cores that are listed. All
others move the caller to the machine's first cores, even if it may not use them."""

_LOOKS = "TVM_THREAD_POOL_SPIN_COUNT"
_LOOK_COUNT = "10000"
"""About two milliseconds: longer than what lies between the kernels of a call. To be woken costs
0.05 ms."""

_pool = threading.local()
"""What this thread's pool is set to: a fact about the thread, which TVM does not tell."""


def available_cores() -> Cores:
    """The cores that the process may use."""
    return tuple(sorted(os.sched_getaffinity(0)))


def available_threads() -> int:
    """As many threads as the process may use cores."""
    return len(available_cores())


def share_out(cores: Sequence[int], count: int) -> list[Cores]:
    """Cores for each of ``count`` devices, in equal shares; at least one each."""
    if len(cores) < count:
        return [(cores[index % len(cores)],) for index in range(count)]
    ends = [len(cores) * index // count for index in range(count + 1)]
    return [tuple(cores[a:b]) for a, b in itertools.pairwise(ends)]


def use_threads(count: int, cores: Cores | None = None) -> None:
    """Let kernels that this thread calls use ``count`` threads, itself included.

    How often an idle worker looks for work is set for the whole process before TVM reads it, when
    the first pool is made; a value in the environment stays.

    Args:
        count: Number of threads.
        cores: Where they and this thread may run; where this thread may, if it is not given.
    """
    wanted = (count, cores)
    if getattr(_pool, "wanted", None) == wanted:
        return
    os.environ.setdefault(_LOOKS, _LOOK_COUNT)
    places = [str(core) for core in cores or available_cores()]
    tvm_ffi.get_global_func("runtime.config_threadpool")(_SHARE_CORES, count, places)
    _pool.wanted = wanted
