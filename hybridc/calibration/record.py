"""What a calibration bundle says about itself: which part is which kernel, for which code.

A calibration bundle is a bundle as any other: each kernel is a part, with inputs of its own, and
the loader's checks hold for it. ``calibration.json`` names the work of each part.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass

from hybridc.bundle.manifest import build_record
from hybridc.cost_models.device import load_json
from hybridc.cost_models.group_work import GroupWork
from hybridc.errors import BundleError, UsageError

CALIBRATION = "calibration.json"
"""Name of this description in a bundle."""

SCHEMA = "1.2"

CALL = "call"
LAUNCH = "launch"
BANDWIDTH = "bandwidth"
GROUP = "group"
WHOLE = "whole"


@dataclass(frozen=True)
class Code:
    """A target that kernels were built by.

    Attributes:
        kind: Kind of the target.
        specification: What it was built for.
        devices: Devices of that target, which are measured one by one.
    """

    kind: str
    specification: str
    devices: tuple[str, ...]


@dataclass(frozen=True)
class Kernel:
    """One part of the bundle.

    Attributes:
        part: Name of the part.
        code: Index of its target.
        purpose: ``call`` (nothing is computed), ``launch`` (a chain of kernels that compute next to
            nothing), ``bandwidth`` (an element-wise kernel, for the memory's levels), ``group``, or
            ``whole`` (all of a model that can run there in one piece).
        work: What it does.
        footprint: Bytes of weights that its model reads between two runs of it.
        groups: Signatures of the groups in a whole, as often as they occur; views are left out.
    """

    part: str
    code: int
    purpose: str
    work: GroupWork
    footprint: int = 0
    groups: tuple[str, ...] = ()


@dataclass(frozen=True)
class Calibration:
    """All kernels.

    Attributes:
        schema: ``major.minor`` of this description.
        versions: Versions of what made the code, by package.
        codes: Targets.
        kernels: The kernels.
    """

    schema: str
    versions: Mapping[str, str]
    codes: tuple[Code, ...]
    kernels: tuple[Kernel, ...]


def to_json(calibration: Calibration) -> bytes:
    """The description as text."""
    text = json.dumps(dataclasses.asdict(calibration), indent=1, ensure_ascii=False)
    return (text + "\n").encode()


def from_json(text: bytes, where: str) -> Calibration:
    """Read a description.

    Raises:
        BundleError: It is damaged, or of a newer schema.
    """
    try:
        data = load_json(text.decode(), where)
        if str(data.get("schema", "")).partition(".")[0] != SCHEMA.partition(".")[0]:
            raise ValueError(f"its schema is {data.get('schema')!r}, and this reads {SCHEMA}")
        found: Calibration = build_record(Calibration, data, "calibration")
        if any(not 0 <= kernel.code < len(found.codes) for kernel in found.kernels):
            raise ValueError("a kernel is of no target")
    except (ValueError, TypeError, KeyError, UsageError) as error:
        raise BundleError(f"{where} describes no calibration: {error}") from error
    return found
