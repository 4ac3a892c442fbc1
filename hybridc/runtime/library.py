"""Shared libraries out of a bundle: from checked bytes into the process.

What gets loaded is exactly what was hashed: the bytes go into an anonymous, sealed memory file,
and the dynamic loader maps that. Nothing is unpacked to disk, and a file that is swapped between
the check and the load makes no difference.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import itertools
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import tvm_ffi

from hybridc.bundle.manifest import Manifest
from hybridc.errors import DeviceError

_RUNTIME_FUNCTION = "ffi.Module.load_from_bytes.relax.VMExecutable"
"""A function that the TVM runtime registers: tells whether one is in the process already."""

_DEVICE_FUNCTIONS = {
    "libtvm_runtime_cuda.so": "device_api.cuda",
    "libhybridc_opencl.so": "device_api.opencl",
}
"""A function that each library for a kind of device registers."""

_lock = threading.Lock()
_path_numbers = itertools.count(1)
_loaded: dict[str, tuple[str, ctypes.CDLL]] = {}
"""Runtime libraries with their names, by checksum. A process can hold one TVM runtime only, since
its functions register under global names; so this is a fact about the process, not a model."""


def load_runtime(
    manifest: Manifest, read: Callable[[str], bytes], libraries: Sequence[str]
) -> None:
    """Bring a model's TVM runtime into the process, once.

    Args:
        manifest: The model's description.
        read: Gives the content of a library.
        libraries: Paths of the runtime's libraries, in the order of loading.

    Raises:
        DeviceError: apache-tvm-ffi is of another version than the runtime was built against, or
            the process holds another TVM runtime already.
    """
    check_tvm_ffi(manifest)
    with _lock:
        for name in libraries:
            data = read(name)
            digest = hashlib.sha256(data).hexdigest()
            by_tvm = _provided_by_tvm(manifest)
            if digest in _loaded or (by_tvm and not is_absent(name)):
                continue
            if not (_loaded or by_tvm) and _has_function(_RUNTIME_FUNCTION):
                raise DeviceError("another TVM runtime is in this process; load in a fresh one")
            _refuse_second_runtime(name)
            with memory_file(name, data) as path:
                _loaded[digest] = (name, ctypes.CDLL(path, ctypes.RTLD_GLOBAL))


def is_absent(name: str) -> bool:
    """Whether an imported ``tvm`` is without a library.

    That is CUDA's, where it found no driver, or OpenCL's, where that was built after the import.
    """
    function = _DEVICE_FUNCTIONS.get(os.path.basename(name))
    return function is not None and not _has_function(function)


def kind_served(library: str) -> str | None:
    """The kind of device that a runtime's library is for; ``None`` if it is for all."""
    function = _DEVICE_FUNCTIONS.get(os.path.basename(library))
    return function.removeprefix("device_api.") if function else None


def _has_function(name: str) -> bool:
    return tvm_ffi.get_global_func(name, allow_missing=True) is not None


def check_tvm_ffi(manifest: Manifest) -> None:
    """Refuse a tvm-ffi other than the one the runtime was built against."""
    if tvm_ffi.__version__ != manifest.tvm_ffi:
        raise DeviceError(
            f"this bundle needs apache-tvm-ffi {manifest.tvm_ffi} and {tvm_ffi.__version__} is "
            f"installed; run: pip install apache-tvm-ffi=={manifest.tvm_ffi}"
        )


def _provided_by_tvm(manifest: Manifest) -> bool:
    """Whether an imported ``tvm`` has brought the same runtime; refuses a different one."""
    version = getattr(sys.modules.get("tvm"), "__version__", None)
    if version is None:
        return False
    if version != manifest.tvm:
        raise DeviceError(
            f"this process has imported tvm {version} and the bundle carries the runtime of "
            f"{manifest.tvm}; load the bundle in a process that does not import tvm"
        )
    return True


def _refuse_second_runtime(name: str) -> None:
    if any(loaded == name for loaded, _ in _loaded.values()):
        raise DeviceError(
            "a bundle with another build of the TVM runtime is loaded in this process; load the "
            "two in separate processes or compile both with one version of hybridc"
        )


def load_library(name: str, data: bytes) -> Any:
    """A compiled part as a ``tvm_ffi.Module``."""
    loader = tvm_ffi.get_global_func("ffi.Module.load_from_file.so")
    with memory_file(name, data) as path:
        return loader(path, "so")


def keep_loaded(path: str) -> None:
    """Load a library for good: some do not survive being unloaded and loaded again."""
    ctypes.CDLL(path, os.RTLD_NOW | os.RTLD_NODELETE)


@contextmanager
def memory_file(name: str, data: bytes) -> Iterator[str]:
    """A path under which ``data`` can be loaded, valid inside the ``with`` block."""
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    descriptor = os.memfd_create(os.path.basename(name), flags)
    try:
        written = 0
        while written < len(data):
            written += os.write(descriptor, memoryview(data)[written:])
        seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
        yield _unique_path(descriptor)
    finally:
        os.close(descriptor)


def _unique_path(descriptor: int) -> str:
    """A path of the descriptor that this process has not used before.

    The dynamic loader takes two equal paths for the same library, and descriptors get reused. So
    each path spells a running number with components that lead nowhere.
    """
    number = next(_path_numbers)
    detour = "".join("./" if digit == "0" else ".//" for digit in f"{number:b}")
    return f"/proc/self/fd/{detour}{descriptor}"
