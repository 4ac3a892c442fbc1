"""The opencl target: GPUs, CPUs and accelerators with an OpenCL 1.2 driver."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hybridc.targets.protocol import Artifact, Compatibility, Device, Found, Section
from hybridc.targets.tuning import UNTUNED, TunableKernel, Tuning

if TYPE_CHECKING:
    from hybridc.lowering.lower import Lowered


@dataclass(frozen=True)
class OpenclTarget:
    """Devices with an OpenCL driver, which compiles the kernels where the bundle is loaded.

    Attributes:
        kind: Name on the command line.
        tuning: Choices of the schedules that were measured.
        strict_math: Whether kernels may change sums in nothing but their order.
    """

    kind: str = "opencl"
    tuning: Tuning = UNTUNED
    strict_math: bool = False

    def with_tuning(self, tuning: Tuning) -> OpenclTarget:
        """The same, with choices that were measured."""
        return replace(self, tuning=tuning)

    def with_strict_math(self) -> OpenclTarget:
        """The same, whose kernels change sums in nothing but their order."""
        return replace(self, strict_math=True)

    def check(self, specification: str) -> None:
        """Refuse a host that LLVM does not know."""
        from hybridc.targets.opencl.devices import parse_devices

        parse_devices(specification)

    def lower(self, section: Section, specification: str) -> Lowered:
        """A section as a Relax module whose kernels the devices can run."""
        from hybridc.targets.gpu.lower import lower_for_gpu
        from hybridc.targets.opencl.devices import parse_devices

        return lower_for_gpu(section, parse_devices(specification).limits)

    def build(self, lowered: Lowered, specification: str) -> Artifact:
        """Compile a Relax module to a shared library with OpenCL C in it."""
        from hybridc.targets.opencl.build import build
        from hybridc.targets.opencl.devices import parse_devices

        devices = replace(
            parse_devices(specification), tuning=self.tuning, strict_math=self.strict_math
        )
        return build(lowered.module, lowered.weights, devices)

    def kernels(self, lowered: Lowered, device: Device) -> list[TunableKernel]:
        """The kernels of a Relax module for which there is something to choose."""
        from hybridc.targets.opencl.measure import tunable

        return tunable(lowered.module, lowered.weights, device, self.strict_math)

    def machine(self, device: Device) -> str:
        """Name of the device of this machine that measures."""
        from hybridc.targets.opencl.measure import measuring_device

        return measuring_device(device).name

    def runtime_library(self, stem: str, specification: str) -> bytes:
        """TVM's runtime, or the plug-in, for the host's architecture."""
        from hybridc.targets.llvm.runtime_library import runtime_library
        from hybridc.targets.opencl.devices import parse_devices

        return runtime_library(stem, parse_devices(specification).host.architecture)

    def compatibility(self, specification: str) -> Compatibility:
        """The host that the calling code needs, and what a device must offer."""
        from hybridc.targets.opencl.devices import parse_devices

        devices = parse_devices(specification)
        return Compatibility(
            devices.name,
            devices.host.architecture,
            devices.host.kernel_flags,
            device_code=devices.device_code,
        )

    def probe(self) -> list[Found]:
        """The devices that the installed drivers show, and what building for them needs."""
        from hybridc.targets.opencl.probe import probe

        return probe()


TARGET = OpenclTarget()
