"""The edge's part of ``benchmarks/remote.py``, with nothing but the loader, on a host of its own.

    python -S benchmarks/remote_edge.py SETTINGS

calls a bundle over links of several speeds and prints, a line of JSON each, what all here, all on
the server and the plan that the loader chooses take; and then, if that is asked for, what the
loader does while the link changes. ``tc`` gives the cable its rate, and a proxy in front of it
the delay.
"""

from __future__ import annotations

import contextlib
import functools
import json
import random
import socket
import statistics
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import Queue
from typing import Any

import numpy as np

import hybridc
from hybridc.runtime.remote_choice import PATIENCE
from hybridc.runtime.remote_settings import RemoteSettings
from hybridc.runtime.samples import relative_error

sys.path.append(str(Path(__file__).resolve().parent.parent))

from tools.two_hosts import set_rate

Inputs = Mapping[str, Any]
Outputs = dict[str, Any]
Round = dict[int, float]
"""Seconds of calls that were made one after another, by their number."""

FAST, SLOW = 100.0, 1.0
"""Mbit/s of the link that changes."""

_CHUNK = 16384

_SETTLE_SECONDS, _KEPT_SECONDS = 20.0, 1.5
"""How long a model may take to choose its plan, and how long it has to have kept it."""

_WARM_SECONDS = 0.5

_TURNS, _AS_FAST = 6, 1.05
"""How often calls are timed, and the ratio at which once is enough."""

_PATIENCE = 60
"""Calls after which the loader is taken to stay with its plan."""

_HOVER = 40
"""Calls over a link that makes two plans equal."""


@dataclass(frozen=True)
class Settings:
    """What to measure.

    Attributes:
        bundle: The bundle; it has a plan ``local`` and a plan ``remote``.
        inputs: An ``npz`` file.
        server: ``host:port``.
        protocol: ``grpc`` or ``http``.
        ends: Commands that give the cable's ends a rate: see ``tools/two_hosts.py``.
        megabits: Mbit/s, each way, of the links.
        round_trips: Milliseconds of the links.
        threads: Threads of this end.
        seconds: Time for each way over each link.
        limit: Largest relative error of a result.
        switching: Whether to see what the loader does while the link changes.
    """

    bundle: str
    inputs: str
    server: str
    protocol: str
    ends: Sequence[Sequence[str]]
    megabits: Sequence[float]
    round_trips: Sequence[float]
    threads: int
    seconds: float
    limit: float
    switching: bool


class Link:
    """A proxy between a port here and the server, which delays; the cable behind it has a rate.

    Attributes:
        address: ``host:port`` to connect to.
        delay: Seconds, each way.
    """

    def __init__(self, settings: Settings, megabits: float, round_trip: float) -> None:
        self.delay, self._ends = round_trip / 2e3, settings.ends
        self.set_rate(megabits)
        host, _, port = settings.server.rpartition(":")
        self._server = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._connections: list[socket.socket] = []
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def set_rate(self, megabits: float) -> None:
        """Give the cable another rate."""
        set_rate(self._ends, megabits)

    def close(self) -> None:
        """Take no more connections, and drop what those there are have yet to send.

        On a slow cable that would take seconds, in which nobody else could connect.
        """
        self._listener.close()
        for one in self._connections:
            with contextlib.suppress(OSError):  # it may have ended by itself
                one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                one.shutdown(socket.SHUT_RDWR)  # wakes the thread that reads from it
            one.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                here, _ = self._listener.accept()
                there = socket.create_connection(self._server)
                self._connections += (here, there)
                for one in (here, there):
                    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._carry(here, there)
                self._carry(there, here)

    def _carry(self, source: socket.socket, destination: socket.socket) -> None:
        """Copy bytes one way: a thread that takes them, and one that delivers them later."""
        waiting: Queue[tuple[float, bytes]] = Queue()

        def take() -> None:
            with contextlib.suppress(OSError):
                while data := source.recv(_CHUNK):
                    waiting.put((time.perf_counter() + self.delay, data))
            waiting.put((0.0, b""))

        def deliver() -> None:
            with contextlib.suppress(OSError):
                while True:
                    due, data = waiting.get()
                    if not data:
                        break
                    _sleep_until(due)
                    destination.sendall(data)
                destination.shutdown(socket.SHUT_WR)

        threading.Thread(target=take, daemon=True).start()
        threading.Thread(target=deliver, daemon=True).start()


