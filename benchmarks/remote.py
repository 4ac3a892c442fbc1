"""A model between this machine and a real Triton server, over links of several speeds.

    python benchmarks/remote.py model.onnx --shape batch=1 -o result.json

compiles the model with ``--remote``, serves the model repository with the Triton server that
``make triton`` fetches, and calls it through a proxy that shapes the link: so many bits per second
and so much delay, each way. For each link it measures the plan without the server, the plan that
sends everything, and what the loader chooses by itself.

Both ends share this machine: this end has ``--threads`` threads, the server all cores. With
``--edge-target llvm:x86-64-v2`` this end is slower too: code without AVX.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import Queue
from typing import Any

import hybridc
from hybridc.bundle.read import open_bundle
from hybridc.runtime.arrays import random_inputs
from hybridc.runtime.remote_choice import PATIENCE
from hybridc.runtime.remote_encoding import BYTE, HALF, TOLERANCE
from hybridc.runtime.remote_settings import RemoteSettings
from hybridc.runtime.samples import relative_error

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

Inputs = Mapping[str, Any]
Outputs = dict[str, Any]
Round = dict[int, float]
"""Seconds of calls that were made one after another, by their number."""

_CHUNK = 16384
_QUEUE = 16
"""Chunks that are on their way at most: as a router does, the proxy holds no more."""


_SETTLE_SECONDS, _KEPT_SECONDS = 20.0, 1.5
"""How long a model may take to choose its plan, and how long it has to have kept it."""

_WARM_SECONDS = 0.5

_TURNS, _AS_FAST = 6, 1.05
"""How often calls are timed, and the ratio at which once is enough."""

_LIMITS = {"fp32": 1e-3, "fp16": TOLERANCE[HALF], "int8": TOLERANCE[BYTE]}
"""Largest relative error of a result, by what crosses."""


class Link:
    """A proxy between a port here and a server, as slow as a link is.

    Attributes:
        address: ``host:port`` to connect to.
        rate: Bytes per second, each way.
        delay: Seconds, each way.
    """

    def __init__(self, server: str, rate: float, delay: float) -> None:
        self.rate, self.delay = rate, delay
        host, _, port = server.rpartition(":")
        self._server = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Take no more connections."""
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                here, _ = self._listener.accept()
                there = socket.create_connection(self._server)
                for one in (here, there):
                    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._carry(here, there)
                self._carry(there, here)

    def _carry(self, source: socket.socket, destination: socket.socket) -> None:
        """Copy bytes one way: a thread that takes them at the link's rate, one that delivers."""
        waiting: Queue[tuple[float, bytes]] = Queue()
        room = threading.Semaphore(_QUEUE)

        def take() -> None:
            free = time.perf_counter()
            with contextlib.suppress(OSError):
                while data := source.recv(_CHUNK):
                    room.acquire()
                    free = max(free, time.perf_counter()) + len(data) / self.rate
                    _sleep_until(free)
                    room.release()
                    waiting.put((free + self.delay, data))
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


@contextlib.contextmanager
def serve(repository: Path, protocol: str) -> Iterator[str]:
    """Serve a repository with Triton; gives the address for a protocol, ``grpc`` or ``http``."""
    from tools import triton

    if not triton.is_here():
        sys.exit("this needs a Triton server; run: make triton")
    with tempfile.TemporaryDirectory() as scratch, triton.serve(repository, Path(scratch)) as own:
        yield own.grpc if protocol == "grpc" else own.http


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


def measure(
    bundle: Path, address: str, inputs: Inputs, options: argparse.Namespace
) -> Iterator[Result]:
    """Measure every link; the three ways take turns, so that all see the same machine."""
    with hybridc.load(bundle, threads=options.threads) as model:
        expected = model.run(inputs)
    for megabits in options.megabits:
        for round_trip in options.round_trips:
            link = Link(address, megabits * 1e6 / 8, round_trip / 2e3)
            with contextlib.closing(link), contextlib.ExitStack() as stack:
                models = [
                    stack.enter_context(load(bundle, link, options, plan))
                    for plan in ("local", "remote", None)
                ]
                settle(models[2], inputs)
                calls = [functools.partial(model.run, inputs) for model in models]
                for call in calls:
                    _same(expected, _LIMITS[options.precision], _warm(call))
                rounds = _rounds(calls, options.seconds)
                status = models[2].status
            figures = (*_medians(rounds), _over_best(rounds))
            yield Result(
                megabits, round_trip, *figures, status.plan, status.switches, status.fallbacks
            )


