"""Processes that prepare side by side, and measure one at a time while all others are stopped.

    parent                       one process        another one
      start both                  prepares           prepares
      stop the other  <-- READY -- waits             (stopped)
      go ahead ------------------> measures          (stopped)
      let it go on    <-- DONE --- prepares          prepares

A process may measure as often as it likes; what it prints besides is kept for the parent.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import signal
import subprocess
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

READY, DONE = "ready to measure", "done with measuring"
ENDED = ""

IN_TURN = "HYBRIDC_BENCHMARK_IN_TURN"
"""Environment variable that is set where a parent gives turns."""

Key = TypeVar("Key")


@contextlib.contextmanager
def turn() -> Iterator[None]:
    """Wait until the others are stopped; at the end they go on. Without a parent, just go on."""
    if IN_TURN not in os.environ:
        yield
        return
    print(READY, flush=True)
    input()
    try:
        yield
    finally:
        print(DONE, flush=True)


@dataclass(frozen=True)
class Ended:
    """A process that has ended.

    Attributes:
        code: Its exit code.
        lines: What it printed, errors included, beside what it said to its parent.
    """

    code: int
    lines: Sequence[str]


@dataclass(frozen=True)
class _Child(Generic[Key]):
    key: Key
    process: subprocess.Popen[str]
    lines: list[str] = field(default_factory=list)
    done: queue.Queue[str] = field(default_factory=queue.Queue)

    def read(self, events: queue.Queue[tuple[_Child[Key], str]]) -> None:
        """Tell what the process says until it ends."""
        for line in self.process.stdout or ():
            word = line.strip()
            if word == READY:
                events.put((self, READY))
            elif word == DONE:
                self.done.put(DONE)
            else:
                self.lines.append(line.rstrip("\n"))
        self.done.put(ENDED)
        events.put((self, ENDED))

    def measure(self) -> None:
        """Let the process measure, and wait for the end of that, or of the process."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write("\n")
            self.process.stdin.flush()
        self.done.get()


def run_all(
    commands: Iterable[tuple[Key, Sequence[str]]], jobs: int
) -> Iterator[tuple[Key, Ended]]:
    """Run commands in sessions of their own, so many at a time; gives each when it has ended.

    Args:
        commands: Each with a name, taken when there is room for it.
        jobs: Most processes at a time.
    """
    left, running = iter(commands), list[_Child[Key]]()
    events: queue.Queue[tuple[_Child[Key], str]] = queue.Queue()
    try:
        while True:
            for key, command in itertools.islice(left, jobs - len(running)):
                running.append(_start(key, command, events))
            if not running:
                return
            child, event = events.get()
            if event == READY:
                with _stopped(other.process for other in running if other is not child):
                    child.measure()
                continue
            running.remove(child)
            yield child.key, Ended(child.process.wait(), child.lines)
    finally:
        for child in running:
            os.killpg(child.process.pid, signal.SIGKILL)


def _start(
    key: Key, command: Sequence[str], events: queue.Queue[tuple[_Child[Key], str]]
) -> _Child[Key]:
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env={**os.environ, IN_TURN: "1"},
    )
    child = _Child(key, process)
    threading.Thread(target=child.read, args=(events,), daemon=True).start()
    return child


@contextlib.contextmanager
def _stopped(processes: Iterable[subprocess.Popen[str]]) -> Iterator[None]:
    """Stop processes and what they started, for a time."""
    alive = [process.pid for process in processes if process.poll() is None]
    for pid in alive:
        os.killpg(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in alive:
            os.killpg(pid, signal.SIGCONT)
