"""Which plan to run, out of what was measured.

    seconds(plan) = edge + server + round trips * round trip + bytes * seconds per byte

A plan that ran counts with its own measured times here and on the server. One that did not run
counts with the predictions of the compile, scaled by how far these were off where plans did run.
The link's two figures are medians of the last measurements, so that one that lies counts for
nothing, and two that agree count at once. One that is far off those before it is looked into.

A look at the link may see another bandwidth than calls do: a shaper lets some bytes pass at once,
which are a large share of a look. So a look that speaks for a plan that sends much more is
confirmed by one of as many bytes, and the ratio of both holds for the looks that follow. Where it
is large, the look said nothing, and more are sent from then on.

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

_LONGEST = 48
"""Most calls that a plan has to stay where two plans take over from each other in turns."""

_TRIAL_SHARE, _OLD, _HOPE = 0.01, 24, 0.75
"""Of a trial: its cost as a share of the time since the last one; calls since the plan ran; to what
share of the least that was seen its computing may have fallen."""

_EVERY = 8
"""Calls between two looks for a plan to try."""

_RECENT = 3
_LARGE = 4096
"""Fewest bytes whose time says something about the bandwidth."""

_LEAST = 0.02
"""Share of a call's time that its bytes need at least, where the round trip hides them."""

_DOUBT = 1.5
"""A bandwidth is looked at again if a plan would take so many times as long, or as short."""


FORGET, DECEIVED = 20, 2.0
"""Looks after which the ratios of two looks of different size are forgotten; and the ratio from
which on the smaller one said nothing."""


_Recent: TypeAlias = tuple[float, ...]
"""Last measurements; replaced and not changed, since other threads may be reading them."""


def _with(recent: _Recent, value: float) -> _Recent:
    return (*recent, value)[-PATIENCE:]


