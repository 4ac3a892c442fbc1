"""What passing a tensor from one CPU device to another costs, when both are cores of one machine.

start       until the other's thread begins what was handed to it
per byte    what reading the tensor takes longer than if the same thread had written it, since
            it is in the caches of other cores
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from hybridc.calibration.timing import Timing, measure
from hybridc.runtime.threads import Cores
from hybridc.runtime.workers import Workers

_BYTES = 2**19
"""Size of the tensor that is passed on: common in networks, and held by caches of most cores."""


@dataclass(frozen=True)
class Passing:
    """Times of a handoff.

    Attributes:
        start: Until the other begins.
        per_byte: What each byte adds.
    """

    start: Timing
    per_byte: Timing


def measure_passing(shares: Mapping[str, Cores], limit: float) -> Passing:
    """Measure between the first two devices.

    Args:
        shares: Cores by device.
        limit: Seconds for each figure.
    """
    workers = Workers(shares, 0)
    first, second = list(shares)[:2]
    try:
        start = measure(_Relay(workers, (first, second), lambda: None).run, limit)
        source, target = np.zeros((2, _BYTES // 8))

        def step() -> None:
            np.add(source, 1.0, out=target)
            np.subtract(target, 1.0, out=source)

        apart = measure(_Relay(workers, (first, second), step).run, limit)
        alone = measure(_Relay(workers, (first, first), step).run, limit)
    finally:
        workers.close()
    # Both tensors come from the other's caches in a step, and the way there does not count.
    reading = apart.without(alone.seconds + start.seconds, 1e-9)
    return Passing(start, reading.share(2 * _BYTES))


class _Relay:
    """Steps by two workers in turns, each handing on to the other."""

    def __init__(self, workers: Workers, ends: tuple[str, str], step: Callable[[], None]) -> None:
        self._workers, self._ends, self._step = workers, ends, step
        self._done = threading.Event()

    def run(self, count: int) -> None:
        """So many steps."""
        self._done.clear()
        self._hand_on(count)
        self._done.wait()

    def _hand_on(self, left: int) -> None:
        if not left:
            self._done.set()
            return
        self._workers.submit(self._ends[left % 2], (0, 0), lambda: self._go(left))

    def _go(self, left: int) -> None:
        self._step()
        self._hand_on(left - 1)
