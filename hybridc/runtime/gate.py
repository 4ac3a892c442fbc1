"""Lets one call use a device alone while others wait.

TVM's runtime captures a CUDA graph in the first call of an executor, in CUDA's global mode and on
a stream that waits for the default one. What another thread asks of the driver meanwhile fails, and
so does the capture. So first calls are made alone, and all others together.

    together   calls, loading, closing      any number at once
    alone      the first call               waits for those under way, and holds new ones back
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Gate:
    """A lock with many readers or one writer, where a waiting writer goes first."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside = 0
        self._closed = False

    @contextmanager
    def together(self) -> Iterator[None]:
        """Runs beside others that are together."""
        with self._changed:
            self._changed.wait_for(lambda: not self._closed)
            self._inside += 1
        try:
            yield
        finally:
            with self._changed:
                self._inside -= 1
                self._changed.notify_all()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Runs while nothing else does."""
        with self._changed:
            self._changed.wait_for(lambda: not self._closed)
            self._closed = True
            self._changed.wait_for(lambda: not self._inside)
        try:
            yield
        finally:
            with self._changed:
                self._closed = False
                self._changed.notify_all()


CUDA = Gate()
"""The one for CUDA: what it guards against is a property of the process."""
