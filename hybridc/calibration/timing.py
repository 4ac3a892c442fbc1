"""Time something until the figure rests.

Clocks are not assumed to be pinned, nor the machine to be idle. A sample is the mean of a batch
that is long enough for the clock. Samples are taken until the median is known to a hundredth, as
far as their spread tells, or until the time is up. Samples during which the operating system took a
core away for somebody else do not count, as long as there are others.
"""

from __future__ import annotations

import math
import resource
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

Clock = Callable[[], float]
"""Gives seconds."""

BATCH_SECONDS = 5e-4
"""A sample takes at least so long, so that reading the clock does not count."""

FEWEST = 5
FEWEST_LONG = 3
PATIENCE = 10
"""Samples that there are at least; the fewer where they take so many times the limit."""

ENOUGH = 11
"""Samples before the figure may count as stable."""

STABLE = 0.01
"""Standard error of the median, relative to it, at which the figure rests."""


def cores_taken() -> int:
    """How often the operating system took a core from this process while it wanted to go on."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw


@dataclass(frozen=True)
class Timing:
    """A time that was measured.

    Attributes:
        seconds: Median.
        spread: Half the distance between the quartiles, relative to the median.
        runs: How often it was run.
    """

    seconds: float
    spread: float
    runs: int

    def without(self, overhead: float, least: float = 1e-9) -> Timing:
        """What is left after a time that belongs to something else; the spread stays as long."""
        left = max(self.seconds - overhead, least)
        return Timing(left, self.spread * self.seconds / left, self.runs)

    def share(self, count: int) -> Timing:
        """One of so many equal things that were timed together."""
        return Timing(self.seconds / count, self.spread, self.runs * count)


@dataclass
class _Samples:
    """Means of batches, those during which a core was taken away apart."""

    calm: list[float] = field(default_factory=list)
    disturbed: list[float] = field(default_factory=list)

    def best(self) -> list[float]:
        """The calm ones, if there are a few."""
        return self.calm if len(self.calm) >= FEWEST else self.calm + self.disturbed

    def rest(self) -> bool:
        """Whether the median is known well enough, if samples were independent."""
        if len(self.calm) < ENOUGH:
            return False
        return 1.9 * _spread(self.calm) / math.sqrt(len(self.calm)) < STABLE


def pooled(times: Sequence[Timing]) -> Timing:
    """One time out of several that were taken at different moments, at least one."""
    seconds = [time.seconds for time in times]
    median = statistics.median(seconds)
    between = (max(seconds) - min(seconds)) / 2 / median if median else 0.0
    within = statistics.median(time.spread for time in times)
    return Timing(median, max(between, within), sum(time.runs for time in times))


def timing_of(samples: Sequence[float], batch: int = 1) -> Timing:
    """A time out of several samples, each the mean of a batch."""
    return Timing(statistics.median(samples), _spread(samples), batch * len(samples))


def measure(
    run: Callable[[int], None],
    limit: float,
    clock: Clock = time.perf_counter,
    taken: Callable[[], int] = cores_taken,
) -> Timing:
    """Time one of many runs.

    Args:
        run: Runs so many times, and returns when all of it is done.
        limit: Seconds after which no further sample is taken, once there are a few.
        clock: Seconds.
        taken: How often a core was taken from this process so far.
    """
    run(1)  # what is prepared once does not count
    batch = _batch(run, clock)
    samples, count, start = _Samples(), 0, clock()
    while not _is_over(count, clock() - start, limit, samples):
        before, begin = taken(), clock()
        run(batch)
        seconds = (clock() - begin) / batch
        (samples.calm if taken() == before else samples.disturbed).append(seconds)
        count += 1
    return timing_of(samples.best(), batch)


def _is_over(count: int, seconds: float, limit: float, samples: _Samples) -> bool:
    """Whether so many samples in so many seconds will do."""
    if count < FEWEST:
        return count >= FEWEST_LONG and seconds > PATIENCE * limit
    return seconds >= limit or samples.rest()


def _batch(run: Callable[[int], None], clock: Clock) -> int:
    """Runs in a sample."""
    batch = 1
    while True:
        begin = clock()
        run(batch)
        if clock() - begin >= BATCH_SECONDS:
            return batch
        batch *= 2


def _spread(samples: Sequence[float]) -> float:
    low, median, high = statistics.quantiles(samples, n=4)
    return (high - low) / 2 / median if median else 0.0
