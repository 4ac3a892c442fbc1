"""The CPU that code is made for: what LLVM is told, and what the loading machine must have.

A specification is the part after ``llvm:`` on the command line:

    (nothing)            this machine's architecture at its portable level
                         (x86-64-v3, or armv8-a on aarch64)
    x86-64-v2 ... -v4    a level of the x86-64 psABI
    aarch64              armv8-a with NEON
    znver3, neoverse-n1  any processor that LLVM knows
    host                 exactly this machine: fast here, perhaps not loadable elsewhere

LLVM tells this machine's processor by its numbers, which a virtual machine may have changed. It
then takes it for an older one, without AMX, which is why the machine's own list is looked at, too.
"""

from __future__ import annotations

import dataclasses
import platform
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from hybridc.targets.tuning import UNTUNED, Tuning

from hybridc.errors import UsageError
from hybridc.runtime import amx
from hybridc.runtime.machine import cpu_flags

PORTABLE_LEVEL = {"x86_64": "x86-64-v3", "aarch64": "aarch64"}

KERNEL_FLAGS = {
    "x86_64": {
        "avx": "avx",
        "avx2": "avx2",
        "avx512bf16": "avx512_bf16",
        "avx512bitalg": "avx512_bitalg",
        "avx512bw": "avx512bw",
        "avx512cd": "avx512cd",
        "avx512dq": "avx512dq",
        "avx512f": "avx512f",
        "avx512fp16": "avx512_fp16",
        "avx512ifma": "avx512ifma",
        "avx512vbmi": "avx512vbmi",
        "avx512vbmi2": "avx512_vbmi2",
        "avx512vl": "avx512vl",
        "avx512vnni": "avx512_vnni",
        "avx512vpopcntdq": "avx512_vpopcntdq",
        "avxvnni": "avx_vnni",
        "amx-bf16": "amx_bf16",
        "amx-int8": "amx_int8",
        "amx-tile": "amx_tile",
        "bmi": "bmi1",
        "bmi2": "bmi2",
        "f16c": "f16c",
        "fma": "fma",
        "lzcnt": "abm",
        "movbe": "movbe",
        "popcnt": "popcnt",
        "sse3": "pni",
        "sse4.1": "sse4_1",
        "sse4.2": "sse4_2",
        "ssse3": "ssse3",
    },
    "aarch64": {
        "bf16": "bf16",
        "dotprod": "asimddp",
        "fullfp16": "asimdhp",
        "i8mm": "i8mm",
        "lse": "atomics",
        "neon": "asimd",
        "sve": "sve",
        "sve2": "sve2",
    },
}
"""LLVM's name of an instruction-set feature to the Linux kernel's name in /proc/cpuinfo.

Features left out only tune the code or never occur in it."""

AMX = ("amx-int8", "amx-tile")
"""LLVM's names of what integer products use of Intel AMX."""


@dataclass(frozen=True)
class Cpu:
    """One CPU to make code for.

    Attributes:
        name: The specification, with ``host`` and the default already resolved.
        architecture: ``x86_64`` or ``aarch64``, as ``uname -m`` prints it.
        llvm_name: LLVM's processor name.
        extensions: LLVM's names of features that it has beside those of that name.
        tuning: Choices of the schedules that were measured.
        strict_math: Whether kernels may change sums in nothing but their order.
    """

    name: str
    architecture: str
    llvm_name: str
    extensions: tuple[str, ...] = ()
    tuning: Tuning = UNTUNED
    strict_math: bool = False

    @property
    def untuned(self) -> Cpu:
        """The same without choices that were measured."""
        return self if self.tuning == UNTUNED else dataclasses.replace(self, tuning=UNTUNED)

    @property
    def triple(self) -> str:
        """LLVM target triple."""
        return f"{self.architecture}-linux-gnu"

    @cached_property
    def target(self) -> Any:
        """The ``tvm.target.Target``."""
        import tvm

        kind: dict[str, Any] = {"kind": "llvm", "mtriple": self.triple, "mcpu": self.llvm_name}
        if self.extensions:
            kind["mattr"] = [f"+{extension}" for extension in self.extensions]
        return tvm.target.Target(kind)

    @cached_property
    def llvm_features(self) -> frozenset[str]:
        """LLVM's names of the features that the code may use."""
        from tvm.target import codegen

        return frozenset(str(feature) for feature in codegen.llvm_get_cpu_features(self.target))

    @property
    def kernel_flags(self) -> tuple[str, ...]:
        """Flags that /proc/cpuinfo of the loading machine must list, sorted."""
        names = KERNEL_FLAGS[self.architecture]
        return tuple(sorted(names[name] for name in self.llvm_features if name in names))

    @cached_property
    def vector_bytes(self) -> int:
        """Width of a vector register."""
        if self.architecture == "aarch64":
            return 16
        widths = (("avx512f", 64), ("avx", 32))
        return next((width for name, width in widths if name in self.llvm_features), 16)

    @property
    def vector_registers(self) -> int:
        """Number of vector registers."""
        wide = self.architecture == "aarch64" or "avx512vl" in self.llvm_features
        return 32 if wide else 16

    def free_registers(self, vectors: int) -> int:
        """Rows of accumulators, each ``vectors`` wide, that fit into a register tile.

        One step of a tile keeps its vectors in registers, and one scalar: x86-64 multiplies with
        a broadcast from memory. On aarch64 LLVM loads the scalars of several steps at once, into
        one register for each row, and the next step's vectors ahead.
        """
        if self.architecture == "aarch64":
            return (self.vector_registers - 2 * vectors) // (vectors + 1)
        return (self.vector_registers - 1) // vectors - 1


def parse_cpu(specification: str) -> Cpu:
    """The CPU that a specification names.

    Raises:
        UsageError: LLVM does not know a processor of that name.
    """
    from tvm.target import codegen

    here = platform.machine()
    name = specification or PORTABLE_LEVEL.get(here, "")
    if name == "host":
        found = str(codegen.llvm_get_system_cpu())
        return _extended(Cpu(f"host:{found}", here, found))
    if name == "aarch64":
        return Cpu(name, "aarch64", "generic")
    for architecture in PORTABLE_LEVEL:
        probe = _known_names(architecture)
        if name in probe and name != "generic":
            return Cpu(name, architecture, name)
    raise UsageError(
        f"LLVM knows no processor {specification!r}; give a level (x86-64-v2, x86-64-v3, "
        "x86-64-v4, aarch64), a processor such as znver3 or neoverse-n1, or host"
    )


def _extended(host: Cpu) -> Cpu:
    """This machine's CPU with AMX, if it has that and LLVM does not know."""
    names = KERNEL_FLAGS.get(host.architecture, {})
    missing = [name for name in AMX if names.get(name) in cpu_flags() - set(host.kernel_flags)]
    if not missing or amx.why_not() is not None:
        return host
    name = "+".join([host.name, *missing])
    return dataclasses.replace(host, name=name, extensions=tuple(missing))


def _known_names(architecture: str) -> frozenset[str]:
    import tvm
    from tvm.target import codegen

    target = tvm.target.Target({"kind": "llvm", "mtriple": f"{architecture}-linux-gnu"})
    return frozenset(str(name) for name in codegen.llvm_get_cpu_archlist(target))
