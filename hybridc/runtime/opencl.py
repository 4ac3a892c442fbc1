"""OpenCL devices as the loader sees them: what the drivers show, and which one is taken.

The ICD loader is asked directly, through ctypes, so that a missing driver is found before any code
is loaded. The plug-in numbers devices in the same order.

Which device a bundle runs on: what ``HYBRIDC_OPENCL_DEVICE`` says; else what it was compiled for;
else a GPU, or an accelerator, or a CPU, whichever comes first in this list. The variable holds
``gpu``, ``cpu``, ``accelerator``, a number as ``hybridc doctor`` shows it, or a part of the name of
a device, a vendor or a platform. For several devices of a plan: ``opencl:0=gpu,opencl:1=cpu``.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from dataclasses import dataclass

from hybridc.errors import DeviceError

LANGUAGE = "opencl_1.2"
"""What all kernels are written in, as a manifest names it."""

VARIABLE = "HYBRIDC_OPENCL_DEVICE"

LOADERS = ("libOpenCL.so.1", "libOpenCL.so")

_KINDS = {4: "gpu", 8: "accelerator", 2: "cpu"}
"""CL_DEVICE_TYPE_* to names, in the order in which devices are preferred."""

_ALL = 0xFFFFFFFF
_TYPE, _GROUP, _MEMORY, _LOCAL = 0x1000, 0x1004, 0x101F, 0x1023
_NAME, _VENDOR, _DRIVER, _VERSION, _EXTENSIONS = 0x102B, 0x102C, 0x102D, 0x102F, 0x1030
_PLATFORM_NAME = 0x0902


class OpenclError(DeviceError):
    """There is no OpenCL, or it shows no device."""


@dataclass(frozen=True)
class OpenclDevice:
    """A device that a driver shows.

    Attributes:
        index: Its place among all devices of all platforms.
        name: Its name.
        kind: ``gpu``, ``accelerator``, ``cpu``, or ``other``.
        vendor: Who made it.
        platform: Name of the driver's platform.
        version: The OpenCL version that it says it has, such as ``OpenCL 3.0 PoCL``.
        driver: Version of the driver.
        extensions: Such as ``cl_khr_fp64``.
        memory_bytes: Size of its memory.
        work_group: Most work-items in a group.
        local_bytes: Local memory of a group.
    """

    index: int
    name: str
    kind: str
    vendor: str
    platform: str
    version: str
    driver: str
    extensions: frozenset[str]
    memory_bytes: int
    work_group: int
    local_bytes: int

    def is_called(self, wanted: str) -> bool:
        """Whether a word of the user's means this device."""
        word = wanted.strip().lower()
        if word in (*_KINDS.values(), "other"):
            return word == self.kind
        if word.isdigit():
            return int(word) == self.index
        return any(word in text.lower() for text in (self.name, self.vendor, self.platform))


def devices() -> list[OpenclDevice]:
    """All devices of all platforms; at least one.

    Raises:
        OpenclError: There is no ICD loader, no platform, or no device.
    """
    found: list[OpenclDevice] = []
    loader = _loader()
    for platform in _handles(loader.clGetPlatformIDs):
        handle = ctypes.c_void_p(platform)
        for device in _handles(loader.clGetDeviceIDs, handle, ctypes.c_ulong(_ALL)):
            found.append(_describe(loader, handle, ctypes.c_void_p(device), len(found)))
    if not found:
        raise OpenclError(
            "no OpenCL driver shows a device; install one for your device, or PoCL for the CPU: "
            "apt-get install pocl-opencl-icd"
        )
    return found


