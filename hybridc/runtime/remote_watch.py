"""When to look at the link, and how much to send.

Calls that use the server tell what the link is like. While they do not, an empty exchange and one
that carries bytes tell it, every now and then. Where the round trip hides what the bytes take, more
are sent. If what comes out is far from what was known, all this is done again at once: so a link
that changes is believed within a moment, and one measurement that lies is not. A look that speaks
for another plan is followed by larger ones, up to as many bytes as that plan sends.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeAlias

from hybridc.runtime.remote_choice import Chooser
from hybridc.runtime.remote_link import DECEIVED, per_byte_of, ratio_of

_TIMES = 3
"""Measurements of one look at most."""

_GROWTH, _MOST_BYTES = 8, 1 << 20
"""By how much more is sent each time, and how much at most."""

_MORE = 4
"""By how much more is sent after a look that said nothing."""

_HIDDEN = 0.5
"""Bytes that take less than this share of a round trip are hidden by it."""

_EARLY = 0.25
"""The share of the time between two looks after which a doubt may bring the next."""

Measure: TypeAlias = Callable[[int], tuple[float, float] | None]
"""Gives the seconds of an empty exchange and of one with so many bytes; ``None`` if it failed."""


class LinkWatch:
    """Says when to look at the link, and looks.

    Args:
        chooser: Is told what was measured.
        seconds: Least time between two looks.
        least: Fewest bytes to send; with 0, none are sent.
        clock: Gives the time in seconds.
    """

    def __init__(
        self,
        chooser: Chooser,
        seconds: float,
        least: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._chooser, self._seconds, self._least, self._clock = chooser, seconds, least, clock
        self._next = self._early = 0.0
        self._count = least

    def is_due(self) -> bool:
        """Whether it is time for a look."""
        return self._clock() >= self._next

    def note_call(self) -> None:
        """Have the next look soon, if what a call told of the link is doubtful."""
        if not self._chooser.is_sure():
            self._next = min(self._next, self._early)

    def look(self, measure: Measure) -> None:
        """Measure until it is clear what the link is like, three times at most."""
        for _ in range(_TIMES):
            start = self._clock()
            found = self._measure(measure)
            if found is not None:
                self._chooser.note_look(*found)
            if found is None or self._chooser.is_sure():
                break
        # The first measurement may have waited for a call's bytes; the last tells what one costs.
        end = self._clock()
        self._next = end + max(self._seconds, end - start)
        self._early = end + max(_EARLY * self._seconds, end - start)

    def _measure(self, measure: Measure) -> tuple[float, int, float, float | None] | None:
        """What :meth:`Chooser.note_look` takes; ``None`` if an exchange failed."""
        if not self._chooser.is_corrected:
            self._count = self._least
        count = 0 if self._chooser.is_told() else self._count
        most = min(self._chooser.most_bytes, _MOST_BYTES)
        while (found := measure(count)) is not None:
            empty, full = found
            if count == 0:
                return empty, 0, 0.0, None
            if count >= most or full - empty > _HIDDEN * empty:
                return self._confirmed(measure, empty, count, full)
            count = int(min(_GROWTH * count, most))
        return None

    def _confirmed(
        self, measure: Measure, empty: float, count: int, full: float
    ) -> tuple[float, int, float, float | None] | None:
        """A look, or larger ones in place of it as long as a plan would take over by it."""
        first, sent = None, count
        while (more := self._more(empty, sent, full)) > sent:
            found = measure(more)
            if found is None:
                return None
            first = first or per_byte_of(empty, count, full)
            (empty, full), sent = found, more
        if first is not None and ratio_of(first, per_byte_of(empty, sent, full)) >= DECEIVED:
            self._count = _MORE * count
        return empty, sent, full, first

    def _more(self, empty: float, sent: int, full: float) -> int:
        """Bytes of the next larger look; a few times more each time, since the link may be slow."""
        wanted = self._chooser.bytes_to_confirm(empty, sent, full)
        return min(wanted, _GROWTH * sent, _MOST_BYTES)
