"""A tuning file: which choice was measured to be best for which kernel, on which target.

The file is JSON, sorted, so that equal tunings are equal files. What a compile takes of it are the
choices; the times are for people. Choices are only as good as the code that they were measured
with, so a file counts for one version of hybridc and of TVM, and for one target.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import hybridc
from hybridc.bundle.manifest import build_record
from hybridc.cost_models.device import load_json
from hybridc.errors import UsageError
from hybridc.targets.protocol import Device
from hybridc.targets.registry import find_target
from hybridc.targets.tuning import Problem, Tuning, figures
from hybridc.tuning.measure import Measured

SCHEMA = "1.0"


@dataclass(frozen=True)
class Code:
    """What the choices are for.

    Attributes:
        hybridc: Version of hybridc.
        tvm: Version of TVM.
        target: Kind of the target.
        built_for: The processor that code is made for.
        architecture: Its architecture.
        cpu_flags: The instruction sets that the code uses.
    """

    hybridc: str
    tvm: str
    target: str
    built_for: str
    architecture: str
    cpu_flags: tuple[str, ...]


@dataclass(frozen=True)
class Entry:
    """One kernel.

    Attributes:
        kind: Kind of the problem.
        sizes: Its sizes by name.
        choice: What was chosen, by name.
        candidates: How many were measured.
        microseconds: What the choice took, at best and in the median, and what the choice by
            estimate took.
    """

    kind: str
    sizes: Mapping[str, int]
    choice: Mapping[str, int]
    candidates: int
    microseconds: Mapping[str, float]

    @property
    def problem(self) -> Problem:
        """What is chosen for."""
        return Problem(self.kind, figures(**self.sizes))


@dataclass(frozen=True)
class TuningFile:
    """All of a file.

    Attributes:
        schema: ``major.minor`` of this description.
        code: What the choices are for.
        machine: Name of the processor or the GPU that measured.
        threads: How many threads kernels on the processor could use.
        kernels: The kernels, sorted.
    """

    schema: str
    code: Code
    machine: str
    threads: int
    kernels: tuple[Entry, ...] = ()

    def tuning(self) -> Tuning:
        """The choices."""
        return Tuning(tuple((one.problem, figures(**one.choice)) for one in self.kernels))

    def extended(self, measured: Iterable[Measured], machine: str, threads: int) -> TuningFile:
        """The file with more kernels, which were measured on a machine with so many threads."""
        entries = (*self.kernels, *map(_entry, measured))
        order = sorted(entries, key=lambda one: (one.kind, one.problem.sizes))
        return TuningFile(self.schema, self.code, machine, threads, tuple(order))


def _entry(measured: Measured) -> Entry:
    times = {
        "least": measured.times.least,
        "median": measured.times.median,
        "least_by_estimate": measured.first.least,
        "median_by_estimate": measured.first.median,
    }
    return Entry(
        measured.problem.kind,
        dict(measured.problem.sizes),
        dict(measured.choice),
        measured.candidates,
        {name: round(seconds * 1e6, 2) for name, seconds in times.items()},
    )


def code_for(device: Device) -> Code:
    """What code for a device is."""
    needs = find_target(device.kind).compatibility(device.specification)
    versions = hybridc.__version__, version("apache-tvm")
    return Code(*versions, device.kind, needs.built_for, needs.architecture, needs.cpu_flags)


def to_json(file: TuningFile) -> str:
    """The file's text."""
    return json.dumps(dataclasses.asdict(file), indent=1, ensure_ascii=False) + "\n"


def read_file(path: Path) -> TuningFile:
    """A tuning file.

    Raises:
        UsageError: It cannot be read, is damaged, or of a newer schema.
    """
    try:
        data = load_json(path.read_text("utf-8"), str(path))
        if str(data.get("schema", "")).partition(".")[0] != SCHEMA.partition(".")[0]:
            raise ValueError(f"its schema is {data.get('schema')!r}, and this reads {SCHEMA}")
        found: TuningFile = build_record(TuningFile, data, "tuning")
        if len({one.problem for one in found.kernels}) < len(found.kernels):
            raise ValueError("a kernel occurs twice")
    except OSError as error:
        raise UsageError(f"cannot read the tuning: {error}") from error
    except (ValueError, TypeError, KeyError) as error:
        raise UsageError(f"{path} is no tuning file, or damaged: {error}") from error
    return found


def check_code(file: TuningFile, path: Path, code: Code) -> None:
    """Refuse a file whose choices are for other code.

    Raises:
        UsageError: It says what differs.
    """
    for field in dataclasses.fields(Code):
        theirs, ours = getattr(file.code, field.name), getattr(code, field.name)
        if theirs != ours:
            name = field.name.replace("_", " ")
            raise UsageError(
                f"{path} was measured for {name} {_text(theirs)} and this compile is for "
                f"{_text(ours)}; name another --tuning file, or make one with --tune"
            )


def _text(value: str | tuple[str, ...]) -> str:
    return value if isinstance(value, str) else " ".join(value)
