"""What ``--tuning`` and ``--tune`` ask of a compile: read a file, measure more, build with it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hybridc.bundle.files import write_text
from hybridc.errors import DeviceError, UsageError
from hybridc.packaging import device_spec
from hybridc.placement.fallback import Placed
from hybridc.progress import Progress
from hybridc.runtime.machine import why_not
from hybridc.runtime.threads import available_threads, use_threads
from hybridc.targets.protocol import Device, Target, TunableTarget
from hybridc.targets.registry import find_target
from hybridc.targets.tuning import TunableKernel, each_problem_once
from hybridc.tuning.file import SCHEMA, Code, TuningFile, check_code, code_for, read_file, to_json
from hybridc.tuning.measure import Measured, measure_kernels


@dataclass(frozen=True)
class TuningJob:
    """Choices to build with, and how long to measure more.

    Attributes:
        path: The file.
        file: What it holds, or will hold.
        seconds: Time to measure kernels that are not in the file; ``None`` to measure none.
    """

    path: Path
    file: TuningFile
    seconds: float | None = None


def tuned_target(target: Target, device: Device, job: TuningJob | None) -> Target:
    """A device's target with a job's choices, if they are for it."""
    if job is None or not isinstance(target, TunableTarget) or code_for(device) != job.file.code:
        return target
    return target.with_tuning(job.file.tuning())


def open_tuning(path: Path, seconds: float | None, devices: Sequence[Device]) -> TuningJob:
    """Read a tuning file, or begin one where ``seconds`` says that kernels are to be measured.

    One that is begun is for the first of the devices that this machine can measure.

    Raises:
        UsageError: The file is damaged or for something else, or the devices cannot be tuned.
        DeviceError: Kernels are to be measured that this machine cannot run.
    """
    codes = _codes(devices)
    if seconds is None or path.exists():
        file = read_file(path)
        if file.code not in codes:
            check_code(file, path, next(iter(codes)))
        if seconds is not None:
            _check_machine(file, path, codes[file.code])
        return TuningJob(path, file, seconds)
    here = (code for code, device in codes.items() if _why_not(device) is None)
    code = next(here, next(iter(codes)))
    _check_measurable(codes[code])
    return TuningJob(path, TuningFile(SCHEMA, code, "", 0), seconds)


def _codes(devices: Sequence[Device]) -> dict[Code, Device]:
    """What is built by targets that can be tuned, with a device each.

    Raises:
        UsageError: Nothing is.
    """
    tunable = [d for d in devices if isinstance(find_target(d.kind), TunableTarget)]
    if not tunable:
        kinds = ", ".join(dict.fromkeys(device.kind for device in devices))
        raise UsageError(
            f"--tuning and --tune are for the targets llvm, cuda and opencl, and not for {kinds}"
        )
    codes: dict[Code, Device] = {}
    for device in tunable:
        codes.setdefault(code_for(device), device)
    return codes


def _why_not(device: Device) -> str | None:
    """Why this machine cannot run code for a device; ``None`` if it can."""
    return why_not(device_spec(device, ()))


def _check_measurable(device: Device) -> None:
    """Refuse a device whose code this machine cannot run.

    Raises:
        DeviceError: It says why not.
    """
    reason = _why_not(device)
    if reason is not None:
        raise DeviceError(
            f"--tune cannot measure kernels for {device.name} here: {reason}; tune on a machine "
            "that can run them, and give the file with --tuning"
        )


def _check_machine(file: TuningFile, path: Path, device: Device) -> None:
    """Refuse to measure more for a file on a machine that has another device than it is of.

    Raises:
        UsageError: It has.
        DeviceError: This machine has none.
    """
    _check_measurable(device)
    machine = _tunable(device).machine(device)
    if file.kernels and machine != file.machine:
        raise UsageError(
            f"{path} was measured on {file.machine} and this machine has {machine}; name another "
            "--tuning file, or leave out --tune to compile with that one"
        )


def _tunable(device: Device) -> TunableTarget:
    target = find_target(device.kind)
    assert isinstance(target, TunableTarget)
    return target


def tune(
    job: TuningJob,
    placed: Placed,
    target_of: Callable[[Device], Target],
    progress: Progress = lambda _line: None,
) -> tuple[TuningJob, list[str]]:
    """Measure kernels of a placed model, as far as there is time, and write the file.

    Args:
        job: What was asked for.
        placed: The model.
        target_of: The target that builds for a device.
        progress: Takes a line.

    Returns:
        The job with the choices, and notes on what was measured.
    """
    if job.seconds is None:
        return job, _origin(job, _devices(job, placed))
    known = {entry.problem for entry in job.file.kernels}
    devices = _devices(job, placed)
    if not devices:
        return job, ["no kernel was measured: no part of the plan is on the device to tune for"]
    found = each_problem_once(_kernels(job, placed, target_of))
    kernels = [one for one in found if one.problem not in known]
    progress(f"[4/6] measuring {len(kernels)} kernels, for {job.seconds:g} s at most")
    use_threads(available_threads())
    measured = list(measure_kernels(kernels, job.seconds))
    device = next(iter(devices))
    machine = _tunable(device).machine(device)
    file = job.file.extended(measured, machine, available_threads())
    write_text(job.path, to_json(file), "the tuning")
    return dataclasses.replace(job, file=file, seconds=None), _notes(measured, len(kernels))


def _devices(job: TuningJob, placed: Placed) -> dict[Device, None]:
    """The devices with parts that the choices are for."""
    devices = dict.fromkeys(part.device for part in placed.plan.parts)
    return {device: None for device in devices if code_for(device) == job.file.code}


def _origin(job: TuningJob, devices: Iterable[Device]) -> list[str]:
    """A note for each device that gets choices, which may have been measured on another."""
    if not job.file.kernels:
        return []
    return [f"{one.name} gets choices measured on {job.file.machine}" for one in devices]


def _kernels(
    job: TuningJob, placed: Placed, target_of: Callable[[Device], Target]
) -> Iterator[TunableKernel]:
    """The kernels of the parts that the choices are for."""
    for part, lowered in zip(placed.plan.parts, placed.lowered, strict=True):
        target = target_of(part.device)
        if isinstance(target, TunableTarget) and code_for(part.device) == job.file.code:
            yield from target.kernels(lowered, part.device)


def _notes(measured: Sequence[Measured], count: int) -> list[str]:
    better = sum(one.times != one.first for one in measured)
    notes = [f"{len(measured)} kernels were measured, and {better} of them got another choice"]
    if len(measured) < count:
        left = count - len(measured)
        notes.append(f"{left} kernels were not: time was up; the same command again goes on")
    return notes
