"""The cuda target: NVIDIA GPUs, with their code compiled on the machine that compiles the model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hybridc.targets.protocol import Artifact, Compatibility, Device, Found, Section
from hybridc.targets.tuning import UNTUNED, TunableKernel, Tuning

if TYPE_CHECKING:
    from hybridc.lowering.lower import Lowered


@dataclass(frozen=True)
class CudaTarget:
    """NVIDIA GPUs of one or several architectures.

    Attributes:
        kind: Name on the command line.
        tuning: Choices of the schedules that were measured.
        strict_math: Whether kernels may change sums in nothing but their order.
    """

    kind: str = "cuda"
    tuning: Tuning = UNTUNED
    strict_math: bool = False

    def with_tuning(self, tuning: Tuning) -> CudaTarget:
        """The same, with choices that were measured."""
        return replace(self, tuning=tuning)

    def with_strict_math(self) -> CudaTarget:
        """The same, whose kernels change sums in nothing but their order."""
        return replace(self, strict_math=True)

    def check(self, specification: str) -> None:
        """Refuse an architecture that is not written as nvcc writes it."""
        from hybridc.targets.cuda.architectures import parse_gpu

        parse_gpu(specification)

    def lower(self, section: Section, specification: str) -> Lowered:
        """A section as a Relax module whose kernels a GPU can run."""
        from hybridc.targets.gpu.lower import lower_for_gpu

        return lower_for_gpu(section)

    def build(self, lowered: Lowered, specification: str) -> Artifact:
        """Compile a Relax module to a shared library with the device code in it."""
        from hybridc.targets.cuda.architectures import parse_gpu
        from hybridc.targets.cuda.build import build

        gpu = replace(parse_gpu(specification), tuning=self.tuning, strict_math=self.strict_math)
        return build(lowered.module, lowered.weights, gpu)

    def kernels(self, lowered: Lowered, device: Device) -> list[TunableKernel]:
        """The kernels of a Relax module for which there is something to choose."""
        from hybridc.targets.cuda.measure import tunable

        return tunable(lowered.module, lowered.weights, device, self.strict_math)

    def machine(self, device: Device) -> str:
        """Name of this machine's first GPU, which is the one that bundles run on."""
        from hybridc.runtime.cuda import devices

        return devices()[0].name

    def runtime_library(self, stem: str, specification: str) -> bytes:
        """A library of TVM's runtime for the host's architecture."""
        from hybridc.targets.cuda.architectures import parse_gpu
        from hybridc.targets.llvm.runtime_library import runtime_library

        return runtime_library(stem, parse_gpu(specification).host.architecture)

    def compatibility(self, specification: str) -> Compatibility:
        """The host that the calling code needs, and the GPUs that the kernels run on."""
        from hybridc.targets.cuda.architectures import parse_gpu
        from hybridc.targets.cuda.nvcc import find_nvcc

        gpu = parse_gpu(specification)
        code = gpu.device_code if find_nvcc() else gpu.architectures  # NVRTC makes no PTX
        return Compatibility(
            gpu.name,
            gpu.host.architecture,
            gpu.host.kernel_flags,
            device_code=code,
            libraries=(gpu.runtime_library,),
        )

    def probe(self) -> list[Found]:
        """The GPUs that the driver shows, and what building for them needs."""
        from hybridc.targets.cuda.probe import probe

        return probe()


TARGET = CudaTarget()
