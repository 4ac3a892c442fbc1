"""A machine's file that further models are added to.

What is in it stays as it is: the devices' profiles, and the groups that were measured with the same
code. Only other groups are measured, and those of a whole that were known before are taken to be
what the file says when the whole is compared with their sum.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridc.bundle.manifest import build_record
from hybridc.calibration.machine import Figure, Machine, MachineDevice
from hybridc.calibration.record import GROUP, Kernel
from hybridc.cost_models.device import DeviceProfile, parse_profile
from hybridc.cost_models.load import DEVICES, read_machine
from hybridc.cost_models.measured import Code, by_signature, parse_measurements
from hybridc.errors import UsageError

_MEASUREMENTS, _FIGURES, _NOTES = "measurements", "figures", "notes"


@dataclass(frozen=True)
class KnownDevice:
    """A device that was measured before.

    Attributes:
        profile: Its profile.
        seconds: Times of groups by signature, of those that were measured with the same code.
    """

    profile: DeviceProfile
    seconds: Mapping[str, float]

    def lacks(self, kernel: Kernel) -> bool:
        """Whether a kernel is a group that was not measured."""
        return kernel.purpose == GROUP and kernel.work.signature not in self.seconds


@dataclass(frozen=True)
class _Entry:
    """What of a device's entry is not checked where it is read as a cost model."""

    cores: tuple[int, ...]
    figures: tuple[Figure, ...]


@dataclass(frozen=True)
class KnownMachine:
    """A machine's file.

    Attributes:
        where: Its path, for messages.
        data: What it says.
    """

    where: str
    data: Mapping[str, Any]

    def device(self, name: str, cores: tuple[int, ...], code: Code) -> KnownDevice:
        """A device with what was measured with the same code.

        Raises:
            UsageError: The file has no such device, or it had other code or other cores.
        """
        entry = self.data[DEVICES].get(name)
        if entry is None or (entry["kind"], entry["specification"]) != code.key[:2]:
            built_for = ":".join(filter(None, code.key[:2]))
            raise UsageError(f"{self.where} knows no {name} for {built_for}; {_HINT}")
        before = self._entry(name).cores
        if before != cores:
            raise UsageError(
                f"{self.where} knows {name} on cores {list(before)}, and here it has "
                f"{list(cores)}; {_HINT}"
            )
        rows = parse_measurements(entry[_MEASUREMENTS], self.where)
        seconds = {name: one.seconds for name, one in by_signature(rows, code).items()}
        return KnownDevice(parse_profile(entry["profile"], self.where), seconds)

    def _entry(self, name: str) -> _Entry:
        try:
            found: _Entry = build_record(_Entry, self.data[DEVICES][name], name)
        except (ValueError, TypeError, KeyError) as error:
            raise UsageError(f"{self.where} does not describe a machine: {error}") from error
        return found

    def with_more(self, machine: Machine) -> dict[str, Any]:
        """What the file says with what else was measured, which replaces what it is newer than."""
        found = dict(self.data)
        found[DEVICES] = {
            name: _with_more(entry, machine.devices[name]) if name in machine.devices else entry
            for name, entry in self.data[DEVICES].items()
        }
        notes = self.data.get(_NOTES, [])
        return {**found, _NOTES: [*notes, *(one for one in machine.notes if one not in notes)]}


_HINT = "measure the machine anew, without --known"


def _with_more(entry: Mapping[str, Any], device: MachineDevice) -> dict[str, Any]:
    new = {one.work.signature: dataclasses.asdict(one) for one in device.measurements}
    old = [row for row in entry[_MEASUREMENTS] if row["work"]["signature"] not in new]
    figures = {one.name: dataclasses.asdict(one) for one in device.figures}
    kept = [figure for figure in entry[_FIGURES] if figure["name"] not in figures]
    return {
        **entry,
        _MEASUREMENTS: [*old, *new.values()],
        _FIGURES: [*kept, *figures.values()],
    }


def read_known(path: Path) -> KnownMachine:
    """Read a machine's file to add to.

    Raises:
        UsageError: It cannot be read, or is no such file.
    """
    data, where = read_machine(str(path))
    return KnownMachine(where, data)
