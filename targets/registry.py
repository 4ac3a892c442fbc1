"""Find targets, and read ``--target`` specifications."""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import cast

from hybridc.targets.protocol import CachingTarget, Device, StrictTarget, Target

from hybridc.errors import UsageError

GROUP = "hybridc.targets"
_SPECIFICATION = re.compile(r"(?:(?P<name>[^=]+)=)?(?P<kind>[a-z][a-z0-9_]*)(?::(?P<rest>.*))?")


def target_kinds() -> list[str]:
    """Names of all installed targets."""
    return sorted({point.name for point in entry_points(group=GROUP)})


def find_target(kind: str, cache: Path | None = None) -> Target:
    """The target of that kind; one that can, keeps what it builds in the folder ``cache``.

    Raises:
        UsageError: None of that kind is installed.
    """
    for point in entry_points(group=GROUP):
        if point.name == kind:
            target = cast(Target, point.load())
            if cache is not None and isinstance(target, CachingTarget):
                return target.with_cache(cache)
            return target
    raise UsageError(f"there is no target {kind!r}; installed are {', '.join(target_kinds())}")


def strict_target(target: Target, strict_math: bool) -> Target:
    """The target, without kernels for which ``--strict-math`` is not true if that is asked for."""
    if strict_math and isinstance(target, StrictTarget):
        return target.with_strict_math()
    return target


def parse_targets(specifications: Sequence[str]) -> tuple[Device, ...]:
    """Devices out of ``--target`` options.

    ``llvm`` and ``llvm:x86-64-v3`` name a kind and what to build for; the device is called
    ``llvm:0``, ``llvm:1`` and so on in the order given. ``llvm:1`` asks for that very name, and
    ``edge=llvm:aarch64`` gives a name of one's own.

    Raises:
        UsageError: A specification cannot be read, names no target, or two share a name.
    """
    devices: list[Device] = []
    for text in specifications:
        match = _SPECIFICATION.fullmatch(text)
        if match is None:
            raise UsageError(f"--target {text!r} is not of the form [NAME=]KIND[:WHAT]")
        name, kind, rest = match["name"], match["kind"], match["rest"] or ""
        if rest.isdigit():
            name, rest = name or f"{kind}:{rest}", ""
        find_target(kind).check(rest)
        devices.append(Device(name or _free_name(kind, devices), kind, rest))
    _refuse_twins(devices)
    return tuple(devices)


def _free_name(kind: str, devices: Sequence[Device]) -> str:
    return f"{kind}:{sum(device.kind == kind for device in devices)}"


def _refuse_twins(devices: Sequence[Device]) -> None:
    names = [device.name for device in devices]
    twins = sorted({name for name in names if names.count(name) > 1})
    if twins:
        raise UsageError(f"two targets are called {twins[0]!r}; name them as in edge=llvm")
