"""Runs a plan: its parts and the copies between them are tasks over numbered slots.

One executor serves one call at a time, since TVM's virtual machine keeps its frames; the loader
keeps as many as there are calls at once. Code and weights are shared by all of them.

Where parts run on different devices, a tensor is copied to where a part needs it, once in a call
for each device; between parts of one device it stays where it is. The results are in host memory.

Tasks are listed in an order in which they can run, and :meth:`Executor.run` does so in the caller's
thread. :mod:`hybridc.runtime.calls` lets workers run them side by side.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import tvm_ffi

from hybridc.bundle.manifest import Manifest
from hybridc.errors import HybridcError, PartError, UsageError
from hybridc.runtime.host_memory import HostMemory
from hybridc.runtime.parts import Function, LoadedPart
from hybridc.runtime.tensors import HOST, Place, allocate, copy, place_of

_GIVEN: Place = (0, 0)
"""Where inputs are if there are devices: wherever the caller has them."""

Observer = Callable[["Task", float, float], None]
"""Told of each task that ran, and when it began and ended, in seconds of ``time.perf_counter``."""


@dataclass(frozen=True)
class Task:
    """A part or a copy, ready to be called.

    Attributes:
        name: The part, or what is copied where.
        worker: Whose work it is: the device, or the way that the copy goes.
        is_part: Whether it is a part.
        function: What to call with the values that it reads, and ``trailing`` behind them.
        trailing: Further arguments.
        reads: Slots.
        writes: Slots.
        dead: Slots that nothing reads after it, if tasks run in order.
    """

    name: str
    worker: str
    is_part: bool
    function: Function
    trailing: tuple[Any, ...]
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    dead: tuple[int, ...] = ()


class Executor:
    """Calls the parts of a plan.

    Attributes:
        is_new: Whether it has not run yet; the first run may prepare what later ones use.
        tasks: Parts and copies, in an order in which they can run.
        waits: How many tasks each task has to wait for.
        followers: The tasks that wait for each task.
        readers: How many tasks read each slot; results are read once more, by the caller.
        has_branches: Whether parts on different devices can run at the same time.
    """

    def __init__(
        self, manifest: Manifest, parts: Sequence[LoadedPart], observer: Observer | None = None
    ) -> None:
        self.is_new = True
        self.has_branches = False
        self._observer = observer
        self._staged: dict[tuple[int, Place], Any] = {}
        self._host_memory = HostMemory()
        self._slots: dict[tuple[str, Place], int] = {}
        self._on_host = all(part.place == HOST for part in parts)
        given = HOST if self._on_host else _GIVEN
        self._inputs = [self._slot(spec.name, given) for spec in manifest.inputs]
        self.tasks: list[Task] = []
        homes = {spec.name: given for spec in manifest.inputs}
        for part in parts:
            self._add_part(part, homes)
        for spec in manifest.outputs:
            self._bring(spec.name, homes, HOST)
        self._outputs = [self._slots[spec.name, HOST] for spec in manifest.outputs]
        self._connect()

    def _slot(self, name: str, place: Place) -> int:
        return self._slots.setdefault((name, place), len(self._slots))

    def _add_part(self, part: LoadedPart, homes: dict[str, Place]) -> None:
        """A task for a part, behind those that copy what it reads."""
        spec = part.spec
        reads = tuple(self._bring(name, homes, part.place) for name in spec.inputs)
        function, trailing = part.start()
        homes.update(dict.fromkeys(spec.outputs, part.place))
        writes = tuple(self._slot(name, part.place) for name in spec.outputs)
        self.tasks.append(Task(spec.name, spec.device, True, function, trailing, reads, writes))

    def _bring(self, name: str, homes: dict[str, Place], place: Place) -> int:
        """The slot of a tensor at a place, with a task that copies it there if it has to be."""
        home = homes[name]
        if (name, place) in self._slots:
            return self._slots[name, place]
        source, slot = self._slots[name, home], self._slot(name, place)
        label = f"{name} to {_name(place)}"
        worker = f"copies {_name(home)} to {_name(place)}"
        mover = self._mover(slot, place)
        self.tasks.append(Task(label, worker, False, mover, (), (source,), (slot,)))
        return slot

    def _connect(self) -> None:
        """Find out who waits for whom, and when each slot is dead."""
        writers: dict[int, int] = {}
        last: dict[int, int] = {}
        self.readers = [0] * len(self._slots)
        self.followers: list[list[int]] = [[] for _ in self.tasks]
        self.waits: list[int] = []
        ancestors: list[int] = []
        for index, task in enumerate(self.tasks):
            last.update(dict.fromkeys((*task.reads, *task.writes), index))
            for slot in task.reads:
                self.readers[slot] += 1
            before = {writers[slot] for slot in task.reads if slot in writers}
            writers.update(dict.fromkeys(task.writes, index))
            for other in before:
                self.followers[other].append(index)
            self.waits.append(len(before))
            bits = 0
            for other in before:
                bits |= ancestors[other] | 1 << other
            ancestors.append(bits)
        for slot in self._outputs:
            self.readers[slot] += 1
            last.pop(slot, None)
        self.has_branches = _has_branches(self.tasks, ancestors)
        dead: list[list[int]] = [[] for _ in self.tasks]
        for slot, index in last.items():
            dead[index].append(slot)
        pairs = zip(self.tasks, dead, strict=True)
        self.tasks = [dataclasses.replace(task, dead=tuple(slots)) for task, slots in pairs]

    def run(self, inputs: Sequence[Any]) -> list[Any]:
        """Outputs for the model's inputs, both as tvm_ffi tensors in the manifest's order.

        Raises:
            UsageError: The model cannot run with inputs of these shapes or values.
            PartError: A part failed; the message says which.
        """
        values = self.slots(inputs)
        for index, task in enumerate(self.tasks):
            results = self.call(index, values)
            for slot, tensor in zip(task.writes, results, strict=True):
                values[slot] = tensor
            for slot in task.dead:
                values[slot] = None
        return self.results(values)

    def slots(self, inputs: Sequence[Any]) -> list[Any]:
        """The slots at the begin of a call."""
        values: list[Any] = [None] * len(self._slots)
        for slot, value in zip(self._inputs, inputs, strict=True):
            values[slot] = value
        return values

    def results(self, values: Sequence[Any]) -> list[Any]:
        """The outputs, at the end of a call."""
        self.is_new = False
        return [values[slot] for slot in self._outputs]

    def call(self, index: int, values: Sequence[Any]) -> Sequence[Any]:
        """Run one task; gives what it writes.

        Raises:
            UsageError, PartError: See :meth:`run`.
        """
        task = self.tasks[index]
        arguments = [values[slot] for slot in task.reads]
        try:
            if self._observer is None:
                return task.function(*arguments, *task.trailing)
            begin = time.perf_counter()
            results = task.function(*arguments, *task.trailing)
        except HybridcError:  # says itself what is wrong
            raise
        except ValueError as error:  # what the checks that are compiled in raise
            raise UsageError(f"{_label(task)}: {error}") from error
        except Exception as error:
            raise PartError(f"{_label(task)} failed: {error}") from error
        self._observer(task, begin, time.perf_counter())
        return results

    def _mover(self, slot: int, place: Place) -> Function:
        return lambda value: [self._moved(slot, place, value)]

    def _moved(self, slot: int, place: Place, value: Any) -> Any:
        """A tensor at a place; on a device in memory that is kept, which is slow to get there."""
        if not isinstance(value, tvm_ffi.Tensor) or place_of(value) == place:
            return value
        if place_of(value) != HOST:
            value = self._host_memory.received(value)
        if place == HOST:
            return value
        kept = self._staged.get((slot, place))
        if kept is None or kept.shape != value.shape:
            kept = self._staged[slot, place] = allocate(value, place)
        copy(value, kept)
        return kept


def _has_branches(tasks: Sequence[Task], ancestors: Sequence[int]) -> bool:
    """Whether two parts on different devices do not wait for each other."""
    for later, task in enumerate(tasks):
        for earlier in range(later):
            other = tasks[earlier]
            apart = task.is_part and other.is_part and task.worker != other.worker
            if apart and not ancestors[later] >> earlier & 1:
                return True
    return False


def _name(place: Place) -> str:
    return {_GIVEN: "input", HOST: "host"}.get(place, f"device {place[0]}:{place[1]}")


def _label(task: Task) -> str:
    return f"{task.name} on {task.worker}" if task.is_part else f"the copy of {task.name}"
