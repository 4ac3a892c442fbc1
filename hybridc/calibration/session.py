"""A calibration bundle that is open on this machine: its devices and its kernels."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hybridc.bundle.manifest import DeviceSpec, Manifest
from hybridc.bundle.read import Bundle, open_bundle
from hybridc.calibration.kernel import ReadyKernel, ready
from hybridc.calibration.record import CALIBRATION, Calibration, Code, Kernel, from_json
from hybridc.calibration.timing import Clock, Timing, measure
from hybridc.errors import BundleError, UsageError
from hybridc.progress import Progress
from hybridc.runtime.cuda import load_runtime_library
from hybridc.runtime.library import kind_served, load_runtime
from hybridc.runtime.machine import why_not
from hybridc.runtime.parts import LoadedPart, load_part
from hybridc.runtime.tensors import to_tensor


@dataclass(frozen=True)
class Session:
    """A calibration bundle, opened, and how to measure it.

    Attributes:
        bundle: The bundle.
        calibration: What its parts are for.
        weights: Tensors by name.
        limit: Seconds for each kernel.
        progress: Called with a line before each kernel.
        clock: Seconds that count.
    """

    bundle: Bundle
    calibration: Calibration
    weights: Mapping[str, Any]
    limit: float
    progress: Progress
    clock: Clock

    @property
    def manifest(self) -> Manifest:
        """The bundle's description."""
        return self.bundle.manifest

    def measure(self, run: Callable[[int], None]) -> Timing:
        """Time one of many runs."""
        return measure(run, self.limit, self.clock)

    def kernels(self, code: Code) -> list[Kernel]:
        """Kernels of a target, wholes included."""
        number = self.calibration.codes.index(code)
        return [kernel for kernel in self.calibration.kernels if kernel.code == number]

    def load(self, kernel: Kernel, threads: int) -> LoadedPart:
        """The part of a kernel, for so many threads."""
        spec = next(part for part in self.manifest.parts if part.name == kernel.part)
        return load_part(self.manifest, spec, self.bundle.read_code, self.weights, threads)

    def ready(self, kernel: Kernel, threads: int) -> ReadyKernel:
        """A kernel with inputs."""
        part = self.load(kernel, threads)
        return ready(self.manifest, part.spec, part, kernel.footprint)


def open_session(path: Any, limit: float, progress: Progress, clock: Clock) -> Session:
    """Open a calibration bundle; arguments are those of the session.

    Raises:
        UsageError: It is no calibration bundle.
        BundleError: It is damaged.
    """
    bundle = open_bundle(path)
    if CALIBRATION not in {file.path for file in bundle.manifest.files}:
        raise UsageError(f"{path} is no calibration bundle; make one with hybridc calibrate build")
    calibration = from_json(bytes(bundle.read(CALIBRATION)), f"{path}: {CALIBRATION}")
    names = {part.name for part in bundle.manifest.parts}
    if not names >= {kernel.part for kernel in calibration.kernels}:
        raise BundleError(f"{path}: {CALIBRATION} names parts that the bundle does not have")
    arrays = bundle.tensors(bundle.manifest.weights)
    weights = {name: to_tensor(array) for name, array in arrays.items()}
    return Session(bundle, calibration, weights, limit, progress, clock)


def devices_here(session: Session, notes: list[str]) -> list[tuple[DeviceSpec, Code]]:
    """The bundle's devices that this machine has, made ready; notes say why others are left out.

    Raises:
        UsageError: There is none.
    """
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
    if not found:
        raise UsageError(f"this machine has none of the bundle's devices: {'; '.join(notes)}")
    return found


def _prepare(session: Session, spec: DeviceSpec) -> None:
    for library in spec.libraries:
        load_runtime_library(library)
    if spec.architecture:
        libraries = loadable(session.manifest, spec.architecture)
        load_runtime(session.manifest, session.bundle.read_code, libraries)


def loadable(manifest: Manifest, architecture: str) -> list[str]:
    """The runtime's libraries, without those for kinds of devices that this machine lacks."""
    here = {device.kind for device in manifest.devices if why_not(device) is None}
    lacking = {device.kind for device in manifest.devices} - here
    return [name for name in manifest.runtime[architecture] if kind_served(name) not in lacking]
