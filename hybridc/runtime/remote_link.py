"""What is known of the link to the server.

Two figures, the round trip and the seconds of a byte, each the median of the last measurements, so
that one that lies counts for nothing and two that agree count at once. Calls measure them, and so
do looks at the link while no call does.

Each source of measurements has a history of its own: a byte does not take the same time in each
plan, since packing tensors takes time too, nor in a look. A measurement that is far off those of
its own source is in doubt; a second one that confirms it says that the link has changed, and then
what all sources measured before is forgotten.

A look at the link may see another bandwidth than calls do: a shaper lets some bytes pass at once,
which are a large share of a look. So a look may be confirmed by a larger one, and the ratio of both
holds for the looks that follow.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from hybridc.bundle.manifest import LinkSpec

RECENT, MOST = 3, 12
"""Measurements whose median counts, and how many are kept."""

DECEIVED = 2.0
"""The ratio of a larger look's time for a byte to a smaller one's from which the latter said
nothing."""

_FORGET = 20
"""Looks after which the ratios of two looks are forgotten."""

_LARGE = 4096
"""Fewest bytes whose time says something about the bandwidth."""

_LEAST = 0.02
"""Share of a call's time that its bytes need at least, where the round trip hides them."""

_DOUBT = 1.5
"""A measurement is in doubt if by it a plan would take so many times as long, or as short."""

_LOOK = "look"

Recent: TypeAlias = tuple[float, ...]
"""Last measurements; replaced and not changed, since other threads may be reading them."""


def with_last(recent: Recent, value: float | None) -> Recent:
    """The last measurements and one more; without it if there is none."""
    return recent if value is None else (*recent, value)[-MOST:]


def median(values: Sequence[float], otherwise: float, last: int = RECENT) -> float:
    """The median of the last of some values, or something else if there are none."""
    return statistics.median(values[-last:]) if values else otherwise


def per_byte_of(empty: float, count: int, full: float) -> float:
    """Seconds of a byte, by the seconds of an exchange without contents and of one with so many."""
    return max(full - empty, _LEAST * full) / count


def ratio_of(first: float, confirmed: float) -> float:
    """How much longer a byte takes by a larger look than by a smaller one, up to ``DECEIVED``."""
    return min(confirmed / first, DECEIVED)


def _spec(round_trip: float, per_byte: float) -> LinkSpec:
    return LinkSpec(round_trip, 1 / max(per_byte, 1e-12))


@dataclass(frozen=True)
class _History:
    """Last measurements, of one source or of all."""

    round_trips: Recent = ()
    per_byte: Recent = ()

    def spec(self, otherwise: LinkSpec, last: int = RECENT) -> LinkSpec:
        """The link by the last measurements, and by another one where there are none."""
        per_byte = median(self.per_byte, 1 / otherwise.bytes_per_second, last)
        return _spec(median(self.round_trips, otherwise.round_trip_seconds, last), per_byte)

    def noting(self, round_trip: float | None, per_byte: float | None) -> _History:
        """This and one more measurement of either figure or of both."""
        return _History(with_last(self.round_trips, round_trip), with_last(self.per_byte, per_byte))

    def last_two(self) -> _History:
        """What remains where the link has changed."""
        return _History(self.round_trips[-2:], self.per_byte[-2:])


