"""What a target is: the seam between the compiler and one kind of device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import tvm


@dataclass(frozen=True)
class Device:
    """A device that parts can be placed on.

    Attributes:
        name: Name in plans and pins, such as ``llvm:0``.
        kind: Kind of its target.
        specification: What to build for, as given after ``kind:``; may be empty.
    """

    name: str
    kind: str
    specification: str = ""


@dataclass(frozen=True)
class Artifact:
    """A compiled part.

    Attributes:
        library: Bytes of the shared library.
        memory_bytes: Planned peak of intermediate tensors; 0 where shapes are dynamic.
        runtime: Stems of the runtime's libraries that it needs.
    """

    library: bytes
    memory_bytes: int
    runtime: tuple[str, ...]


@dataclass(frozen=True)
class Compatibility:
    """What the machine that loads a part must have.

    Attributes:
        built_for: The processor or architecture in words.
        architecture: Host architecture, as ``uname -m`` prints it.
        cpu_flags: Flags that /proc/cpuinfo must list.
    """

    built_for: str
    architecture: str
    cpu_flags: tuple[str, ...] = ()


@dataclass(frozen=True)
class Found:
    """A device seen on this machine.

    Attributes:
        name: What it is, in words.
        details: Facts about it, for people.
        missing: What would have to be installed to build for it; empty if nothing.
    """

    name: str
    details: Mapping[str, str] = field(default_factory=dict)
    missing: tuple[str, ...] = ()


class Target(Protocol):
    """One kind of device."""

    @property
    def kind(self) -> str:
        """Name on the command line."""

    def check(self, specification: str) -> None:
        """Raise ``UsageError`` if nothing can be built for this specification."""

    def build(self, module: tvm.IRModule, specification: str) -> Artifact:
        """Compile a lowered part.

        Raises:
            DeviceError: A tool that building needs is not installed.
        """

    def runtime_library(self, stem: str, specification: str) -> bytes:
        """One of the runtime's libraries for the specification's architecture."""

    def compatibility(self, specification: str) -> Compatibility:
        """What the loading machine must have."""

    def probe(self) -> list[Found]:
        """Devices of this kind on this machine."""
