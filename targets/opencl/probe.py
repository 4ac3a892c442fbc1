"""What this machine offers the opencl target."""

from __future__ import annotations

import platform

from hybridc.targets.opencl.plugin import compiler_for
from hybridc.targets.protocol import Found

from hybridc.runtime.opencl import OpenclDevice, OpenclError, devices


def probe() -> list[Found]:
    """The devices of all drivers; one entry with what is missing if there are none."""
    compiler = compiler_for(platform.machine())
    missing = () if compiler else ("a C++ compiler: apt-get install g++ opencl-c-headers",)
    try:
        found = devices()
    except OpenclError as error:
        return [Found("no device", {"reason": str(error)}, missing)]
    return [Found(device.name, _details(device), missing) for device in found]


def _details(device: OpenclDevice) -> dict[str, str]:
    has = {name: f"cl_khr_{name}" in device.extensions for name in ("fp16", "fp64")}
    return {
        "number": str(device.index),
        "kind": device.kind,
        "vendor": device.vendor,
        "platform": device.platform,
        "version": device.version,
        "driver": device.driver,
        "memory": f"{device.memory_bytes / 2**30:.1f} GiB",
        "largest work-group": str(device.work_group),
        "local memory": f"{device.local_bytes / 2**10:.0f} KiB",
        "floats": ", ".join(["fp32", *(name for name, there in has.items() if there)]),
    }
