"""Which plan to run, out of what was measured.

    seconds(plan) = edge + server + round trips * round trip + bytes * seconds per byte

A plan that ran counts with its own measured times here and on the server. One that did not run
counts with the predictions of the compile, scaled by how far these were off where plans did run.
The link's two figures are medians of the last measurements, so that one that lies counts for
nothing, and two that agree count at once.

Another plan takes over only if it is faster by a margin and the present one has had some calls, or
if it is far faster, or if it is a little faster by many measurements. So near the point where two
plans are equally fast, noise does not make the choice swing, and in the long run the choice is not
far from the best.

Where the compile gave plans a price, the cheapest that can run is taken, and time does not count.
"""

from __future__ import annotations

import statistics
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from hybridc.bundle.manifest import LinkSpec, PlanSpec

MARGIN = 0.9
"""Another plan takes over if its time is below this share of the present one's."""

DWELL = 3
"""Calls of a plan before another may take over by that margin."""

HURRY = 0.5
"""The share that counts before: a plan that turns out to be far worse is left at once."""

PATIENCE, FINE = 12, 0.96
"""Calls after which the medians of as many measurements count, and what share these must show."""

_RECENT = 3
_LARGE = 4096
"""Bytes from which on the time of a call says something about the bandwidth."""


_Recent: TypeAlias = tuple[float, ...]
"""Last measurements; replaced and not changed, since other threads may be reading them."""


def _with(recent: _Recent, value: float) -> _Recent:
    return (*recent, value)[-PATIENCE:]


@dataclass(frozen=True)
class _Times:
    """Last measured seconds of a plan, bytes that crossed, and how often it ran."""

    edge: _Recent = ()
    server: _Recent = ()
    bytes: _Recent = ()
    runs: int = 0


class Chooser:
    """Keeps what was measured and the plan that follows from it. Serves several threads.

    Attributes:
        current: The plan to run.
        connected: Whether the server answered last.
        switches: How often another plan took over.
    """

    def __init__(self, plans: Sequence[PlanSpec], link: LinkSpec, start: PlanSpec) -> None:
        self._plans = tuple(plans)
        self._times = {plan.name: _Times() for plan in plans}
        self._expected = link
        self._round_trips: _Recent = ()
        self._per_byte: _Recent = ()
        self._calls = 0
        self._lock = threading.Lock()
        self.current = start
        self.connected = False
        self.switches = 0

    @property
    def link(self) -> LinkSpec:
        """The link as it was measured, or as it was expected."""
        return self._link(_RECENT)

    def _link(self, last: int) -> LinkSpec:
        round_trip = _median(self._round_trips, self._expected.round_trip_seconds, last)
        per_byte = _median(self._per_byte, 1 / self._expected.bytes_per_second, last)
        return LinkSpec(round_trip, 1 / max(per_byte, 1e-12))

    def local_seconds(self) -> float:
        """Longest recent time of the plan without the server; 0 if there is none."""
        local = next((plan for plan in self._plans if not plan.round_trips), None)
        if local is None:
            return 0.0
        recent = self._times[local.name].edge[-_RECENT:]
        return max(recent, default=self._edge(local, _RECENT))

    def seconds(self, plan: PlanSpec, last: int = _RECENT) -> float:
        """Expected time of a run of a plan, by so many of the last measurements."""
        link = self._link(last)
        count = _median(self._times[plan.name].bytes, plan.bytes, last)
        waiting = plan.round_trips * link.round_trip_seconds + count / link.bytes_per_second
        return self._edge(plan, last) + self._server(plan, last) + waiting

    def _edge(self, plan: PlanSpec, last: int) -> float:
        ratios = ((self._times[p.name].edge[-last:], p.edge_seconds) for p in self._plans)
        return _expect(self._times[plan.name].edge[-last:], plan.edge_seconds, ratios)

    def _server(self, plan: PlanSpec, last: int) -> float:
        ratios = ((self._times[p.name].server[-last:], p.server_seconds) for p in self._plans)
        return _expect(self._times[plan.name].server[-last:], plan.server_seconds, ratios)

    def note_run(self, plan: PlanSpec, edge: float, server: float, crossed: int = 0) -> None:
        """Note the seconds of a run here and on the server, and the bytes that crossed."""
        with self._lock:
            times = self._times[plan.name]
            if times.runs == 1:  # the first run met cold caches and sleeping threads
                times = _Times(runs=1)
            there = _with(times.server, server) if plan.round_trips else ()
            count = _with(times.bytes, crossed) if plan.round_trips and crossed else ()
            here = _with(times.edge, edge)
            self._times[plan.name] = _Times(here, there, count, times.runs + 1)
            self._calls += 1
            self._choose()

    def note_exchange(self, count: int, seconds: float) -> None:
        """Note how long sending and receiving so many bytes took, without the server's time."""
        with self._lock:
            self.connected = True
            if count < _LARGE:
                self._round_trips = _with(self._round_trips, seconds)
                return
            round_trip = self.link.round_trip_seconds
            moving = max(seconds - round_trip, 0.1 * seconds)
            self._per_byte = _with(self._per_byte, moving / count)

    def note_failure(self) -> None:
        """Note that the server did not answer: only the plan without it is left."""
        with self._lock:
            self.connected = False
            self._choose()

    def choose(self) -> None:
        """Take another plan if it is better by what was measured."""
        with self._lock:
            self._choose()

    def _choose(self) -> None:
        able = [plan for plan in self._plans if self.connected or not plan.round_trips]
        if not able:
            return
        is_priced = all(plan.price for plan in self._plans)
        best = min(able, key=_dollars if is_priced else self.seconds)
        if best == self.current:
            return
        if self.current in able and not is_priced and not self._is_worth(best):
            return
        self.current = best
        self.switches += 1
        self._calls = 0

    def _is_worth(self, best: PlanSpec) -> bool:
        """Whether a plan that is faster is so by enough to take over."""
        share = MARGIN if self._calls >= DWELL else HURRY
        if self.seconds(best) <= share * self.seconds(self.current):
            return True
        slow = FINE * self.seconds(self.current, PATIENCE)
        return self._calls >= PATIENCE and self.seconds(best, PATIENCE) <= slow


def _dollars(plan: PlanSpec) -> float:
    return plan.price.dollars_per_hour if plan.price else 0.0


def _median(values: Sequence[float], otherwise: float, last: int) -> float:
    return statistics.median(values[-last:]) if values else otherwise


def _expect(
    own: Sequence[float], predicted: float, others: Iterable[tuple[Sequence[float], float]]
) -> float:
    """The time of a plan: as it was measured, or as predicted and scaled by the others' error."""
    if own:
        return statistics.median(own)
    known = [(statistics.median(found), guess) for found, guess in others if found and guess > 0]
    guessed = sum(guess for _, guess in known)
    return predicted * sum(found for found, _ in known) / guessed if guessed else predicted
