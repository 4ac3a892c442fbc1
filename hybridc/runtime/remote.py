"""Bundles with a server at the other end: several plans, and which one runs when.

Each plan is a model of its own over the same parts. A part that the server runs is called like any
other; its call is a request. What the calls take says what the link is like now, and that decides
which plan runs next (:mod:`hybridc.runtime.remote_choice`). While nothing runs on the server, a
thread looks at the link now and then.

If the server fails a call and there is a plan without it, that plan computes the result: the time
for the server ends early enough for it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

from hybridc.bundle.manifest import Manifest, PartSpec, PlanSpec, RemoteSpec
from hybridc.errors import InternalError, RemoteMissing, UsageError
from hybridc.runtime.loader import Model, finished
from hybridc.runtime.parts import Function, LoadedPart
from hybridc.runtime.remote_choice import Chooser
from hybridc.runtime.remote_client import Client, connect
from hybridc.runtime.remote_report import Beginner, Listener, RequestReport, RunReport, Status
from hybridc.runtime.remote_settings import RemoteSettings, read_settings
from hybridc.runtime.remote_watch import LinkWatch
from hybridc.runtime.tensors import HOST, Place, to_array, to_tensor

_LOG = logging.getLogger("hybridc.remote")

_SPARE = 1.5
"""The time that is left for the plan without the server, as a multiple of what it takes."""

_SLACK, _SLACK_SECONDS = 0.1, 0.05
"""What is left of a call's time at its end: a share, and at most so much.