def choose(device_code: Sequence[str], name: str = "") -> OpenclDevice:
    """The device that code runs on.

    Args:
        device_code: What a manifest says: the language, extensions, and ``device=gpu``.
        name: The device's name in the plan, for ``HYBRIDC_OPENCL_DEVICE``.

    Raises:
        OpenclError: There is none, or none that the user or the bundle names, or none that has
            the extensions.
    """
    found = devices()
    wanted = _wanted(name) or next(
        (code.partition("=")[2] for code in device_code if code.startswith("device=")), ""
    )
    named = [device for device in found if not wanted or device.is_called(wanted)]
    if not named:
        there = "; ".join(f"{device.index}: {device.name} ({device.kind})" for device in found)
        raise OpenclError(
            f"no OpenCL device is called {wanted!r}; there are {there}; set {VARIABLE} to choose"
        )
    reasons = {device: _why_not(device, device_code) for device in named}
    fitting = [device for device in named if reasons[device] is None]
    if not fitting:
        raise OpenclError("; ".join(str(reason) for reason in reasons.values()))
    order = [*_KINDS.values(), "other"]
    return min(fitting, key=lambda device: (order.index(device.kind), device.index))


def why_not(device_code: Sequence[str], name: str = "") -> str | None:
    """Why no device of this machine can run code; ``None`` if one can. See :func:`choose`."""
    try:
        choose(device_code, name)
    except OpenclError as error:
        return str(error)
    return None


def _wanted(name: str) -> str:
    """What the environment says of a device of the plan; empty if nothing."""
    text = os.environ.get(VARIABLE, "")
    if "=" not in text:
        return text.strip()
    pairs = (pair.rpartition("=") for pair in text.split(","))
    return next((value.strip() for key, _, value in pairs if key.strip() == name), "")


def _why_not(device: OpenclDevice, device_code: Sequence[str]) -> str | None:
    needed = {code for code in device_code if code.startswith("cl_")}
    missing = sorted(needed - device.extensions)
    if missing:
        return f"the OpenCL device {device.name} lacks {', '.join(missing)}"
    return None


def _loader() -> ctypes.CDLL:
    for name in LOADERS:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise OpenclError(
        f"OpenCL's loader {LOADERS[0]} is not installed; run: apt-get install ocl-icd-libopencl1, "
        "and install a driver for your device"
    )


def _handles(function: object, *arguments: object) -> list[int]:
    """What a function lists that is asked first how much there is; an error is nothing."""
    count = ctypes.c_uint()
    if function(*arguments, 0, None, ctypes.byref(count)) or not count.value:  # type: ignore[operator]
        return []
    array = (ctypes.c_void_p * count.value)()
    if function(*arguments, count, array, None):  # type: ignore[operator]
        return []
    return [handle or 0 for handle in array]


def _describe(
    loader: ctypes.CDLL, platform: ctypes.c_void_p, device: ctypes.c_void_p, index: int
) -> OpenclDevice:
    def text(what: int) -> str:
        return _ask(loader.clGetDeviceInfo, device, what).split(b"\0")[0].decode(errors="replace")

    def number(what: int) -> int:
        return int.from_bytes(_ask(loader.clGetDeviceInfo, device, what), "little")

    kind = next((name for bit, name in _KINDS.items() if number(_TYPE) & bit), "other")
    name = _ask(loader.clGetPlatformInfo, platform, _PLATFORM_NAME).split(b"\0")[0]
    return OpenclDevice(
        index,
        text(_NAME).strip(),
        kind,
        text(_VENDOR),
        name.decode(errors="replace"),
        text(_VERSION),
        text(_DRIVER),
        frozenset(text(_EXTENSIONS).split()),
        number(_MEMORY),
        number(_GROUP),
        number(_LOCAL),
    )


def _ask(function: object, handle: ctypes.c_void_p, what: int) -> bytes:
    size = ctypes.c_size_t()
    if function(handle, what, ctypes.c_size_t(0), None, ctypes.byref(size)):  # type: ignore[operator]
        return b""
    buffer = ctypes.create_string_buffer(size.value)
    if function(handle, what, size, buffer, None):  # type: ignore[operator]
        return b""
    return buffer.raw
