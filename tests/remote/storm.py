"""Many calls while the server and the link break and come back, in an order drawn at random.

    python -m tests.remote.storm 10000

prints what became of the calls, over both protocols, with and without a plan to fall back on. Two
storms run at a time, each in a process of its own: most of the time is spent waiting.
"""

from __future__ import annotations

import dataclasses
import logging
import multiprocessing
import random
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import hybridc
from hybridc.errors import RemoteMissing
from hybridc.runtime.remote_settings import RemoteSettings
from tests.remote import server as faults
from tests.remote.conftest import SERVER, Hybrid, compile_hybrid
from tests.remote.http_server import BODY_TRICKLE, HttpServer
from tests.remote.proxy import CUT, STALL, Proxy
from tests.remote.server import Server

DEADLINE = 0.4
EPISODE = 10
"""Calls between two changes of what is broken."""

DEAD = "dead"
SERVER_FAULTS = (
    faults.HANG,
    faults.GARBAGE,
    faults.CRASH,
    faults.ABORT,
    faults.OTHER_BUILD,
    faults.NO_MODEL,
    faults.SHORT,
)


@dataclass
class Toll:
    """What became of the calls.

    Attributes:
        right: Results that were right.
        wrong: Results that were not.
        errors: Calls that ended with the error that says why there is no server.
        late: Calls that took longer than the deadline by more than a tenth.
        worst: Seconds of the longest call.
        away: Seconds from when something broke to the next result, each time.
        back: Seconds from when all was well to the next result of the server, each time.
        episodes: How often each thing was broken.
        runs: Results by plan.
    """

    right: int = 0
    wrong: int = 0
    errors: int = 0
    late: int = 0
    worst: float = 0.0
    away: list[float] = field(default_factory=list)
    back: list[float] = field(default_factory=list)
    episodes: dict[str, int] = field(default_factory=dict)
    runs: dict[str, int] = field(default_factory=dict)


class _World:
    """A server behind a link, and what is wrong with them."""

    def __init__(self, kind: type[Server] | type[HttpServer], hybrid: Hybrid) -> None:
        self._kind, self._repository = kind, hybrid.repository
        self._server: Server | HttpServer = kind(hybrid.repository)
        self._proxy = Proxy(self._server.place)
        self.address = self._server.address.replace(self._server.place, self._proxy.address)
        self.broken: str | None = None

    def breaks(self, what: str | None) -> None:
        """Mend what is broken, and break something else; nothing if it is ``None``."""
        if self.broken == DEAD:
            self._server = self._kind(self._repository, self._server.port)
        self.broken = what
        self._proxy.fault = what if what in (STALL, CUT) else None
        self._proxy.sent.clear()
        if what == DEAD:
            self._server.stop()
        else:
            self._server.fault = None if what in (STALL, CUT) else what

    def close(self) -> None:
        """Stop everything."""
        self._proxy.close()
        self._server.stop()


def storm(
    hybrid: Hybrid, kind: type[Server] | type[HttpServer], calls: int, seed: int, local: bool
) -> Toll:
    """Make so many calls; without ``local`` there is no plan to fall back on."""
    chance, toll, world = random.Random(seed), Toll(), _World(kind, hybrid)
    choice = [*SERVER_FAULTS, STALL, CUT, DEAD, *([BODY_TRICKLE] if kind is HttpServer else [])]
    remote = RemoteSettings((world.address,), deadline=DEADLINE, probe_seconds=0.02)
    if not local:
        remote = dataclasses.replace(remote, plan="cut1")
    changed = time.perf_counter()
    with hybridc.load(hybrid.bundle, remote=remote) as model:
        cut = next(plan for plan in model.manifest.plans if plan.name == "cut1")
        for number in range(calls):
            if number % EPISODE == 0:
                world.breaks(None if number // EPISODE % 2 == 0 else chance.choice(choice))
                toll.episodes[str(world.broken)] = toll.episodes.get(str(world.broken), 0) + 1
                changed = time.perf_counter()
            if model.status.connected:
                model._chooser.current = cut  # both ends are one machine: the link says nothing
            before = model.status.runs["cut1"]
            _call(hybrid, model, toll)
            changed = _note(toll, world, changed, model.status.runs["cut1"] > before)
        toll.runs = dict(model.status.runs)
    world.close()
    return toll


def _call(hybrid: Hybrid, model: hybridc.Model, toll: Toll) -> None:
    start = time.perf_counter()
    try:
        is_right = hybrid.is_right(model(x=hybrid.x))
        toll.right += is_right
        toll.wrong += not is_right
    except RemoteMissing:
        toll.errors += 1
    took = time.perf_counter() - start
    toll.late += took > 1.1 * DEADLINE
    toll.worst = max(toll.worst, took)


def _note(toll: Toll, world: _World, changed: float, by_server: bool) -> float:
    """Note how long a change took to be felt; returns when it was made, or 0 if that is noted."""
    if not changed or (world.broken is None and not by_server):
        return changed
    found = toll.back if world.broken is None else toll.away
    found.append(time.perf_counter() - changed)
    return 0.0


def _summary(toll: Toll) -> str:
    def spread(values: list[float]) -> str:
        ordered = sorted(values)
        if not ordered:
            return "never"
        return f"{ordered[len(ordered) // 2] * 1e3:.0f} ms, at most {ordered[-1] * 1e3:.0f} ms"

    return (
        f"right {toll.right}, wrong {toll.wrong}, errors {toll.errors}, "
        f"later than the deadline {toll.late} (longest {toll.worst * 1e3:.0f} ms of "
        f"{DEADLINE * 1e3:.0f} ms)\n  to the next result {spread(toll.away)}; back on the server "
        f"{spread(toll.back)}\n  results {toll.runs}\n  episodes {toll.episodes}"
    )


def _one(hybrid: Hybrid, kind: type[Server] | type[HttpServer], calls: int, local: bool) -> Toll:
    logging.getLogger("hybridc.remote").setLevel(logging.CRITICAL)
    return storm(hybrid, kind, calls, seed=1, local=local)


def main(calls: int) -> int:
    """Run all four kinds of storms; returns 1 if a result was wrong or missing, or came late."""
    bad = False
    with tempfile.TemporaryDirectory() as name, _processes() as pool:
        hybrid = compile_hybrid(Path(name), *SERVER, "--private", "x", "--release", "map")
        cases = [(kind, local) for local in (False, True) for kind in (Server, HttpServer)]
        tolls = [pool.submit(_one, hybrid, kind, calls // 4, local) for kind, local in cases]
        for (kind, local), future in zip(cases, tolls, strict=True):
            toll = future.result()
            print(f"{kind.__name__}, {'all plans' if local else 'the server alone'}:")
            print("  " + _summary(toll), flush=True)
            bad |= toll.wrong + toll.late > 0 or (local and toll.errors > 0)
    return int(bad)


def _processes() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(2, multiprocessing.get_context("spawn"))


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 10000))
