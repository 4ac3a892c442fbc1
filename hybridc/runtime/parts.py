"""Loaded parts: what the executor calls, one class for each way in which a part runs.

A part is loaded once. ``start`` makes what one executor calls: a function that takes the part's
inputs and gives its outputs, and that serves one call at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import tvm_ffi

from hybridc.bundle.manifest import DeviceSpec, Manifest, PartSpec
from hybridc.errors import BundleError
from hybridc.runtime import opencl
from hybridc.runtime.library import load_library
from hybridc.runtime.tensors import HOST, Place, move

_POOLED = 2
"""TVM's allocator that keeps freed memory for the next call."""

SESSION_KIND = "onnxruntime"

_PLACES: Mapping[str, Place] = {"cuda": (2, 0), "opencl": (4, 0)}
"""Where the tensors of a kind of device are; in host memory if it is not listed."""


def place_of_kind(kind: str) -> Place:
    """Where the tensors of a kind of device are."""
    return _PLACES.get(kind, HOST)


def _place_of(device: DeviceSpec) -> Place:
    """Where the tensors of a device of the plan are."""
    place = place_of_kind(device.kind)
    if device.kind == "opencl":
        return place[0], opencl.choose(device.device_code, device.name).index
    return place


Function = Callable[..., Sequence[Any]]


class LoadedPart(Protocol):
    """A part's code with its weights; shared by all executors."""

    @property
    def spec(self) -> PartSpec:
        """Its description."""

    @property
    def place(self) -> Place:
        """Where its inputs must be and its outputs are."""

    def start(self) -> tuple[Function, tuple[Any, ...]]:
        """A function, and what it takes behind the part's inputs."""


@dataclass(frozen=True)
class CompiledPart:
    """A part compiled by TVM.

    Attributes:
        spec: Its description.
        library: The loaded module.
        weights: A ``tvm_ffi.Array`` of tensors: the mapped weights, or copies on its device.
        place: Where its inputs must be and its outputs are.
    """

    spec: PartSpec
    library: Any
    weights: Any
    place: Place = HOST

    def start(self) -> tuple[Function, tuple[Any, ...]]:
        """A virtual machine of its own, since it keeps its frames."""
        return self.machine()["main"], (self.weights,)

    def machine(self) -> Any:
        """A new virtual machine, ready to run."""
        return start_machine(self.library, self.place)


def start_machine(library: Any, place: Place) -> Any:
    """A new virtual machine for a loaded library, which computes at a place."""
    machine = library["vm_load_executable"]()
    places = [place] if place == HOST else [place, HOST]
    machine["vm_initialization"](*(n for one in places for n in (*one, _POOLED)))
    return machine


def load_part(
    manifest: Manifest,
    spec: PartSpec,
    read: Callable[[str], bytes],
    weights: Mapping[str, Any],
    threads: int = 1,
) -> LoadedPart:
    """Load a part.

    Args:
        manifest: The bundle's description.
        spec: The part's.
        read: Gives the bytes of a file of the bundle.
        weights: Tensors by name.
        threads: Threads for a part that has its own.

    Raises:
        BundleError: A weight is missing, or the code cannot be read.
    """
    kind = manifest.device(spec.device).kind
    if kind == SESSION_KIND:
        from hybridc.runtime.session import load_session

        return load_session(spec, read, threads)
    missing = [name for name in spec.weights if name not in weights]
    if missing:
        raise BundleError(f"the bundle lacks the weights {missing} of {spec.name}")
    library = load_library(spec.library, read(spec.library))
    place = _place_of(manifest.device(spec.device))
    tensors = [move(weights[name], place) for name in spec.weights]
    return CompiledPart(spec, library, tvm_ffi.Array(tensors), place)
