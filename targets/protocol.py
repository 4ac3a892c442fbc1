"""What a target is: the seam between the compiler and one kind of device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from hybridc.targets.tuning import TunableKernel, Tuning

if TYPE_CHECKING:
    import onnx_ir as ir

    from hybridc.bundle.tensors import Array
    from hybridc.frontend.shapes import Range


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
class Section:
    """What is compiled together: a convex piece of a graph, with its borders.

    Attributes:
        nodes: Nodes in topological order.
        inputs: Values that come from outside at run time.
        outputs: Values that are used outside.
        opsets: Imported version by domain.
        ranges: Sizes that the dynamic dimensions can have, by name.
    """

    nodes: Sequence[ir.Node]
    inputs: Sequence[ir.Value]
    outputs: Sequence[ir.Value]
    opsets: Mapping[str, int]
    ranges: Mapping[str, Range] = field(default_factory=dict)


@dataclass(frozen=True)
class ResultType:
    """Type of an output as a target found it out.

    Attributes:
        dtype: numpy's name of the element type.
        shape: Dimensions; what is no ``int`` prints as an expression of dynamic dimensions.
    """

    dtype: str
    shape: tuple[Any, ...]


class Lowered(Protocol):
    """A section in a target's own form, before code is made of it."""

    @property
    def results(self) -> tuple[ResultType | None, ...]:
        """Type of each output; ``None`` leaves what shape inference said."""


@dataclass(frozen=True)
class Artifact:
    """A compiled part.

    Attributes:
        library: Bytes of the shared library, or of what else the loader runs.
        memory_bytes: Planned peak of intermediate tensors; 0 where it is not known.
        runtime: Stems of the runtime's libraries that it needs.
        weights: The weights by name, in the order in which the library takes them.
        suffix: How the library's file name ends.
        companions: Other libraries that it needs, by file name.
        thread_bytes: What each thread takes to work in, at most, as far as it is planned.
    """

    library: bytes
    memory_bytes: int
    runtime: tuple[str, ...] = ()
    weights: Mapping[str, Array] = field(default_factory=dict)
    suffix: str = ".so"
    companions: Mapping[str, bytes] = field(default_factory=dict)
    thread_bytes: int = 0


@dataclass(frozen=True)
class Compatibility:
    """What the machine that loads a part must have.

    Attributes:
        built_for: The processor or architecture in words.
        architecture: Host architecture, as ``uname -m`` prints it; empty if any will do.
        cpu_flags: Flags that /proc/cpuinfo must list.
        packages: Python packages with their lowest version, as in ``onnxruntime>=1.32``.
        device_code: What an accelerator's code was made for: ``sm_90``, or ``compute_90`` for PTX.
        libraries: Shared libraries that must be installed beside the driver.
    """

    built_for: str
    architecture: str
    cpu_flags: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()
    device_code: tuple[str, ...] = ()
    libraries: tuple[str, ...] = ()


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

    def lower(self, section: Section, specification: str) -> Lowered:
        """A section in the target's own form.

        Raises:
            UnsupportedError: Some nodes cannot be compiled; it lists all of them.
        """

    def build(self, lowered: Any, specification: str) -> Artifact:
        """Compile what :meth:`lower` gave.

        Raises:
            DeviceError: A tool that building needs is not installed.
        """

    def runtime_library(self, stem: str, specification: str) -> bytes:
        """One of the runtime's libraries for the specification's architecture."""

    def compatibility(self, specification: str) -> Compatibility:
        """What the loading machine must have."""

    def probe(self) -> list[Found]:
        """Devices of this kind on this machine."""


@runtime_checkable
class CachingTarget(Target, Protocol):
    """A target that can keep what it builds, for later compiles."""

    def with_cache(self, folder: Path) -> Target:
        """The same target, which keeps it in a folder. What it builds is the same to the byte."""


@runtime_checkable
class StrictTarget(Target, Protocol):
    """A target with kernels that differ from what the model says by more than the order of sums."""

    def with_strict_math(self) -> Target:
        """The same target without such kernels."""


@runtime_checkable
class TunableTarget(Target, Protocol):
    """A target whose kernels can be measured with several choices, for compiles to come."""

    def with_tuning(self, tuning: Tuning) -> Target:
        """The same target, which builds kernels with these choices."""

    def kernels(self, lowered: Any, device: Device) -> Sequence[TunableKernel]:
        """The kernels of what :meth:`lower` gave for which there is something to choose.

        Raises:
            DeviceError: This machine lacks what measuring needs.
        """

    def machine(self, device: Device) -> str:
        """Name of what measures kernels for a device on this machine, which can run them."""