A thread that waits is woken late where a machine has much to do.
"""


@dataclass
class _Call:
    """One run of a plan, for its remote parts.

    Attributes:
        until: When the server's time is over, as a time of ``time.monotonic``.
        headers: What goes with its requests.
        requests: What was asked of the server.
        waited: Seconds spent in calls to the server.
    """

    until: float
    headers: Mapping[str, str]
    requests: list[RequestReport] = field(default_factory=list)
    waited: float = 0.0


@dataclass
class _Lane:
    """A plan loaded for one call at a time, with the call that it is at."""

    call: _Call | None = None
    model: Model | None = None


@dataclass(frozen=True)
class RemotePart:
    """A part that a server runs.

    Attributes:
        spec: Its description.
        client: The way to the server.
        lane: Says which call it is run for.
        place: In host memory.
    """

    spec: PartSpec
    client: Client
    lane: _Lane
    place: Place = HOST

    def start(self) -> tuple[Function, tuple[Any, ...]]:
        """A function that sends the inputs and gives the outputs."""
        return self._run, ()

    def _run(self, *values: Any) -> list[Any]:
        call, remote = self.lane.call, self.spec.remote
        if call is None or remote is None:
            raise InternalError(f"{self.spec.name} was run outside of its plan")
        start = time.perf_counter()
        try:
            arrays = [to_array(value) for value in values]
            reply = self.client.infer(remote, arrays, call.until, call.headers)
        finally:
            call.waited += time.perf_counter() - start
        request = RequestReport(
            self.spec.name, reply.bytes, reply.network_seconds, reply.server_seconds
        )
        call.requests.append(request)
        return [to_tensor(array) for array in reply.arrays]


class _Lanes:
    """A plan with a server, loaded as often as there are calls at once; code is shared."""

    def __init__(
        self,
        manifest: Manifest,
        plan: PlanSpec,
        parts: Mapping[str, LoadedPart],
        client: Client,
        threads: int | None,
    ) -> None:
        self._manifest = replace(manifest, parts=plan.parts)
        self._parts, self._client, self._threads = parts, client, threads
        self._idle: deque[_Lane] = deque()

    def run(self, tensors: list[Any], call: _Call) -> list[Any]:
        """Run the plan; a lane whose call failed is not used again."""
        try:
            lane = self._idle.pop()
        except IndexError:
            lane = _Lane()
            parts = _ready(self._manifest.parts, self._parts, self._client, lane)
            lane.model = Model(self._manifest, parts, self._threads)
        assert lane.model is not None
        lane.call = call
        try:
            results = lane.model.run_tensors(tensors)
        except BaseException:
            lane.model.close()
            raise
        lane.call = None
        self._idle.append(lane)
        return results

    def close(self) -> None:
        """Release what is not in a call."""
        for lane in self._idle:
            if lane.model is not None:
                lane.model.close()
        self._idle.clear()


def _ready(
    specs: Sequence[PartSpec], parts: Mapping[str, LoadedPart], client: Client, lane: _Lane
) -> list[LoadedPart]:
    """The parts of a plan, those on the server bound to a lane."""
    return [RemotePart(s, client, lane) if s.remote else parts[s.name] for s in specs]


class HybridModel(Model):
    """A loaded bundle with several plans. May be called from several threads at once.

    Args:
        manifest: The bundle's description.
        parts: Its parts here, by name.
        threads: Threads of one call.
        client: The way to the server.
        settings: How to use it.

    Raises:
        UsageError: The settings name a plan that the bundle does not have.
        RemoteMissing: There is no plan without the server, and it does not answer.
    """

    def __init__(
        self,
        manifest: Manifest,
        parts: Mapping[str, LoadedPart],
        threads: int | None,
        client: Client,
        settings: RemoteSettings,
    ) -> None:
        super().__init__(manifest, _ready(manifest.parts, parts, client, _Lane()), threads)
        self._client, self._settings = client, settings
        plans = self._allowed(manifest.plans)
        self._lanes = {
            plan.name: _Lanes(manifest, plan, parts, client, threads)
            for plan in plans
            if plan.round_trips
        }
        self._local = next((plan for plan in plans if not plan.round_trips), None)
        self._remote = [plan for plan in plans if plan.round_trips]
        assert manifest.link is not None
        self._chooser = Chooser(plans, manifest.link, self._local or plans[0])
        self._link = LinkWatch(self._chooser, settings.probe_seconds, settings.probe_bytes)
        self._runs = dict.fromkeys((plan.name for plan in plans), 0)
        self._fallbacks, self._errors, self._active, self._trouble = 0, 0, 0, ""
        self._beginners: tuple[Beginner, ...] = ()
        self._state = threading.Lock()
        self._probe_thread: threading.Thread | None = None
        if self._local is None:
            self.probe()
            if not self._chooser.connected:
                client.close()
                raise RemoteMissing(self._trouble)

    def _allowed(self, plans: Sequence[PlanSpec]) -> Sequence[PlanSpec]:
        name = self._settings.plan
        found = [plan for plan in plans if name in (None, plan.name)]
        if not found:
            names = ", ".join(plan.name for plan in plans)
            raise UsageError(f"the bundle has no plan {name!r}; it has {names}")
        return found

    @property
    def status(self) -> Status:
        """What runs, what was measured, and what happened so far."""
        chooser = self._chooser
        link = chooser.link
        plans = [*([self._local] if self._local else []), *self._remote]
        return Status(
            chooser.current.name,
            chooser.connected,
            getattr(self._client, "endpoint", ""),
            link.round_trip_seconds,
            link.bytes_per_second,
            {plan.name: chooser.seconds(plan) for plan in plans},
            dict(self._runs),
            self._fallbacks,
            chooser.switches,
            self._trouble,
            self._active,
            self._errors,
        )

    def listen(self, listener: Listener) -> None:
        """Have a function told of each run from now on; what it raises is logged."""
        self.accompany(lambda: ({}, listener))

    def accompany(self, beginner: Beginner) -> None:
        """Have a function called where each run begins from now on; what it raises is logged."""
        with self._state:
            self._beginners = (*self._beginners, beginner)

    def run_tensors(self, tensors: list[Any]) -> list[Any]:
        """Run on tvm_ffi tensors in the inputs' order, unchecked; gives tvm_ffi tensors.

        Raises:
            RemoteMissing: The server failed, and there is no plan without it.
        """
        begun = self._begin()
        started, start = time.time_ns(), time.perf_counter()
        with self._state:
            self._active += 1
        report: RunReport | None = None
        try:
            headers = {name: text for own, _ in begun for name, text in own.items()}
            results, report = self._run_by_plan(tensors, headers)
        except RemoteMissing as error:
            name = self._chooser.current.name
            report = RunReport(name, 0, 0.0, 0.0, trouble=str(error), is_error=True)
            raise
        finally:
            with self._state:
                self._active -= 1
                self._errors += report is not None and report.is_error
            if report is not None and begun:
                took = time.perf_counter() - start
                full = replace(report, start_nanoseconds=started, seconds=took)
                _tell((listener for _, listener in begun), full)
        self._look_at_link()
        return results

    def _run_by_plan(
        self, tensors: list[Any], headers: Mapping[str, str]
    ) -> tuple[list[Any], RunReport]:
        """The results of the plan that is next, or of the one that stands in for it."""
        end = time.monotonic() + self._settings.deadline
        plan, trouble = self._chooser.next_plan(), ""
        if plan.round_trips:
            try:
                return self._run_plan(plan, tensors, _Call(end - self._spare(), headers))
            except RemoteMissing as error:
                self._note_trouble(error)
                if self._local is None:
                    raise
                with self._state:
                    self._fallbacks += 1
                plan, trouble = self._local, str(error)
        results, report = self._run_plan(plan, tensors, _Call(end, headers))
        return results, replace(report, trouble=trouble, is_fallback=bool(trouble))

    def _begin(self) -> list[tuple[Mapping[str, str], Listener]]:
        """Call those who want to know where a run begins."""
        begun = []
        for beginner in self._beginners:
            try:
                begun.append(beginner())
            except Exception:
                _LOG.exception("a listener failed")
        return begun

    def _spare(self) -> float:
        """Seconds that the server does not get: for the local plan if it can keep the deadline."""
        deadline = self._settings.deadline
        slack = min(_SLACK * deadline, _SLACK_SECONDS)
        spare = slack + _SPARE * self._chooser.local_seconds()
        return spare if spare < deadline else slack

    def _run_plan(
        self, plan: PlanSpec, tensors: list[Any], call: _Call
    ) -> tuple[list[Any], RunReport]:
        start = time.perf_counter()
        run = self._run_lane if plan.round_trips else self._run_here
        results = run(plan, tensors, call)
        edge = time.perf_counter() - start - call.waited
        for number, request in enumerate(call.requests):
            source = f"{plan.name} {number}"
            self._chooser.note_exchange(source, request.bytes, request.network_seconds)
        if call.requests:
            self._link.note_call()
        with self._state:
            self._runs[plan.name] += 1
        server = sum(request.server_seconds for request in call.requests)
        crossed = sum(request.bytes for request in call.requests)
        waiting = sum(request.network_seconds for request in call.requests)
        self._watch(lambda: self._chooser.note_run(plan, edge, server, crossed, waiting))
        return results, RunReport(plan.name, 0, 0.0, edge, tuple(call.requests))

    def _run_here(self, _plan: PlanSpec, tensors: list[Any], _call: _Call) -> list[Any]:
        return super().run_tensors(tensors)

    def _run_lane(self, plan: PlanSpec, tensors: list[Any], call: _Call) -> list[Any]:
        if self._parts is None:
            raise UsageError("this model was closed; load the bundle again")
        return self._lanes[plan.name].run(tensors, call)

    def _submit(self, arrays: Mapping[str, Any]) -> Future[list[Any]]:
        """One call after another: which plan is next depends on how the last one went."""
        return finished(lambda: self.run_tensors(self._reader.read(arrays)))

    def _look_at_link(self) -> None:
        """Probe the link in a thread, if it is time; one probe at a time."""
        if not self._remote or self._settings.plan is not None:
            return
        with self._state:
            running = self._probe_thread is not None and self._probe_thread.is_alive()
            if running or not self._link.is_due() or self._parts is None:
                return
            self._probe_thread = threading.Thread(target=self.probe, daemon=True)
            self._probe_thread.start()

    def probe(self) -> None:
        """Look at the link now: whether the server has the other end, and how far it is."""
        until = time.monotonic() + self._settings.deadline
        self._client.check_again(_first_remote(self._remote[0]))
        self._link.look(lambda count: self._measure(count, until))
        self._watch(self._chooser.choose)

    def _measure(self, count: int, until: float) -> tuple[float, float] | None:
        """What exchanges without and with so many bytes take, if the server answers."""
        try:
            return self._client.measure(_first_remote(self._remote[0]), count, until)
        except RemoteMissing as error:
            self._note_trouble(error)
        except Exception as error:  # such as a connection that was closed meanwhile
            self._note_trouble(RemoteMissing(f"{type(error).__name__}: {error}"))
        return None

    def _note_trouble(self, error: RemoteMissing) -> None:
        if self._parts is None:
            return  # the model was closed, and its connections with it
        text = str(error)
        if text != self._trouble or self._chooser.connected:
            _LOG.warning("the server failed: %s", text)
        self._trouble = text
        self._watch(self._chooser.note_failure)

    def _watch(self, step: Callable[[], None]) -> None:
        """Do something that may change the plan, and log it if it does."""
        before = self._chooser.current
        step()
        after = self._chooser.current
        if after != before:
            link = self._chooser.link
            _LOG.info(
                "plan %s takes over from %s: round trip %.1f ms, %.2f Mbit/s",
                after.name,
                before.name,
                link.round_trip_seconds * 1e3,
                link.bytes_per_second * 8e-6,
            )

    def close(self) -> None:
        """Release code, weights and connections. Arrays returned before stay valid."""
        super().close()
        for lanes in self._lanes.values():
            lanes.close()
        self._client.close()


def _tell(listeners: Iterable[Listener], report: RunReport) -> None:
    for listener in listeners:
        try:
            listener(report)
        except Exception:
            _LOG.exception("a listener failed")


def _first_remote(plan: PlanSpec) -> RemoteSpec:
    return next(part.remote for part in plan.parts if part.remote is not None)


def load_hybrid(
    manifest: Manifest,
    load: Callable[[PartSpec], LoadedPart],
    threads: int | None,
    settings: RemoteSettings | None,
    client: Client | None = None,
) -> Model:
    """The model of a bundle that has plans.

    Args:
        manifest: Its description.
        load: Loads a part that runs here.
        threads: Threads of one call.
        settings: The server; ``None`` to run without.
        client: A way to the server that is no connection, for checks.

    Raises:
        RemoteMissing: No server is given and the bundle needs one; or see :class:`HybridModel`.
    """
    needs_server = any(part.remote for part in manifest.parts)
    if settings is None and needs_server:
        settings = read_settings(None)
    if settings is None:
        if needs_server:
            raise RemoteMissing(
                "this bundle runs only with its server: give hybridc.load a remote, or set "
                "HYBRIDC_REMOTE"
            )
        _LOG.info("no server is given: everything runs here")
        return Model(manifest, [load(spec) for spec in manifest.parts], threads)
    specs = {p.name: p for plan in manifest.plans for p in plan.parts if p.remote is None}
    parts = {name: load(spec) for name, spec in specs.items()}
    return HybridModel(manifest, parts, threads, client or connect(settings), settings)
