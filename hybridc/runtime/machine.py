"""The machine that loads a bundle: its architecture, instruction set and Python packages."""

from __future__ import annotations

import platform
import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from hybridc.bundle.manifest import DeviceSpec
from hybridc.errors import DeviceError
from hybridc.runtime import amx, cuda, opencl


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
    if device.architecture not in ("", here):
        return f"it was built for {device.architecture} and this machine is {here}"
    missing = sorted(set(device.cpu_flags) - cpu_flags()) if device.cpu_flags else []
    if missing:
        return f"it was built for {device.built_for} and this CPU lacks {', '.join(missing)}"
    refusal = amx.why_not() if amx.FLAG in device.cpu_flags else None
    if refusal is not None:
        return f"it was built for {device.built_for} and {refusal}"
    if device.kind == "cuda":
        return cuda.why_not(device.device_code)
    if device.kind == "opencl":
        return opencl.why_not(device.device_code, device.name)
    return None


def _missing_package(requirement: str) -> str | None:
    """What is wrong with an installed package, for a requirement ``name>=1.2``."""
    name, _, lowest = requirement.partition(">=")
    try:
        found = version(name)
    except PackageNotFoundError:
        return f"the package {name} is not installed"
    if _numbers(found) < _numbers(lowest):
        return f"the package {name} is of version {found}, and the bundle needs {lowest} or later"
    return None


def _numbers(text: str) -> tuple[int, ...]:
    """A release as numbers: ``1.32.0rc1`` is (1, 32, 0)."""
    return tuple(int(number) for number in re.findall(r"\d+", re.match(r"[\d.]*", text)[0]))  # type: ignore[index]


def require(device: DeviceSpec) -> None:
    """Refuse a device that this machine cannot provide.

    Raises:
        DeviceError: With the reason and what to do.
    """
    for requirement in device.packages:
        fault = _missing_package(requirement)
        if fault is not None:
            raise DeviceError(
                f"device {device.name} cannot run here: {fault}; run: pip install "
                f"'hybridc[{requirement.partition('>=')[0]}]'"
            )
    reason = why_not(device)
    if reason is not None:
        raise DeviceError(
            f"device {device.name} cannot run here: {reason}; compile with a --target for this "
            "machine"
        )