@dataclass(frozen=True)
class _Times:
    """Last measured seconds of a plan, bytes that crossed, how often it ran, and at which run."""

    edge: _Recent = ()
    server: _Recent = ()
    bytes: _Recent = ()
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
        self._expected = link
        self._round_trips: _Recent = ()
        self._per_byte: _Recent = ()
        self._last = link
        self._ratios: _Recent = ()
        self._looks = 0
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

    def seconds(self, plan: PlanSpec, last: int = _RECENT, over: LinkSpec | None = None) -> float:
        """Expected time of a run of a plan, by so many of the last measurements.

        Args:
            plan: The plan.
            last: How many count.
            over: A link in place of the measured one.
        """
        computing = self._edge(plan, last) + self._server(plan, last)
        return computing + self._waiting(plan, last, over)

    def _waiting(self, plan: PlanSpec, last: int, over: LinkSpec | None = None) -> float:
        link = over or self._link(last)
        moving = self._bytes(plan, last) / link.bytes_per_second
        return plan.round_trips * link.round_trip_seconds + moving

    def _bytes(self, plan: PlanSpec, last: int) -> float:
        return _median(self._times[plan.name].bytes, plan.bytes, last)

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
            self._runs += 1
            there = _with(times.server, server) if plan.round_trips else ()
            count = _with(times.bytes, crossed) if plan.round_trips and crossed else ()
            here = _with(times.edge, edge)
            self._times[plan.name] = _Times(here, there, count, times.runs + 1, self._runs)
            self._spent += edge + server
            self._calls += plan == self.current
            self._choose()

    def note_exchange(self, count: int, seconds: float) -> None:
        """Note how long sending and receiving so many bytes took, without the server's time.

        Few bytes say something about the round trip, many about the bandwidth.
        """
        with self._lock:
            self.connected = True
            link = self.link
            if count < self._telling():
                moving = min(count / link.bytes_per_second, (1 - _LEAST) * seconds)
                self._note_link(seconds - moving, None)
            else:
                moving = max(seconds - link.round_trip_seconds, _LEAST * seconds)
                self._note_link(None, moving / count)

    def note_look(self, empty: float, count: int, full: float, first: float | None = None) -> None:
        """Note the seconds of an exchange without contents, and of one that sent so many bytes.

        Args:
            empty: Seconds of the first.
            count: Bytes of the second; 0 if there was none.
            full: Its seconds.
            first: What :func:`per_byte_of` a smaller look said that this one was to confirm.
        """
        with self._lock:
            self.connected = True
            if count == 0:
                self._note_link(empty, None)
                return
            per_byte = per_byte_of(empty, count, full)
            self._looks += 1
            if first is not None:
                ratio = min(per_byte / first, DECEIVED)
                self._ratios, self._looks = (*self._ratios, ratio)[-_RECENT:], 0
            elif self._looks > FORGET:
                self._ratios = ()
            self._note_link(empty, per_byte if first is not None else per_byte * self._ratio)

    @property
    def _ratio(self) -> float:
        """Time of a plan's byte over that of a look's."""
        return _median(self._ratios, 1.0, _RECENT)

    def bytes_to_confirm(self, empty: float, count: int, full: float) -> int:
        """Bytes of the plan that a look speaks for, if they are far more than what is known; or 0.

        The look's bytes are known, and those of the present plan.
        """
        link = LinkSpec(empty, 1 / max(per_byte_of(empty, count, full) * self._ratio, 1e-12))
        able = [plan for plan in self._plans if plan.round_trips]
        if self._is_priced() or not able:
            return 0

        def seconds(plan: PlanSpec) -> float:
            return self.seconds(plan, over=link)

        best = min(able, key=seconds)
        wanted, known = self._bytes(best, _RECENT), self._bytes(self.current, _RECENT)
        is_better = best != self.current and seconds(best) < FINE * self.seconds(self.current)
        return int(wanted) if is_better and wanted > 2 * max(count, known) else 0

    def _note_link(self, round_trip: float | None, per_byte: float | None) -> None:
        before, doubted = self.link, None if self.is_sure() else self._last
        if round_trip is not None:
            self._round_trips = _with(self._round_trips, round_trip)
        if per_byte is not None:
            self._per_byte = _with(self._per_byte, per_byte)
        link = self.link
        self._last = LinkSpec(
            link.round_trip_seconds if round_trip is None else round_trip,
            link.bytes_per_second if per_byte is None else 1 / max(per_byte, 1e-12),
        )
        if doubted is not None and self._has_changed(before, doubted):
            self._round_trips, self._per_byte = self._round_trips[-2:], self._per_byte[-2:]

    def is_sure(self) -> bool:
        """Whether the last measurement of the link says much the same as those before it."""
        return self._are_alike(self.link, self._last)

    def _has_changed(self, before: LinkSpec, doubted: LinkSpec) -> bool:
        """Whether the last measurement confirms the one before it, which was far from the others.

        It does if both say about the same, or if both are far off to the same side.
        """
        if self._are_alike(doubted, self._last):
            return True
        was, one, other = map(self._longest_wait, (before, doubted, self._last))
        return not self._are_alike(before, self._last) and (one < was) == (other < was)

    def _are_alike(self, one: LinkSpec, other: LinkSpec) -> bool:
        """Whether the largest plan would wait about as long over one link as over another."""
        first, second = map(self._longest_wait, (one, other))
        return first <= _DOUBT * second and second <= _DOUBT * first

    def _longest_wait(self, link: LinkSpec) -> float:
        """What the largest plan would wait over a link."""
        return link.round_trip_seconds + self.most_bytes / link.bytes_per_second

    def is_told(self) -> bool:
        """Whether the calls that are made tell the bandwidth."""
        plan, known = self.current, self.connected and self._per_byte and self.is_sure()
        return bool(plan.round_trips and known and self._bytes(plan, _RECENT) >= self._telling())

    @property
    def most_bytes(self) -> float:
        """Most bytes that a plan sends and receives."""
        return max((self._bytes(plan, _RECENT) for plan in self._plans), default=0.0)

    def _telling(self) -> float:
        """Fewest bytes whose time the round trip does not hide, or half of what a plan sends."""
        link = self.link
        carried = link.bytes_per_second * link.round_trip_seconds
        return max(_LARGE, min(carried, self.most_bytes) / 2)

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
        least = self._waiting(plan, _RECENT) + _HOPE * self._least_computing(plan)
        return loss <= _TRIAL_SHARE * self._spent and least < FINE * now

    def _least_computing(self, plan: PlanSpec) -> float:
        """Least time here and on the server: as measured, or predicted if the plan never ran."""
        times = self._times[plan.name]
        if times.edge:
            return min(times.edge) + min(times.server, default=0.0)
        edge, server = self._edge(plan, _RECENT), self._server(plan, _RECENT)
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
            swings = best == self._before and self._calls < 4 * self._dwell
            self._dwell = min(2 * self._dwell, _LONGEST) if swings else DWELL
        self._before, self.current = self.current, best
        self.switches += 1
        self._calls = 0

    def _is_worth(self, best: PlanSpec) -> bool:
        """Whether a plan that is faster is so by enough to take over."""
        ratio = self.seconds(best) / max(self.seconds(self.current), 1e-9)
        long = self.seconds(best, PATIENCE) / max(self.seconds(self.current, PATIENCE), 1e-9)
        if ratio <= HURRY or (self._calls >= self._dwell and ratio <= MARGIN and long <= FINE):
            return True
        return self._calls >= max(PATIENCE, self._dwell) and long <= FINE


def per_byte_of(empty: float, count: int, full: float) -> float:
    """Seconds of a byte, by the seconds of an exchange without contents and of one with so many."""
    return max(full - empty, _LEAST * full) / count


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
