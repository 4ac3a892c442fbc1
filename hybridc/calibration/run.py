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
from hybridc.bundle.manifest import DeviceSpec, Manifest, PartSpec
from hybridc.bundle.read import Bundle, open_bundle
from hybridc.calibration.handoffs import Measured, complete
from hybridc.calibration.kernel import ReadyKernel, Steps, ready
from hybridc.calibration.machine import SCHEMA, Machine, MachineDevice
from hybridc.calibration.passing import SIZES, End, Passing, Whole, placed, whole_of
from hybridc.calibration.profile import Copies, Kernels, figure_of, make_profile
from hybridc.calibration.record import (
    BANDWIDTH,
    CALIBRATION,
    CALL,
    GROUP,
    LAUNCH,
    WHOLE,
    Calibration,
    Code,
    Kernel,
    from_json,
)
from hybridc.calibration.timing import Clock, Timing, measure
from hybridc.calibration.wholes import Row, correct
from hybridc.cost_models.device import DeviceProfile
from hybridc.cost_models.measured import Code as MeasuredCode
from hybridc.cost_models.measured import Measurement
from hybridc.errors import BundleError, UsageError
from hybridc.progress import Progress
from hybridc.runtime.cuda import load_runtime_library
from hybridc.runtime.library import kind_served, load_runtime
from hybridc.runtime.machine import why_not
from hybridc.runtime.parts import CompiledPart, LoadedPart, load_part
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


@dataclass(frozen=True)
class _Session:
    """A calibration bundle, opened, and how to measure it."""

    bundle: Bundle
    calibration: Calibration
    weights: Mapping[str, Any]
    limit: float
    progress: Progress
    clock: Clock

    def measure(self, run: Callable[[int], None]) -> Timing:
        """Time one of many runs."""
        return measure(run, self.limit, self.clock)

    @property
    def manifest(self) -> Manifest:
        """The bundle's description."""
        return self.bundle.manifest

    def part(self, name: str) -> PartSpec:
        """The description of a part."""
        return next(part for part in self.manifest.parts if part.name == name)


def run_calibration(
    path: Any,
    limit: float = DEFAULT_SECONDS,
    progress: Progress = lambda _line: None,
    clock: Clock = time.perf_counter,
) -> Machine:
    """Measure all devices of a calibration bundle that this machine has.

    Args:
        path: The bundle.
        limit: Seconds for each kernel.
        progress: Called with a line before each kernel.
        clock: Seconds that count: those that pass, or those that the process computes. The latter
            are the same on a machine that others use too, for CPU devices of one core each.

    Raises:
        UsageError: It is no calibration bundle, or this machine has none of its devices.
        BundleError: It is damaged.
    """
    session = _open(path, limit, progress, clock)
    notes: list[str] = []
    shares = cores_of(session.manifest.devices, available_cores())
    passing = Passing(session.manifest, limit, clock)
    found = _devices_here(session, notes)
    if not found:
        raise UsageError(f"this machine has none of the bundle's devices: {'; '.join(notes)}")
    results: dict[str, _Result] = {}
    with ExitStack() as stack:
        wholes = {spec.name: _wholes(session, spec, code, stack) for spec, code in found}
        for spec, code in found:
            cores = shares.get(spec.name, available_cores())
            _alone(_time_wholes, session, wholes, passing, notes)
            result = _alone(_measure_device, session, spec, code, cores, passing.run, notes)
            results[spec.name] = result
        _alone(_time_wholes, session, wholes, passing, notes)
        progress("between devices")
        measured = {name: result.measured for name, result in results.items()}
        devices = _alone(complete, measured, passing, notes.append)
        _alone(_time_wholes, session, wholes, passing, notes)
    made = {
        name: _in_place(device, results[name], wholes[name], session, passing.run)
        for name, device in devices.items()
    }
    return Machine(SCHEMA, hybridc.__version__, made, tuple(notes))


def _devices_here(session: _Session, notes: list[str]) -> list[tuple[DeviceSpec, Code]]:
    """The bundle's devices that this machine has, made ready."""
    found = []
    for code in session.calibration.codes:
        for name in code.devices:
            spec = session.manifest.device(name)
            reason = why_not(spec)
            if reason is not None:
                notes.append(f"{name}: {reason}")
                continue
            _prepare(session, spec)
            found.append((spec, code))
    return found