def _sleep_until(when: float) -> None:
    left = when - time.perf_counter()
    if left > 0:
        time.sleep(left)


@dataclass(frozen=True)
class Result:
    """What was measured over one link.

    Attributes:
        local: Seconds of a call with all here; the median.
        remote: With all on the server.
        chosen: With the plan that the loader chose.
        over_best: The choice's time over that of the better of the two in the same round; median.
        plan: The choice at the end.
    """

    megabits: float
    round_trip_ms: float
    local: float
    remote: float
    chosen: float
    over_best: float
    plan: str
    switches: int
    fallbacks: int

    @property
    def is_of_better(self) -> bool:
        """Whether the choice was the better of the two, so that one plan was measured twice."""
        return self.plan == ("local" if self.local <= self.remote else "remote")


@dataclass(frozen=True)
class Switching:
    """What the loader did over a link that changes.

    Attributes:
        fast_plan: Its plan at 100 Mbit/s.
        slow_plan: That at 1 Mbit/s.
        calls_away: Calls from the drop to the next plan; ``None`` if there was none.
        calls_back: Calls from the return to the next plan.
        back_plan: That plan, which need not be the first one if several are as fast.
        equal_megabits: Where the two plans take the same time; ``None`` if they never do.
        switches: Changes of the plan in 40 calls there, and at 5 % less and more.
    """

    fast_plan: str
    slow_plan: str
    calls_away: int | None = None
    calls_back: int | None = None
    back_plan: str | None = None
    equal_megabits: float | None = None
    switches: tuple[int, ...] = ()


def measure(settings: Settings, inputs: Inputs) -> Iterator[Result]:
    """Measure every link; the three ways take turns, so that all see the same machine."""
    with hybridc.load(settings.bundle, threads=settings.threads) as model:
        expected = model.run(inputs)
    for megabits in settings.megabits:
        for round_trip in settings.round_trips:
            link = Link(settings, megabits, round_trip)
            with contextlib.closing(link), contextlib.ExitStack() as stack:
                models = [
                    stack.enter_context(load(settings, link, plan))
                    for plan in ("local", "remote", None)
                ]
                settle(models[2], inputs)
                calls = [functools.partial(model.run, inputs) for model in models]
                for call in calls:
                    _check(expected, settings.limit, _warm(call))
                rounds = _rounds(calls, settings.seconds)
                status = models[2].status
            figures = (*_medians(rounds), _over_best(rounds))
            yield Result(
                megabits, round_trip, *figures, status.plan, status.switches, status.fallbacks
            )


def load(settings: Settings, link: Link, plan: str | None) -> Any:
    """The bundle with the server at the other end of a link; it may run one plan, or any."""
    address = f"{settings.protocol}://{link.address}"
    remote = RemoteSettings((address,), plan=plan, deadline=120.0, probe_seconds=0.5)
    return hybridc.load(settings.bundle, threads=settings.threads, remote=remote)


def settle(model: Any, inputs: Inputs) -> None:
    """Call a model until it has looked at the link and kept its plan for a while."""
    start = changed = time.perf_counter()
    kept, plan = 0, ""
    while (now := time.perf_counter()) < start + _SETTLE_SECONDS:
        model.run(inputs)
        status = model.status
        if status.plan != plan or not status.connected:
            kept, changed, plan = 0, now, status.plan
        kept += 1
        if kept > PATIENCE + 2 and now > changed + _KEPT_SECONDS:
            return


def _warm(call: Callable[[], Outputs]) -> Outputs:
    """Call until a connection's windows have grown, which takes its first calls; the results."""
    start = time.perf_counter()
    results = call()
    while time.perf_counter() < start + _WARM_SECONDS:
        call()
    return results


def _rounds(calls: Sequence[Callable[[], Outputs]], seconds: float) -> list[Round]:
    """Time the calls in rounds, until each has had nine calls and ``seconds``.

    While the last is not as fast as the better of the others, all get more time, six times at
    most: the median of few calls is not yet what a call takes.
    """
    rounds: list[Round] = []
    for turn in range(1, _TURNS + 1):
        _take_turns(calls, rounds, turn, seconds)
        if _over_best(rounds) <= _AS_FAST:
            break
    return rounds


