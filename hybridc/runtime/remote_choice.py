"""Which plan to run, out of what was measured.

    seconds(plan) = edge + server + round trips * round trip + bytes * seconds per byte

A plan that ran counts with its own measured times: here, on the server, and waiting, the last as
long as the link is what it was, since what a byte takes is not the same for few and for many. One
that did not run counts with the predictions of the compile, scaled by how far these were off where
plans did run; what is known of the link is in :mod:`hybridc.runtime.remote_link`. A look at it that
speaks for a plan that sends much more than the look did is to be confirmed by larger ones.

Another plan takes over only if it is faster by a margin and the present one has had some calls, or
if it is far faster, or if it is a little faster by many measurements; the first only if the many do
not say otherwise. So near the point where two plans are equally fast, noise does not make the
choice swing, and in the long run the choice is not far from the best.

Where the compile gave plans a price, the cheapest that can run is taken, and time does not count.
"""

from __future__ import annotations

import statistics
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from hybridc.bundle.manifest import LinkSpec, PlanSpec
from hybridc.runtime.remote_link import MOST, RECENT, Link, Recent, median, with_last

MARGIN = 0.9
"""Another plan takes over if its time is below this share of the present one's."""

DWELL = 3
"""Calls of a plan before another may take over by that margin."""

HURRY = 0.5
"""The share that counts before: a plan that turns out to be far worse is left at once."""

PATIENCE, FINE = MOST, 0.96
"""Calls after which the medians of as many measurements count, and what share these must show."""

_LONGEST, _CLEAR = 48, 0.8
"""Most calls that a plan has to stay where two plans take over from each other in turns, and the
share below which it need not, since that is no noise."""

_TRIAL_SHARE, _OLD, _HOPE = 0.01, 24, 0.75
"""Of a trial: its cost as a share of the time since the last one; calls since the plan ran; to what
share of the least that was seen its computing may have fallen."""

_EVERY = 8
"""Calls between two looks for a plan to try."""