class Link:
    """The link as it was measured. Not locked: its owner serves several threads.

    Args:
        expected: What it is taken for until something is measured.
    """

    def __init__(self, expected: LinkSpec) -> None:
        self._expected = expected
        self._all = _History()
        self._sources: dict[str, tuple[_History, LinkSpec]] = {}
        self._source = ""
        self._ratios: Recent = ()
        self._looks = 0

    def spec(self, last: int = RECENT) -> LinkSpec:
        """The link by so many of the last measurements, or as it was expected."""
        return self._all.spec(self._expected, last)

    @property
    def has_bandwidth(self) -> bool:
        """Whether the bandwidth was measured."""
        return bool(self._all.per_byte)

    @property
    def is_corrected(self) -> bool:
        """Whether looks are corrected by larger ones that were made lately."""
        return bool(self._ratios)

    def note_exchange(self, source: str, count: int, seconds: float, most: float) -> bool:
        """Note how long sending and receiving so many bytes took, without the server's time.

        Few bytes say something about the round trip, many about the bandwidth.

        Args:
            source: Name of what was sent: one exchange of one plan.
            count: Bytes.
            seconds: Time.
            most: Bytes of the plan that sends most.

        Returns:
            Whether the link has changed.
        """
        link = self.spec()
        if count < self.telling(most):
            moving = min(count / link.bytes_per_second, (1 - _LEAST) * seconds)
            return self._note(source, seconds - moving, None, most)
        moving = max(seconds - link.round_trip_seconds, _LEAST * seconds)
        return self._note(source, None, moving / count, most)

    def note_look(
        self, empty: float, count: int, full: float, first: float | None, most: float
    ) -> bool:
        """Note the seconds of an exchange without contents, and of one that sent so many bytes.

        Args:
            empty: Seconds of the first.
            count: Bytes of the second; 0 if there was none.
            full: Its seconds.
            first: What :func:`per_byte_of` a smaller look said that this one was to confirm.
            most: Bytes of the plan that sends most.

        Returns:
            Whether the link has changed.
        """
        if count == 0:
            return self._note(_LOOK, empty, None, most)
        per_byte = per_byte_of(empty, count, full)
        self._looks += 1
        if first is not None:
            self._ratios = (*self._ratios, ratio_of(first, per_byte))[-RECENT:]
            self._looks = 0
        elif self._looks > _FORGET:
            self._ratios = ()
        return self._note(
            _LOOK, empty, per_byte if first is not None else self._right(per_byte), most
        )

    def looked(self, empty: float, count: int, full: float) -> LinkSpec:
        """The link as one look has it."""
        return _spec(empty, self._right(per_byte_of(empty, count, full)))

    def _right(self, per_byte: float) -> float:
        """A look's seconds of a byte, corrected by what larger looks said."""
        return per_byte * median(self._ratios, 1.0)

    def telling(self, most: float) -> float:
        """Fewest bytes whose time the round trip does not hide, or half of what a plan sends."""
        link = self.spec()
        carried = link.bytes_per_second * link.round_trip_seconds
        return max(_LARGE, min(carried, most) / 2)

    def is_sure(self, most: float) -> bool:
        """Whether the last measurement says much the same as those of its source before it."""
        return self._is_sure(self._source, most)

    def _is_sure(self, source: str, most: float) -> bool:
        history, last = self._sources.get(source, (self._all, self.spec()))
        return _are_alike(history.spec(self.spec()), last, most)

    def _note(
        self, source: str, round_trip: float | None, per_byte: float | None, most: float
    ) -> bool:
        history, doubted = self._sources.get(source, (_History(), None))
        before = history.spec(self.spec())
        if doubted is not None and self._is_sure(source, most):
            doubted = None
        self._all = self._all.noting(round_trip, per_byte)
        history = history.noting(round_trip, per_byte)
        last = _History().noting(round_trip, per_byte).spec(history.spec(self.spec()))
        has_changed = doubted is not None and _has_changed(before, doubted, last, most)
        if has_changed:
            self._all, history, self._sources = self._all.last_two(), history.last_two(), {}
        self._sources[source], self._source = (history, last), source
        return has_changed


def _has_changed(before: LinkSpec, doubted: LinkSpec, last: LinkSpec, most: float) -> bool:
    """Whether the last measurement confirms the one before it, which was far from the others.

    It does if both say about the same, or if both are far off to the same side.
    """
    if _are_alike(doubted, last, most):
        return True
    was, one, other = (_wait(link, most) for link in (before, doubted, last))
    return not _are_alike(before, last, most) and (one < was) == (other < was)


def _are_alike(one: LinkSpec, other: LinkSpec, most: float) -> bool:
    """Whether so many bytes would wait about as long over one link as over another."""
    first, second = _wait(one, most), _wait(other, most)
    return first <= _DOUBT * second and second <= _DOUBT * first


def _wait(link: LinkSpec, count: float) -> float:
    return link.round_trip_seconds + count / link.bytes_per_second