def _take_turns(
    calls: Sequence[Callable[[], Outputs]], rounds: list[Round], turn: int, seconds: float
) -> None:
    """Add rounds; what takes more than twice of its seconds has had enough.

    Each round has an order of its own: a call here that follows one to the server finds its
    weights gone from the caches, which both share.
    """
    order = random.Random(turn)

    def is_done(index: int) -> bool:
        own = [times[index] for times in rounds if index in times]
        spent, budget = sum(own), turn * seconds
        return spent > 2 * budget or (len(own) >= 9 * turn and spent > budget)

    while left := [index for index in range(len(calls)) if not is_done(index)]:
        rounds.append({})
        for index in order.sample(left, len(left)):
            start = time.perf_counter()
            calls[index]()
            rounds[-1][index] = time.perf_counter() - start


def _medians(rounds: Sequence[Round]) -> list[float]:
    """Median time of each call."""
    names = sorted({index for times in rounds for index in times})
    return [statistics.median(t[index] for t in rounds if index in t) for index in names]


def _over_best(rounds: Sequence[Round]) -> float:
    """Time of the last call over that of the better of the others in the same round; median.

    A machine whose speed changes from second to second changes both, and not their ratio.
    """
    *others, _ = medians = _medians(rounds)
    best, last = others.index(min(others)), len(medians) - 1
    return statistics.median(t[last] / t[best] for t in rounds if last in t and best in t)


def _check(expected: Outputs, limit: float, actual: Outputs) -> None:
    for name, array in expected.items():
        error = relative_error(actual[name], array)
        if error > limit:
            sys.exit(f"the output {name} is wrong by {error:.2g}")


def switch(settings: Settings, inputs: Inputs) -> Switching:
    """Let the link drop and return, then hold it where two plans are equal."""
    link = Link(settings, FAST, settings.round_trips[0])
    with contextlib.closing(link), load(settings, link, None) as model:
        settle(model, inputs)
        fast = model.status.plan
        link.set_rate(SLOW)
        away = _calls_until(model, inputs, lambda plan: plan != fast)
        settle(model, inputs)
        slow = model.status.plan
        if slow == fast:
            return Switching(fast, slow)
        link.set_rate(FAST)
        back = _calls_until(model, inputs, lambda plan: plan != slow)
        settle(model, inputs)
        back_plan = model.status.plan
        rate = _equal_rate(model, fast, slow)
        switches = tuple(_hover(model, inputs, link, rate)) if rate else ()
    return Switching(fast, slow, away, back, back_plan, rate, switches)


def _calls_until(model: Any, inputs: Mapping[str, Any], holds: Any) -> int | None:
    for number in range(1, _PATIENCE + 1):
        model.run(inputs)
        if holds(model.status.plan):
            return number
    return None


def _equal_rate(model: Any, fast: str, slow: str) -> float | None:
    """Mbit/s at which two plans take the same time, by what the loader measured."""
    status = model.status
    plans = {plan.name: plan for plan in model.manifest.plans}
    more = plans[fast].bytes - plans[slow].bytes
    moving = more / status.bytes_per_second
    saved = status.expected_seconds[slow] - (status.expected_seconds[fast] - moving)
    return 8e-6 * more / saved if more > 0 and saved > 0 else None


def _hover(model: Any, inputs: Inputs, link: Link, megabits: float) -> Iterator[int]:
    for share in (0.95, 1.0, 1.05):
        link.set_rate(share * megabits)
        settle(model, inputs)
        before = model.status.switches
        for _ in range(_HOVER):
            model.run(inputs)
        yield model.status.switches - before


def main() -> None:
    """Measure what the settings ask for; each result is printed when it is there."""
    settings = Settings(**json.loads(sys.argv[1]))
    with np.load(settings.inputs) as arrays:
        inputs = dict(arrays)
    for result in measure(settings, inputs):
        print(json.dumps(asdict(result)), flush=True)
    if settings.switching:
        print(json.dumps(asdict(switch(settings, inputs))), flush=True)


if __name__ == "__main__":
    main()
