"""The llvm target: CPUs, by way of LLVM."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from hybridc.targets.protocol import Artifact, Compatibility, Device, Found, Section
from hybridc.targets.tuning import UNTUNED, TunableKernel, Tuning

if TYPE_CHECKING:
    from hybridc.lowering.lower import Lowered


@dataclass(frozen=True)
class LlvmTarget:
    """CPUs of any architecture that LLVM makes code for.

    Attributes:
        kind: Name on the command line.
        cache: Folder of kernels that were built before; without it all are built.
        tuning: Choices of the schedules that were measured.
        strict_math: Whether kernels may change sums in nothing but their order.
    """

    kind: str = "llvm"
    cache: Path | None = None
    tuning: Tuning = UNTUNED
    strict_math: bool = False

    def with_cache(self, folder: Path) -> LlvmTarget:
        """The same, with a folder of kernels."""
        return replace(self, cache=folder)

    def with_tuning(self, tuning: Tuning) -> LlvmTarget:
        """The same, with choices that were measured."""
        return replace(self, tuning=tuning)

    def with_strict_math(self) -> LlvmTarget:
        """The same, without Winograd's convolutions and with types of 16 bits as they are."""
        return replace(self, strict_math=True)

    def check(self, specification: str) -> None:
        """Refuse a processor that LLVM does not know."""
        from hybridc.targets.llvm.cpu import parse_cpu

        parse_cpu(specification)

    def lower(self, section: Section, specification: str) -> Lowered:
        """A section as a Relax module.

        CPUs compute with float32: types of 16 bits are widened to it, unless math is strict.
        """
        from hybridc.lowering.lower import lower
        from hybridc.lowering.ops import default_table

        return lower(section, default_table(), widens=not self.strict_math)

    def build(self, lowered: Lowered, specification: str) -> Artifact:
        """Compile a Relax module to a shared library."""
        from hybridc.targets.llvm.build import build
        from hybridc.targets.llvm.cpu import parse_cpu
        from hybridc.targets.llvm.object_cache import ObjectCache

        cache = None if self.cache is None else ObjectCache(self.cache)
        cpu = replace(parse_cpu(specification), tuning=self.tuning, strict_math=self.strict_math)
        return build(lowered.module, lowered.weights, cpu, cache)

    def kernels(self, lowered: Lowered, device: Device) -> list[TunableKernel]:
        """The kernels of a Relax module for which there is something to choose."""
        from hybridc.targets.llvm.build import make_kernels
        from hybridc.targets.llvm.cpu import parse_cpu
        from hybridc.targets.llvm.tunable import tunable_kernels

        cpu = replace(parse_cpu(device.specification), strict_math=self.strict_math)
        module, weights = make_kernels(lowered.module, lowered.weights, cpu)
        return tunable_kernels(module, sum(array.nbytes for array in weights.values()), cpu)

    def machine(self, device: Device) -> str:
        """Name of this machine's CPU."""
        (cpu,) = self.probe()
        return cpu.details["cpu"]

    def runtime_library(self, stem: str, specification: str) -> bytes:
        """A library of TVM's runtime for the CPU's architecture."""
        from hybridc.targets.llvm.cpu import parse_cpu
        from hybridc.targets.llvm.runtime_library import runtime_library

        return runtime_library(stem, parse_cpu(specification).architecture)

    def compatibility(self, specification: str) -> Compatibility:
        """The architecture and instruction-set flags that the code needs."""
        from hybridc.targets.llvm.cpu import parse_cpu

        cpu = parse_cpu(specification)
        return Compatibility(cpu.name, cpu.architecture, cpu.kernel_flags)

    def probe(self) -> list[Found]:
        """This machine's CPU."""
        from hybridc.targets.llvm.probe import probe

        return probe()


TARGET = LlvmTarget()
