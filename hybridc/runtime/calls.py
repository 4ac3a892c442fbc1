"""A call under way: tasks go to their workers as soon as what they read is there.

    inputs --> copy --> part0 --+--> part1 --+
                                +--> part2 --+--> copy --> outputs

A tensor is dropped when its last reader is done. The first task that fails ends the call; tasks of
it that wait are then left out.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hybridc.runtime.executor import Executor
    from hybridc.runtime.workers import Workers


class Call:
    """One call of an executor, run by workers.

    Attributes:
        future: Gets the outputs, or the error.
    """

    def __init__(
        self, executor: Executor, workers: Workers, inputs: Sequence[Any], number: int
    ) -> None:
        self.future: Future[list[Any]] = Future()
        self._executor, self._workers, self._number = executor, workers, number
        self._values = executor.slots(inputs)
        self._waits = list(executor.waits)
        self._readers = list(executor.readers)
        self._left = len(executor.tasks)
        self._lock = threading.Lock()

    def start(self) -> Future[list[Any]]:
        """Hand out what needs nothing but the inputs; returns the future."""
        first = [index for index, count in enumerate(self._waits) if not count]
        if not self._left:
            self.future.set_result(self._executor.results(self._values))
        for index in first:
            self._submit(index)
        return self.future

    def _submit(self, index: int) -> None:
        worker = self._executor.tasks[index].worker
        self._workers.submit(worker, (self._number, index), lambda: self._run(index))

    def _run(self, index: int) -> None:
        if self.future.done():
            return
        try:
            results = self._executor.call(index, self._values)
        except BaseException as error:
            with self._lock:
                if not self.future.done():
                    self.future.set_exception(error)
            return
        ready, finished = self._store(index, results)
        for other in ready:
            self._submit(other)
        if finished:
            self.future.set_result(self._executor.results(self._values))
            self._values.clear()

    def _store(self, index: int, results: Sequence[Any]) -> tuple[list[int], bool]:
        """Keep what a task gave, drop what nothing reads any more; what can run now, if all ran."""
        task = self._executor.tasks[index]
        with self._lock:
            for slot, value in zip(task.writes, results, strict=True):
                self._values[slot] = value if self._readers[slot] else None
            for slot in task.reads:
                self._readers[slot] -= 1
                if not self._readers[slot]:
                    self._values[slot] = None
            ready = []
            for other in self._executor.followers[index]:
                self._waits[other] -= 1
                if not self._waits[other]:
                    ready.append(other)
            self._left -= 1
            return ready, not self._left
