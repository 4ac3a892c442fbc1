"""Measure the kernels of a calibration bundle on this machine, with the loader alone.

    call      a part that computes nothing: what every call of a part takes
    launch    one of a chain of kernels that compute next to nothing, less a call
    kernel    a group, less a call and changes of layout at its borders, and no less than a launch
    whole     all of a model that runs in one piece: what its groups take more or less there; by
              runs of the loader, between the measurements of the devices
    copy      tensors of several sizes to a device's memory and back: latency and bandwidth
    handoff   from each device to each other; see :mod:`hybridc.calibration.handoffs`

A CPU under several names is measured on each name's own cores, as the loader would run it.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

import hybridc
from hybridc.bundle.manifest import DeviceSpec
from hybridc.calibration.handoffs import Measured, complete
from hybridc.calibration.kernel import Steps
from hybridc.calibration.known import KnownDevice, KnownMachine
from hybridc.calibration.machine import SCHEMA, Figure, Machine, MachineDevice
from hybridc.calibration.passing import SIZES, End, Passing, Whole, placed, whole_of
from hybridc.calibration.profile import Copies, Kernels, figure_of, make_profile
from hybridc.calibration.record import BANDWIDTH, CALL, GROUP, LAUNCH, WHOLE, Code, Kernel
from hybridc.calibration.session import Session, devices_here, open_session
from hybridc.calibration.timing import Clock, Timing
from hybridc.calibration.wholes import Row, correct
from hybridc.cost_models.device import DeviceProfile
from hybridc.cost_models.measured import Code as MeasuredCode
from hybridc.cost_models.measured import Measurement
from hybridc.progress import Progress
from hybridc.runtime.parts import CompiledPart
from hybridc.runtime.tensors import HOST, Place, copy, move, synchronize, to_tensor
from hybridc.runtime.threads import Cores, available_cores, use_threads
from hybridc.runtime.workers import cores_of

DEFAULT_SECONDS = 0.5
"""Time after which a kernel whose figure does not rest is left as it is."""

_COPIES = (2**12, 2**16, 2**20, 2**24, 2**26)
"""Bytes of the copies that are timed."""


_MOST_LAYOUT = 0.5
"""Share of changes of layout in a time above which the rest is timed by itself."""

_Found = TypeVar("_Found")


def run_calibration(
    path: Any,
    limit: float = DEFAULT_SECONDS,
    progress: Progress = lambda _line: None,
    clock: Clock = time.perf_counter,
    known: KnownMachine | None = None,
) -> Machine:
    """Measure all devices of a calibration bundle that this machine has.

    Args:
        path: The bundle.
        limit: Seconds for each kernel.
        progress: Called with a line before each kernel.
        clock: Seconds that count: those that pass, or those that the process computes. The latter
            are the same on a machine that others use too, for CPU devices of one core each.
        known: What was measured before. Then the devices have its profiles, and only what it lacks
            is measured: see :meth:`KnownMachine.with_more`.

    Raises:
        UsageError: It is no calibration bundle, this machine has none of its devices, or one of
            them is not known.
        BundleError: It is damaged.
    """
    session = open_session(path, limit, progress, clock)
    notes: list[str] = []
    found = _devices(session, known, notes)
    passing = Passing(session.manifest, limit, clock)
    with ExitStack() as stack:
        wholes = {one.spec.name: _wholes(session, one, stack) for one in found}
        results = _measure_all(session, found, wholes, passing, notes)
    made = {
        one.spec.name: _in_place(
            session, one, results[one.spec.name], wholes[one.spec.name], passing.run
        )
        for one in found
    }
    return Machine(SCHEMA, hybridc.__version__, made, tuple(notes))


def _measure_all(
    session: Session,
    devices: Sequence[_Device],
    wholes: Mapping[str, Sequence[Whole]],
    passing: Passing,
    notes: list[str],
) -> dict[str, _Result]:
    """Measure devices one by one and what is between them, the wholes before, between and after."""
    results: dict[str, _Result] = {}
    for one in devices:
        _alone(_time_wholes, session, wholes, passing, notes)
        measure = _measure_device if one.known is None else _measure_more
        results[one.spec.name] = _alone(measure, session, one, passing.run, notes)
    _alone(_time_wholes, session, wholes, passing, notes)
    session.progress("between devices")
    ends = {name: result.measured for name, result in results.items() if result.measured}
    completed = _alone(complete, ends, passing, notes.append)
    _alone(_time_wholes, session, wholes, passing, notes)
    return {
        name: dataclasses.replace(result, device=completed.get(name, result.device))
        for name, result in results.items()
    }


@dataclass(frozen=True)
class _Device:
    """A device of the bundle that this machine has.

    Attributes:
        spec: Its description in the bundle.
        code: The target whose kernels it runs.
        cores: Cores that it has, for a CPU.
        known: What was measured before.
    """

    spec: DeviceSpec
    code: Code
    cores: Cores
    known: KnownDevice | None


def _devices(session: Session, known: KnownMachine | None, notes: list[str]) -> list[_Device]:
    """The bundle's devices that this machine has, with what is known about them."""
    shares = cores_of(session.manifest.devices, available_cores())
    found = []
    for spec, code in devices_here(session, notes):
        cores = shares.get(spec.name, available_cores())
        before = known.device(spec.name, cores, _made_by(session, code)) if known else None
        found.append(_Device(spec, code, cores, before))
    return found


