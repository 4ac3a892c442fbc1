"""Threads that run a model's parts: one for each device, and one for each way that copies go.

Tasks of all calls under way meet in the threads' queues, where the oldest call goes first. So what
is independent runs at the same time, copies run beside kernels, and several calls under way form a
pipeline: the second is on the first device while the first is on the second.

A CPU under several names is shared out: each of its devices has cores of its own.
"""

from __future__ import annotations

import itertools
import queue
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from hybridc.bundle.manifest import DeviceSpec
from hybridc.runtime.parts import SESSION_KIND, place_of_kind
from hybridc.runtime.tensors import HOST
from hybridc.runtime.threads import Cores, share_out, use_threads

Order: TypeAlias = tuple[float, int]
"""Number of a call, and of a task in it: what goes first."""

_Entry: TypeAlias = "tuple[Order, int, Callable[[], None] | None]"
_Queue: TypeAlias = "queue.PriorityQueue[_Entry]"

_LAST: Order = (float("inf"), 0)


def cores_of(devices: Sequence[DeviceSpec], cores: Cores) -> dict[str, Cores]:
    """Cores of each device that computes on this machine's CPU with code of its own."""
    names = [device.name for device in devices if is_cpu(device)]
    return dict(zip(names, share_out(cores, len(names)), strict=True)) if names else {}


def is_cpu(device: DeviceSpec) -> bool:
    """Whether a device is this machine's CPU; ONNX Runtime has threads of its own."""
    own_code = bool(device.architecture) and device.kind != SESSION_KIND
    return own_code and place_of_kind(device.kind) == HOST


class Workers:
    """The threads of one model; each starts when it is first needed.

    Args:
        shares: Cores of each device that has some of its own.
        threads: Threads for kernels that are called from the other workers; 0 if none are.
    """

    def __init__(self, shares: Mapping[str, Cores], threads: int) -> None:
        self._shares = shares
        self._threads = threads
        self._numbers = itertools.count()
        self._queues: dict[str, _Queue] = {}
        self._lock = threading.Lock()
        weakref.finalize(self, _stop, self._queues)

    def submit(self, name: str, order: Order, task: Callable[[], None]) -> None:
        """Let a worker run a task, which must not raise, after those that come before it."""
        with self._lock:
            waiting = self._queues.get(name) or self._start(name)
        waiting.put((order, next(self._numbers), task))

    def close(self) -> None:
        """End the threads, once their tasks are done."""
        _stop(self._queues)

    def _start(self, name: str) -> _Queue:
        waiting: _Queue = queue.PriorityQueue()
        cores = self._shares.get(name)
        count = len(cores) if cores else self._threads
        arguments = (waiting, count, cores)
        threading.Thread(target=_work, args=arguments, name=f"hybridc {name}", daemon=True).start()
        self._queues[name] = waiting
        return waiting


def _work(waiting: _Queue, threads: int, cores: Cores | None) -> None:
    if threads:
        use_threads(threads, cores)
    while True:
        *_, task = waiting.get()
        if task is None:
            return
        task()
        del task  # nothing of a call is kept while waiting for the next


def _stop(queues: dict[str, _Queue]) -> None:
    for waiting in list(queues.values()):
        waiting.put((_LAST, -1, None))
    queues.clear()