@dataclass(frozen=True)
class _Times:
    """Last measured seconds of a plan, bytes that crossed, how often it ran, and at which run.

    Attributes:
        waiting: For the link, since it last changed.
    """

    edge: Recent = ()
    server: Recent = ()
    waiting: Recent = ()
    bytes: Recent = ()
    runs: int = 0
    last: int = 0


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
        self._link = Link(link)
        self._calls, self._dwell = 0, DWELL
        self._before = start
        self._runs, self._spent = 0, 0.0
        self._lock = threading.Lock()
        self.current = start
        self.connected = False
        self.switches = 0

    @property
    def link(self) -> LinkSpec:
        """The link as it was measured, or as it was expected."""
        return self._link.spec()

    def local_seconds(self) -> float:
        """Longest recent time of the plan without the server; 0 if there is none."""
        local = next((plan for plan in self._plans if not plan.round_trips), None)
        if local is None:
            return 0.0
        recent = self._times[local.name].edge[-RECENT:]
        return max(recent, default=self._edge(local, RECENT))

    def seconds(self, plan: PlanSpec, last: int = RECENT, over: LinkSpec | None = None) -> float:
        """Expected time of a run of a plan, by so many of the last measurements.

        Args:
            plan: The plan.
            last: How many count.
            over: A link in place of the measured one.
        """
        computing = self._edge(plan, last) + self._server(plan, last)
        waited = () if over else self._times[plan.name].waiting
        return computing + median(waited, self._waiting(plan, over or self._link.spec(last)), last)

    def _waiting(self, plan: PlanSpec, link: LinkSpec) -> float:
        """What a plan's round trips and bytes take over a link."""
        moving = self._bytes(plan) / link.bytes_per_second
        return plan.round_trips * link.round_trip_seconds + moving

    def _bytes(self, plan: PlanSpec) -> float:
        return median(self._times[plan.name].bytes, plan.bytes)

    def _edge(self, plan: PlanSpec, last: int) -> float:
        ratios = ((self._times[p.name].edge[-last:], p.edge_seconds) for p in self._plans)
        return _expect(self._times[plan.name].edge[-last:], plan.edge_seconds, ratios)

    def _server(self, plan: PlanSpec, last: int) -> float:
        ratios = ((self._times[p.name].server[-last:], p.server_seconds) for p in self._plans)
        return _expect(self._times[plan.name].server[-last:], plan.server_seconds, ratios)

    def note_run(
        self,
        plan: PlanSpec,
        edge: float,
        server: float,
        crossed: int = 0,
        waiting: float | None = None,
    ) -> None:
        """Note the seconds of a run here and on the server, the bytes that crossed, and waiting."""
        with self._lock:
            times = self._times[plan.name]
            if times.runs == 1:  # the first run met cold caches and sleeping threads
                times = _Times(runs=1)
            self._runs += 1
            there = with_last(times.server, server) if plan.round_trips else ()
            count = with_last(times.bytes, crossed) if plan.round_trips and crossed else ()
            here = with_last(times.edge, edge)
            waits = times.waiting if waiting is None else with_last(times.waiting, waiting)
            noted = _Times(here, there, waits, count, times.runs + 1, self._runs)
            self._times[plan.name] = noted
            self._spent += edge + server
            self._calls += plan == self.current
            self._choose()

    def note_exchange(self, source: str, count: int, seconds: float) -> None:
        """Note what an exchange took; see :meth:`Link.note_exchange`."""
        with self._lock:
            self._note_link(self._link.note_exchange(source, count, seconds, self.most_bytes))

    def note_look(self, empty: float, count: int, full: float, first: float | None = None) -> None:
        """Note what a look at the link took; see :meth:`Link.note_look`."""
        with self._lock:
            self._note_link(self._link.note_look(empty, count, full, first, self.most_bytes))

    def _note_link(self, has_changed: bool) -> None:
        self.connected = True
        if has_changed:
            self._times = {name: replace(t, waiting=()) for name, t in self._times.items()}

    def bytes_to_confirm(self, empty: float, count: int, full: float) -> int:
        """Bytes of the plan that a look speaks for, if they are far more than what is known; or 0.

        The look's bytes are known, and those of the present plan.
        """
        link = self._link.looked(empty, count, full)
        able = [plan for plan in self._plans if plan.round_trips]
        if self._is_priced() or not able:
            return 0

        def seconds(plan: PlanSpec) -> float:
            return self.seconds(plan, over=link)

        best = min(able, key=seconds)
        wanted, known = self._bytes(best), self._bytes(self.current)
        is_better = best != self.current and seconds(best) < FINE * self.seconds(self.current)
        return int(wanted) if is_better and wanted > 2 * max(count, known) else 0

    @property
    def is_corrected(self) -> bool:
        """Whether looks are corrected by larger ones that were made lately."""
        return self._link.is_corrected

    def is_sure(self) -> bool:
        """Whether the last measurement of the link says much the same as those before it."""
        return self._link.is_sure(self.most_bytes)

    def is_told(self) -> bool:
        """Whether the calls that are made tell the bandwidth."""
        plan, known = self.current, self.connected and self._link.has_bandwidth and self.is_sure()
        telling = self._link.telling(self.most_bytes)
        return bool(plan.round_trips and known and self._bytes(plan) >= telling)

    @property
    def most_bytes(self) -> float:
        """Most bytes that a plan sends and receives."""
        return max((self._bytes(plan) for plan in self._plans), default=0.0)

    def note_failure(self) -> None:
        """Note that the server did not answer: only the plan without it is left."""
        with self._lock:
            self.connected = False
            self._choose()

    def choose(self) -> None:
        """Take another plan if it is better by what was measured."""
        with self._lock:
            self._choose()

    def next_plan(self) -> PlanSpec:
        """The plan for the next call: the present one, or one that is tried."""
        with self._lock:
            if self._runs % _EVERY == 0:
                for plan in self._able():
                    if self._is_worth_a_trial(plan):
                        self._spent = 0.0
                        return plan
            return self.current

    def _is_worth_a_trial(self, plan: PlanSpec) -> bool:
        has_run_lately = self._runs - self._times[plan.name].last < _OLD
        if plan == self.current or has_run_lately or self._is_priced():
            return False
        now = self.seconds(self.current)
        loss = self.seconds(plan) - now
        least = self._waiting(plan, self.link) + _HOPE * self._least_computing(plan)
        return loss <= _TRIAL_SHARE * self._spent and least < FINE * now

    def _least_computing(self, plan: PlanSpec) -> float:
        """Least time here and on the server: as measured, or predicted if the plan never ran."""
        times = self._times[plan.name]
        if times.edge:
            return min(times.edge) + min(times.server, default=0.0)
        edge, server = self._edge(plan, RECENT), self._server(plan, RECENT)
        return min(edge, plan.edge_seconds) + min(server, plan.server_seconds)

    def _able(self) -> list[PlanSpec]:
        return [plan for plan in self._plans if self.connected or not plan.round_trips]

    def _is_priced(self) -> bool:
        return all(plan.price for plan in self._plans)

    def _choose(self) -> None:
        able = self._able()
        if not able:
            return
        best = min(able, key=_dollars if self._is_priced() else self.seconds)
        if best == self.current:
            return
        if self.current in able:
            if not self._is_priced() and not self._is_worth(best):
                return
            stay = max(self._dwell, min(self._calls, PATIENCE))
            swings = best == self._before and self._calls < 4 * stay
            self._dwell = min(2 * stay, _LONGEST) if swings else DWELL
        self._before, self.current = self.current, best
        self.switches += 1
        self._calls = 0

    def _is_worth(self, best: PlanSpec) -> bool:
        """Whether a plan that is faster is so by enough to take over."""
        ratio = self.seconds(best) / max(self.seconds(self.current), 1e-9)
        long = self.seconds(best, PATIENCE) / max(self.seconds(self.current, PATIENCE), 1e-9)
        stayed = self._calls >= (DWELL if ratio <= _CLEAR else self._dwell)
        if ratio <= HURRY or (stayed and ratio <= MARGIN and long <= FINE):
            return True
        return self._calls >= max(PATIENCE, self._dwell) and long <= FINE


def _dollars(plan: PlanSpec) -> float:
    return plan.price.dollars_per_hour if plan.price else 0.0


def _expect(
    own: Sequence[float], predicted: float, others: Iterable[tuple[Sequence[float], float]]
) -> float:
    """The time of a plan: as it was measured, or as predicted and scaled by the others' error."""
    if own:
        return statistics.median(own)
    known = [(statistics.median(found), guess) for found, guess in others if found and guess > 0]
    guessed = sum(guess for _, guess in known)
    return predicted * sum(found for found, _ in known) / guessed if guessed else predicted
