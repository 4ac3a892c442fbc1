"""Measured costs: what exactly this group took on exactly this device with exactly this code.

A measurement counts only where everything that decides about the code is the same: the group's
signature (operators, shapes, element types, attributes), the target's kind and specification, and
the versions of hybridc and TVM.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hybridc.cost_models.cost import MEASURED, Cost
from hybridc.cost_models.device import DeviceProfile
from hybridc.cost_models.group_work import GroupWork

from hybridc.bundle.manifest import build_record
from hybridc.errors import UsageError


@dataclass(frozen=True)
class Code:
    """What made the code that was measured.

    Attributes:
        kind: Kind of the target.
        specification: What it was built for.
        versions: Version by package.
    """

    kind: str
    specification: str
    versions: Mapping[str, str]

    @property
    def key(self) -> tuple[str, str, tuple[tuple[str, str], ...]]:
        """Something to compare and to look up by."""
        return self.kind, self.specification, tuple(sorted(self.versions.items()))


@dataclass(frozen=True)
class Measurement:
    """One measured group.

    Attributes:
        work: The group.
        code: What was run.
        seconds: Median time.
        spread: Half the distance between the quartiles, relative to the median.
        runs: How many runs the median is of.
    """

    work: GroupWork
    code: Code
    seconds: float
    spread: float
    runs: int

    @property
    def is_lost(self) -> bool:
        """Whether the spread is as large as the time: what was taken off it drowned it."""
        return self.spread >= 1


class Measured:
    """Measurements by signature, of one device with the code of one target."""

    def __init__(self, measurements: Sequence[Measurement], code: Code) -> None:
        self._found = by_signature(measurements, code)

    def estimate(self, group: GroupWork, device: DeviceProfile) -> Cost | None:
        """The measured cost; ``None`` if this very group was not measured."""
        found = self._found.get(group.signature)
        if found is None:
            return None
        return Cost(found.seconds, group.bytes, MEASURED, max(0.0, 1 - found.spread))


def by_signature(measurements: Sequence[Measurement], code: Code) -> dict[str, Measurement]:
    """Measurements that count for code: of the same code, and not lost."""
    fitting = [one for one in measurements if one.code.key == code.key and not one.is_lost]
    return {one.work.signature: one for one in fitting}


def parse_measurements(data: Any, where: str) -> tuple[Measurement, ...]:
    """Measurements out of JSON.

    Raises:
        UsageError: Something in it is missing, of the wrong type, or no time.
    """
    try:
        found: tuple[Measurement, ...] = build_record(tuple[Measurement, ...], data, "measurements")
        for index, one in enumerate(found):
            if not 0 < one.seconds < float("inf") or not one.spread >= 0:
                raise ValueError(f"measurements[{index}] is no time")
    except (ValueError, TypeError, KeyError) as error:
        raise UsageError(f"{where} holds no measurements: {error}") from error
    return found
