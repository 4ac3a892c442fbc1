"""NVIDIA GPUs as the loader sees them: the driver, the devices, and CUDA's runtime library.

The driver's library is asked directly, through ctypes, so that a missing driver or a GPU that is
too old is found before any code is loaded.
"""

from __future__ import annotations

import ctypes
import importlib.util
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hybridc.errors import DeviceError

DRIVER = "libcuda.so.1"

_MAJOR, _MINOR = 75, 76
"""CUdevice_attribute: compute capability."""


class DriverError(DeviceError):
    """There is no driver, or it shows no GPU."""


@dataclass(frozen=True)
class GpuInfo:
    """A GPU that the driver shows.

    Attributes:
        index: The driver's number of it.
        name: Its name.
        capability: Compute capability, major and minor.
        memory_bytes: Size of its memory.
    """

    index: int
    name: str
    capability: tuple[int, int]
    memory_bytes: int


def devices() -> list[GpuInfo]:
    """The GPUs that the driver shows; at least one.

    Raises:
        DriverError: There is no driver, or it shows none.
    """
    driver = _driver()
    count = ctypes.c_int()
    _call(driver, "cuDeviceGetCount", ctypes.byref(count))
    if not count.value:
        raise DriverError("the NVIDIA driver shows no GPU")
    return [_device(driver, index) for index in range(count.value)]


def driver_version() -> tuple[int, int]:
    """Newest CUDA version that the driver supports, major and minor.

    Raises:
        DriverError: There is no driver.
    """
    version = ctypes.c_int()
    _call(_driver(), "cuDriverGetVersion", ctypes.byref(version))
    return version.value // 1000, version.value % 1000 // 10


def why_not(device_code: Sequence[str], index: int = 0) -> str | None:
    """Why a GPU of this machine cannot run device code; ``None`` if it can.

    Args:
        device_code: What there is: ``sm_90`` for machine code, ``compute_90`` for PTX.
        index: The driver's number of the GPU.
    """
    try:
        found = devices()
    except DriverError as error:
        return str(error)
    if index >= len(found):
        return f"there is no GPU {index}; the driver shows {len(found)}"
    gpu = found[index]
    if any(runs_on(code, gpu.capability) for code in device_code):
        return None
    major, minor = gpu.capability
    return (
        f"it was built for {', '.join(device_code)} and the GPU, {gpu.name}, is sm_{major}{minor}"
    )


def runs_on(code: str, capability: tuple[int, int]) -> bool:
    """Whether a GPU of a compute capability runs device code such as ``sm_90``."""
    match = re.fullmatch(r"(sm|compute)_(\d+)(\d)", code)
    if match is None:
        return False
    built = (int(match[2]), int(match[3]))
    if match[1] == "compute":
        return built <= capability
    return built[0] == capability[0] and built[1] <= capability[1]


def load_runtime_library(name: str) -> None:
    """Bring a library of CUDA's into the process: the system's, or a package's.

    Raises:
        DeviceError: There is none; the message says what to install.
    """
    for path in (name, *(str(folder / name) for folder in package_folders("lib"))):
        try:
            ctypes.CDLL(path, ctypes.RTLD_GLOBAL)
        except OSError:
            continue
        return
    raise DeviceError(
        f"CUDA's runtime library {name} is not installed; run: pip install 'hybridc[cuda]'"
    )


def find_runtime(name: str = "libcudart.so.13") -> str | None:
    """Where a library of CUDA's would be loaded from; ``None`` if there is none."""
    for folder in package_folders("lib"):
        if (folder / name).exists():
            return str(folder / name)
    try:
        ctypes.CDLL(name)
    except OSError:
        return None
    return name


def package_folders(part: str) -> Iterator[Path]:
    """Folders ``part`` of the installed NVIDIA packages, such as ``nvidia/cu13/lib``."""
    specification = importlib.util.find_spec("nvidia")
    for root in specification.submodule_search_locations or () if specification else ():
        yield from sorted(Path(root).glob(f"cu1*/{part}"), reverse=True)


def _driver() -> ctypes.CDLL:
    try:
        driver = ctypes.CDLL(DRIVER)
    except OSError as error:
        raise DriverError(f"there is no NVIDIA driver: {error}") from error
    _call(driver, "cuInit", 0)
    return driver


def _device(driver: ctypes.CDLL, index: int) -> GpuInfo:
    handle, size = ctypes.c_int(), ctypes.c_size_t()
    name = ctypes.create_string_buffer(256)
    _call(driver, "cuDeviceGet", ctypes.byref(handle), index)
    _call(driver, "cuDeviceGetName", name, len(name), handle)
    _call(driver, "cuDeviceTotalMem_v2", ctypes.byref(size), handle)
    capability = (_attribute(driver, handle, _MAJOR), _attribute(driver, handle, _MINOR))
    return GpuInfo(index, name.value.decode(errors="replace"), capability, size.value)


def _attribute(driver: ctypes.CDLL, handle: ctypes.c_int, number: int) -> int:
    value = ctypes.c_int()
    _call(driver, "cuDeviceGetAttribute", ctypes.byref(value), number, handle)
    return value.value


def _call(driver: ctypes.CDLL, name: str, *arguments: object) -> None:
    status = getattr(driver, name)(*arguments)
    if status:
        raise DriverError(f"the NVIDIA driver does not work: {name} gave error {status}")