def load(bundle: Path, link: Link, options: argparse.Namespace, plan: str | None) -> Any:
    """The bundle with the server at the other end of a link; it may run one plan, or any."""
    settings = RemoteSettings(
        (f"{options.protocol}://{link.address}",), plan=plan, deadline=120.0, probe_seconds=0.5
    )
    return hybridc.load(bundle, threads=options.threads, remote=settings)


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


def _same(expected: Outputs, limit: float, actual: Outputs) -> None:
    for name, array in expected.items():
        error = relative_error(actual[name], array)
        if error > limit:
            sys.exit(f"the output {name} is wrong by {error:.2g}")


def compile_hybrid(model: Path, folder: Path, options: argparse.Namespace) -> Path:
    """The bundle with its plans, all here and all there among them; and its repository."""
    bundle = folder / "edge.hyb"
    command = [sys.executable, "-m", "hybridc", "compile", str(model), "-o", str(bundle)]
    command += [f"--shape={text}" for text in options.shape]
    command += ["--remote=server=llvm:host", f"--link=server={options.link}"]
    command += [f"--target={options.edge_target}", f"--profile=llvm:0={options.edge}"]
    command += [f"--remote-precision={options.precision}", f"--profile=server={options.server}"]
    command += [f"--tolerance={_LIMITS[options.precision]}", "--no-fallback"]
    command += [f"--repository={folder / 'repository'}"]
    subprocess.run(command, check=True)
    names = {plan.name for plan in open_bundle(bundle).manifest.plans}
    if not {"local", "remote"} <= names:
        sys.exit(f"the bundle has the plans {', '.join(sorted(names))}, and not both extremes")
    return bundle


def table(results: Sequence[Result]) -> str:
    """The results in Markdown."""
    lines = [
        "| Mbit/s | Round trip | All here | All there | Chosen | Plan | Over the better |",
        "|---|---|---|---|---|---|---|",
    ]
    for result in results:
        times = [f"{t * 1e3:.1f} ms" for t in (result.local, result.remote, result.chosen)]
        link = [f"{result.megabits:g}", f"{result.round_trip_ms:g} ms"]
        cells = [*link, *times, result.plan, f"{result.over_best:.2f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def add_options(parser: argparse.ArgumentParser) -> None:
    """What does not depend on the model."""
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--link", default="100mbit,0.5ms")
    parser.add_argument("--edge", default="cortex-a76", help="profile of this end")
    parser.add_argument("--edge-target", default="llvm:host", help="what this end is compiled for")
    parser.add_argument("--server", default="sapphire-rapids", help="profile of the server")
    parser.add_argument("--protocol", choices=["grpc", "http"], default="grpc")
    parser.add_argument("--precision", choices=["fp32", "fp16", "int8"], default="fp32")
    parser.add_argument("--seconds", type=float, default=1.5, help="of each way over each link")
    megabits, round_trips = [1, 10, 100, 1000, 10000], [1, 15, 60]
    parser.add_argument("--megabits", type=float, nargs="+", default=megabits)
    parser.add_argument("--round-trips", type=float, nargs="+", default=round_trips)


def main() -> None:
    """Compile, serve, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--shape", action="append", default=[])
    add_options(parser)
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        bundle = compile_hybrid(options.model, folder, options)
        with hybridc.load(bundle, threads=options.threads) as model:
            inputs = random_inputs(model, 0)
        results = []
        with serve(folder / "repository", options.protocol) as address:
            for result in measure(bundle, address, inputs, options):
                results.append(result)
                print(result, flush=True)
    print(table(results))
    if options.output is not None:
        options.output.write_text(json.dumps([asdict(result) for result in results], indent=1))


if __name__ == "__main__":
    main()
