"""Calls of a model with several plans over a link, on a clock of its own.

The loader's own choice and its own looks at the link decide; what plans and exchanges take is
computed from the bandwidth, the round trip and noise that is drawn from a seed.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from hybridc.bundle.manifest import LinkSpec, PlanSpec
from hybridc.runtime.remote_choice import Chooser
from hybridc.runtime.remote_watch import LinkWatch


class Simulation:
    """A model, its server and the link.

    Args:
        plans: Its plans, with the times that were predicted; the first one runs at the start.
        megabits: Mbit/s of the link.
        round_trip: Its round trip in seconds.
        noise: Standard deviation of each time, as a share of it.
        seed: Of the noise.
        burst: Bytes that pass at once after a pause, as a shaper with a bucket of tokens has it.

    Attributes:
        rate: Bytes per second of the link now.
        server_load: How much longer than predicted the server computes now.
        edge_load: How much longer than predicted this end computes now.
        packing: Seconds by which a plan waits longer than its bytes account for.
        chooser: What was measured, and the plan that is next.
        now: Seconds since the start.
        calling: Seconds that calls took.
        sent: Bytes that looks at the link sent.
    """

    def __init__(
        self,
        plans: Sequence[PlanSpec],
        megabits: float,
        round_trip: float,
        noise: float = 0.0,
        seed: int = 0,
        burst: int = 0,
    ) -> None:
        self._burst, self._tokens, self._filled = burst, float(burst), 0.0
        self.plans, self.rate, self.round_trip = tuple(plans), megabits * 1e6 / 8, round_trip
        self.server_load = self.edge_load = 1.0
        self.packing: dict[str, float] = {}
        self.chooser = Chooser(self.plans, LinkSpec(0.002, 2.5e6), self.plans[0])
        self.now, self.calling, self.sent = 0.0, 0.0, 0
        self._noise, self._random = noise, random.Random(seed)
        self._watch = LinkWatch(self.chooser, 1.0, 32768, lambda: self.now)

    @property
    def plan(self) -> str:
        """Name of the plan that is next."""
        return self.chooser.current.name

    def true_seconds(self, plan: PlanSpec) -> float:
        """What a plan takes now, without noise."""
        computing = self.edge_load * plan.edge_seconds + self.server_load * plan.server_seconds
        moving = plan.bytes / self.rate + self.packing.get(plan.name, 0.0)
        return computing + plan.round_trips * self.round_trip + moving

    def best_seconds(self) -> float:
        """What the best plan takes now."""
        return min(map(self.true_seconds, self.plans))

    def run(self, calls: int = 1) -> None:
        """Make calls; a look that is due is over before the next call."""
        for _ in range(calls):
            plan, start = self.chooser.next_plan(), self.now
            edge = self._shaken(self.edge_load * plan.edge_seconds)
            server = self._shaken(self.server_load * plan.server_seconds)
            self.now += edge + server
            waiting = 0.0
            if plan.round_trips:
                waiting = self._exchange(plan.bytes, self.packing.get(plan.name, 0.0))
                self.chooser.note_exchange(plan.name, plan.bytes, waiting)
                self._watch.note_call()
            self.chooser.note_run(plan, edge, server, plan.bytes, waiting)
            self.calling += self.now - start
            if self._watch.is_due():
                self._watch.look(self._measure)
                self.chooser.choose()

    def calls_until_other(self, most: int = 200) -> int:
        """Calls until another plan than the present one is next."""
        before = self.plan
        for number in range(1, most + 1):
            self.run()
            if self.plan != before:
                return number
        return most

    def _moving(self, count: int) -> float:
        """Seconds of bytes that are sent now; each takes a token, if there are some."""
        gained = max(self.now - self._filled, 0.0) * self.rate
        tokens = min(self._tokens + gained, self._burst)
        seconds = max(count - tokens, 0.0) / self.rate
        self._tokens, self._filled = max(tokens - count, 0.0), self.now + seconds
        return seconds

    def _measure(self, count: int) -> tuple[float, float]:
        self.sent += count
        return self._exchange(0), self._exchange(count) if count else 0.0

    def _exchange(self, count: int, more: float = 0.0) -> float:
        seconds = self._shaken(self.round_trip + self._moving(count) + more)
        self.now += seconds
        return seconds

    def _shaken(self, seconds: float) -> float:
        return seconds * max(1 + self._random.gauss(0, self._noise), 0.2)
