"""The timeline of runs: when each part, copy and kernel was at work.

The executor tells of parts and copies. Kernels are told by TVM's virtual machine, which calls an
instrument before and after each of its instructions; that takes a few microseconds each, so it is
only done on demand. A part on a GPU is waited for, or its launches alone would be seen. Its kernels
are not: what is shown of them is the launch, and nothing where a CUDA graph launches them all.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import tvm_ffi

from hybridc.bundle.manifest import PartSpec
from hybridc.runtime.executor import Task
from hybridc.runtime.parts import CompiledPart, Function, LoadedPart
from hybridc.runtime.tensors import HOST, Place, synchronize

PART, COPY, KERNEL = "part", "copy", "kernel"

_BUILT_IN = "vm.builtin."


@dataclass(frozen=True)
class Event:
    """Something that took time.

    Attributes:
        name: The part, the kernel, or what was copied where.
        kind: ``part``, ``copy`` or ``kernel``.
        track: The device, or the way of a copy.
        part: Name of the part that a kernel belongs to, or of the part itself.
        begin: Seconds of ``time.perf_counter``.
        end: Seconds.
    """

    name: str
    kind: str
    track: str
    part: str
    begin: float
    end: float

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.end - self.begin


@dataclass
class Timeline:
    """Collects events from any thread.

    Attributes:
        events: What happened so far, in the order of its end.
    """

    events: list[Event] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def observe(self, task: Task, begin: float, end: float) -> None:
        """Take note of a task; the executor calls this."""
        kind = PART if task.is_part else COPY
        self.add(Event(task.name, kind, task.worker, task.name if task.is_part else "", begin, end))

    def add(self, event: Event) -> None:
        """Take note of an event."""
        with self._lock:
            self.events.append(event)

    def watch(self, part: LoadedPart, kernels: bool) -> LoadedPart:
        """The same part, whose end is waited for, and with events for its kernels if wanted."""
        return WatchedPart(part, self, kernels) if isinstance(part, CompiledPart) else part


@dataclass(frozen=True)
class WatchedPart:
    """A part whose end is waited for, and whose kernels are noted in a timeline if wanted."""

    part: CompiledPart
    timeline: Timeline
    kernels: bool

    @property
    def spec(self) -> PartSpec:
        """The part's description."""
        return self.part.spec

    @property
    def place(self) -> Place:
        """Where the part's tensors are."""
        return self.part.place

    def start(self) -> tuple[Function, tuple[Any, ...]]:
        """The part's function, instrumented."""
        machine = self.part.machine()
        if self.kernels:
            machine["set_instrument"](tvm_ffi.convert(_Instrument(self).step))
        main = machine["main"]
        if self.place == HOST:
            return main, (self.part.weights,)

        def run(*values: Any) -> Sequence[Any]:
            results: Sequence[Any] = main(*values)
            synchronize(self.place)
            return results

        return run, (self.part.weights,)


class _Instrument:
    """What a virtual machine tells of each instruction, one machine's by itself."""

    def __init__(self, watched: WatchedPart) -> None:
        self._timeline = watched.timeline
        self._part, self._device = watched.spec.name, watched.spec.device
        self._begins: list[float] = []

    def step(self, _function: Any, name: str, is_before: bool, *_values: Any) -> int:
        """Note the begin or the end of an instruction; gives 0, which lets it run."""
        if name.startswith(_BUILT_IN):
            return 0
        if is_before:
            self._begins.append(time.perf_counter())
            return 0
        begin = self._begins.pop()
        event = Event(name, KERNEL, self._device, self._part, begin, time.perf_counter())
        self._timeline.add(event)
        return 0


def trace(events: Sequence[Event], predicted: Mapping[str, float]) -> dict[str, Any]:
    """A timeline in Chrome's trace format, for chrome://tracing and Perfetto.

    Args:
        events: What was measured.
        predicted: Seconds of each part by the cost model; shown in tracks of their own, each from
            the time at which the part began.
    """
    tracks = list(dict.fromkeys((one.kind == COPY, one.track) for one in events))
    names = [track for _, track in sorted(tracks)]
    start = min((one.begin for one in events), default=0.0)
    rows: list[dict[str, Any]] = []
    for process, title in ((1, "measured"), (2, "predicted")):
        rows.append(_meta("process_name", process, 0, title))
        rows += [_meta("thread_name", process, index, name) for index, name in enumerate(names)]
    for one in sorted(events, key=lambda event: (event.begin, -event.end)):
        place = {"pid": 1, "tid": names.index(one.track)}
        rows.append(_span(one.name, one.kind, one.begin - start, one.seconds, place))
        if one.kind == PART and one.name in predicted:
            place = {**place, "pid": 2}
            rows.append(_span(one.name, PART, one.begin - start, predicted[one.name], place))
    return {"traceEvents": rows, "displayTimeUnit": "ms"}


def _meta(kind: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": {"name": name}}


def _span(
    name: str, kind: str, begin: float, seconds: float, place: Mapping[str, int]
) -> dict[str, Any]:
    times = {"ts": round(begin * 1e6, 3), "dur": round(seconds * 1e6, 3)}
    return {"ph": "X", "name": name, "cat": kind, **times, **place}