def _made_by(session: Session, code: Code) -> MeasuredCode:
    return MeasuredCode(code.kind, code.specification, session.calibration.versions)


def _alone(measuring: Callable[..., _Found], *arguments: Any) -> _Found:
    """Measure in a thread of its own, whose cores may be set."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(measuring, *arguments).result()


@dataclass(frozen=True)
class _Result:
    """What was measured on a device.

    Attributes:
        device: The device, without times of kernels.
        own: Kernels with their times alone.
        measured: The same with what it passes tensors on with, unless handoffs are known.
    """

    device: MachineDevice
    own: Sequence[Row]
    measured: Measured | None = None


def _measure_device(session: Session, one: _Device, run: Timing, notes: list[str]) -> _Result:
    """Measure all kernels of a device, and its copies."""
    wanted = [kernel for kernel in session.kernels(one.code) if kernel.purpose != WHOLE]
    timed = _time_all(session, one, wanted, notes)
    place = next((kernel.place for kernel in timed), HOST)
    kernels = _without_calls(timed, run)
    copies = _copies(place, session) if place != HOST else None
    profile, figures = make_profile(one.spec, one.cores, kernels, copies)
    end = _end(one.spec, profile, timed, kernels)
    device = _machine_device(one, profile, figures)
    return _Result(device, kernels.own, Measured(device, end, _layout_per_byte(timed)))


def _measure_more(session: Session, one: _Device, run: Timing, notes: list[str]) -> _Result:
    """Measure the groups that are not known of a device that is."""
    assert one.known is not None
    wanted = [
        kernel
        for kernel in session.kernels(one.code)
        if kernel.purpose in (CALL, LAUNCH) or one.known.lacks(kernel)
    ]
    kernels = _without_calls(_time_all(session, one, wanted, notes), run)
    return _Result(_machine_device(one, one.known.profile, ()), kernels.own)


def _machine_device(
    one: _Device, profile: DeviceProfile, figures: tuple[Figure, ...]
) -> MachineDevice:
    return MachineDevice(one.code.kind, one.code.specification, one.cores, profile, figures, ())


def _time_all(
    session: Session, one: _Device, kernels: Sequence[Kernel], notes: list[str]
) -> list[_Timed]:
    """Time kernels one by one; one that does not run is left out with a note."""
    if one.spec.architecture:
        use_threads(len(one.cores), one.cores)
    timed: list[_Timed] = []
    for index, kernel in enumerate(kernels):
        session.progress(f"{one.spec.name}: kernel {index + 1} of {len(kernels)}")
        try:
            timed.append(_time(session, one.spec, kernel, len(one.cores)))
        except Exception as error:  # a kernel that does not run is left out, not the rest
            notes.append(f"{one.spec.name}: {kernel.part}: {_first_line(error)}")
    return timed


def _wholes(session: Session, one: _Device, stack: ExitStack) -> list[Whole]:
    """The wholes of a device, loaded until the stack is left."""
    found = []
    for kernel in session.kernels(one.code):
        if kernel.purpose != WHOLE:
            continue
        part = session.load(kernel, 1)
        if isinstance(part, CompiledPart):
            found.append(whole_of(session.manifest, kernel, placed(part, one.spec.name)))
            stack.enter_context(found[-1].model)
    return found


def _time_wholes(
    session: Session, wholes: Mapping[str, Sequence[Whole]], passing: Passing, notes: list[str]
) -> None:
    """Time a run without work, and the wholes of all devices, once more."""
    passing.time_run()
    for name, own in wholes.items():
        for whole in own:
            session.progress(f"{name}: all of {whole.kernel.part}")
            try:
                whole.times.append(passing.time(whole.model, whole.feeds))
            except Exception as error:  # a whole that does not run is left out, not the rest
                note = f"{name}: {whole.kernel.part}: {_first_line(error)}"
                if note not in notes:
                    notes.append(note)


def _in_place(
    session: Session, one: _Device, result: _Result, wholes: Sequence[Whole], run: Timing
) -> MachineDevice:
    """A device with the times of its kernels as in their models, beside what a run takes."""
    device, known = result.device, one.known
    timed = [(whole.kernel, whole.time(device.profile, run)) for whole in wholes if whole.times]
    corrected, ratios = correct(result.own, timed, known.seconds if known else {})
    made_by = _made_by(session, one.code)
    measurements = tuple(
        Measurement(kernel.work, made_by, time.seconds, time.spread, time.runs)
        for kernel, time in corrected
    )
    figures, profile = device.figures, device.profile
    if known is None:
        figure = figure_of("run_seconds", run)
        figures = tuple(figure if one.name == figure.name else one for one in figures)
        profile = dataclasses.replace(profile, run_seconds=run.seconds)
    return dataclasses.replace(
        device, profile=profile, figures=(*figures, *ratios), measurements=measurements
    )


@dataclass(frozen=True)
class _Timed:
    """A kernel with its time.

    Attributes:
        kernel: What it is.
        place: Where it runs.
        time: Of one run, the device being waited for at the end of many.
        steps: Where that goes, if it changes layouts at its borders.
        part: It itself, if it may pass tensors on in other measurements.
    """

    kernel: Kernel
    place: Place
    time: Timing
    steps: Steps | None
    part: CompiledPart | None = None

    @property
    def layout(self) -> float:
        """Seconds that changes of layout at its borders take."""
        return self.steps.layout if self.steps else 0.0

    def alone(self, call: float, least: float) -> Timing:
        """Its time without a call, and without changes of layout at its borders."""
        if self.steps and self.steps.layout > _MOST_LAYOUT * self.time.seconds:
            return self.steps.own
        return self.time.without(call + self.layout, least)


def _time(session: Session, spec: DeviceSpec, kernel: Kernel, threads: int) -> _Timed:
    loaded = session.ready(kernel, threads)
    time, steps, part = session.measure(loaded.run), loaded.step_times(session.clock), None
    passes_on = kernel.purpose == BANDWIDTH and kernel.work.read_bytes in SIZES
    if passes_on and isinstance(loaded.part, CompiledPart):
        part = loaded.part
    return _Timed(kernel, loaded.place, time, steps, part)


def _end(
    spec: DeviceSpec, profile: DeviceProfile, timed: Sequence[_Timed], kernels: Kernels
) -> End:
    """The device with the kernels that pass tensors on."""
    known = {kernel.part: time.seconds for kernel, time in kernels.own}
    kept = {one.kernel.work.read_bytes: one for one in timed if one.part is not None}
    parts = {count: placed(one.part, spec.name) for count, one in kept.items() if one.part}
    return End(spec.name, profile, parts, {n: known[one.kernel.part] for n, one in kept.items()})


def _without_calls(timed: Sequence[_Timed], run: Timing) -> Kernels:
    """Times of kernels by themselves, and of what comes with each call."""
    call = next((one.time for one in timed if one.kernel.purpose == CALL), None)
    empty = call.seconds if call else 0.0
    launch = next(
        (
            one.time.without(empty).share(len(one.kernel.work.nodes))
            for one in timed
            if one.kernel.purpose == LAUNCH
        ),
        None,
    )
    least = launch.seconds if launch else 1e-9
    own = [
        (one.kernel, one.alone(empty, least))
        for one in timed
        if one.kernel.purpose not in (CALL, LAUNCH)
    ]
    return Kernels(call, launch, own, run)


def _layout_per_byte(timed: Sequence[_Timed]) -> float:
    """What changing the layout of a tensor costs on average, those without one included."""
    works = [(one.kernel.work, one.layout) for one in timed if one.kernel.purpose == GROUP]
    count = sum(work.read_bytes + work.written_bytes for work, _ in works)
    return sum(layout for _, layout in works) / count if count else 0.0


def _copies(place: Place, session: Session) -> Copies:
    """Times of copies to a device and back, by size."""
    there, back = {}, {}
    for count in _COPIES:
        host, device = _pair(count, place)
        there[count] = session.measure(_copier(host, device, place))
        back[count] = session.measure(_copier(device, host, place))
    return Copies(there, back)


def _pair(count: int, place: Place) -> tuple[Any, Any]:
    """Tensors of so many bytes, on the host and at a place."""
    host = to_tensor(np.zeros(count, np.uint8))
    return host, move(host, place)


def _copier(source: Any, destination: Any, place: Place) -> Callable[[int], None]:
    def run(count: int) -> None:
        for _ in range(count):
            copy(source, destination)
            synchronize(place)

    return run


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