def _alone(measuring: Callable[..., _Found], *arguments: Any) -> _Found:
    """Measure in a thread of its own, whose cores may be set."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(measuring, *arguments).result()


def _open(path: Any, limit: float, progress: Progress, clock: Clock) -> _Session:
    bundle = open_bundle(path)
    if CALIBRATION not in {file.path for file in bundle.manifest.files}:
        raise UsageError(f"{path} is no calibration bundle; make one with hybridc calibrate build")
    calibration = from_json(bytes(bundle.read(CALIBRATION)), f"{path}: {CALIBRATION}")
    names = {part.name for part in bundle.manifest.parts}
    if not names >= {kernel.part for kernel in calibration.kernels}:
        raise BundleError(f"{path}: {CALIBRATION} names parts that the bundle does not have")
    arrays = bundle.tensors(bundle.manifest.weights)
    weights = {name: to_tensor(array) for name, array in arrays.items()}
    return _Session(bundle, calibration, weights, limit, progress, clock)


def _prepare(session: _Session, spec: DeviceSpec) -> None:
    for library in spec.libraries:
        load_runtime_library(library)
    if spec.architecture:
        load_runtime(session.bundle, loadable(session.manifest, spec.architecture))


def loadable(manifest: Manifest, architecture: str) -> list[str]:
    """The runtime's libraries, without those for kinds of devices that this machine lacks."""
    here = {device.kind for device in manifest.devices if why_not(device) is None}
    lacking = {device.kind for device in manifest.devices} - here
    return [name for name in manifest.runtime[architecture] if kind_served(name) not in lacking]


def _measure_device(
    session: _Session,
    spec: DeviceSpec,
    code: Code,
    cores: Cores,
    run: Timing,
    notes: list[str],
) -> _Result:
    if spec.architecture:
        use_threads(len(cores), cores)
    number = session.calibration.codes.index(code)
    own = [
        kernel
        for kernel in session.calibration.kernels
        if kernel.code == number and kernel.purpose != WHOLE
    ]
    timed: list[_Timed] = []
    for index, kernel in enumerate(own):
        session.progress(f"{spec.name}: kernel {index + 1} of {len(own)}")
        try:
            timed.append(_time(session, spec, kernel, len(cores)))
        except Exception as error:  # a kernel that does not run is left out, not the rest
            notes.append(f"{spec.name}: {kernel.part}: {_first_line(error)}")
    place = next((one.place for one in timed), HOST)
    kernels = _without_calls(timed, run)
    copies = _copies(place, session) if place != HOST else None
    profile, figures = make_profile(spec, cores, kernels, copies)
    end = _end(spec, profile, timed, kernels)
    device = MachineDevice(code.kind, code.specification, cores, profile, figures, ())
    return _Result(Measured(device, end, _layout_per_byte(timed)), kernels.own)


@dataclass(frozen=True)
class _Result:
    """What was measured on a device.

    Attributes:
        measured: The device, without times of kernels.
        own: Kernels with their times alone.
    """

    measured: Measured
    own: Sequence[Row]


def _wholes(session: _Session, spec: DeviceSpec, code: Code, stack: ExitStack) -> list[Whole]:
    """The wholes of a device, loaded until the stack is left."""
    number = session.calibration.codes.index(code)
    found = []
    for kernel in session.calibration.kernels:
        if kernel.code != number or kernel.purpose != WHOLE:
            continue
        part = _load_part(session, kernel, 1)
        if isinstance(part, CompiledPart):
            found.append(whole_of(session.manifest, kernel, placed(part, spec.name)))
            stack.enter_context(found[-1].model)
    return found


def _time_wholes(
    session: _Session, wholes: Mapping[str, Sequence[Whole]], passing: Passing, notes: list[str]
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
    device: MachineDevice,
    result: _Result,
    wholes: Sequence[Whole],
    session: _Session,
    run: Timing,
) -> MachineDevice:
    """A device with the times of its kernels as in their models, beside what a run takes."""
    timed = [(one.kernel, one.time(device.profile, run)) for one in wholes if one.times]
    corrected, ratios = correct(result.own, timed)
    made_by = MeasuredCode(device.kind, device.specification, session.calibration.versions)
    measurements = tuple(
        Measurement(kernel.work, made_by, time.seconds, time.spread, time.runs)
        for kernel, time in corrected
    )
    figure = figure_of("run_seconds", run)
    kept = [figure if one.name == figure.name else one for one in device.figures]
    profile = dataclasses.replace(device.profile, run_seconds=run.seconds)
    return dataclasses.replace(
        device, profile=profile, figures=(*kept, *ratios), measurements=measurements
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


def _time(session: _Session, spec: DeviceSpec, kernel: Kernel, threads: int) -> _Timed:
    loaded = _load(session, kernel, threads)
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


def _load(session: _Session, kernel: Kernel, threads: int) -> ReadyKernel:
    part = _load_part(session, kernel, threads)
    return ready(session.manifest, part.spec, part, kernel.footprint)


def _load_part(session: _Session, kernel: Kernel, threads: int) -> LoadedPart:
    spec, read = session.part(kernel.part), session.bundle.read_code
    return load_part(session.manifest, spec, read, session.weights, threads)


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


def _copies(place: Place, session: _Session) -> Copies:
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
