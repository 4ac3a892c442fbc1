"""The machine that loads a bundle: its architecture and instruction set."""

from __future__ import annotations

import platform
from pathlib import Path

from hybridc.bundle.manifest import DeviceSpec
from hybridc.errors import DeviceError


def cpu_flags() -> frozenset[str]:
    """Instruction-set flags of this machine's CPU, by the Linux kernel's names."""
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()


def why_not(device: DeviceSpec) -> str | None:
    """Why this machine cannot run what was built for ``device``; ``None`` if it can."""
    here = platform.machine()
    if device.architecture != here:
        return f"it was built for {device.architecture} and this machine is {here}"
    missing = sorted(set(device.cpu_flags) - cpu_flags())
    if missing:
        return f"it was built for {device.built_for} and this CPU lacks {', '.join(missing)}"
    return None


def require(device: DeviceSpec) -> None:
    """Refuse a device that this machine cannot provide.

    Raises:
        DeviceError: With the reason and what to do.
    """
    reason = why_not(device)
    if reason is not None:
        raise DeviceError(
            f"device {device.name} cannot run here: {reason}; compile with a --target for this "
            "machine"
        )
