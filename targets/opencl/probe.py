"""What this machine offers the opencl target."""

from __future__ import annotations

import platform

from hybridc.targets.opencl.devices import FEATURES, LOCAL_BYTES, WORK_GROUP
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
    features = [word for word, (name, _) in FEATURES.items() if name in device.extensions]
    wanted = [] if device.kind == "other" else [device.kind]
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
        "floats": ", ".join(["fp32", *features]),
        "runs bundles": _why_not(device) or "yes",
        "compile for it with": f"--target opencl:{','.join([*wanted, *features])}",
    }


def _why_not(device: OpenclDevice) -> str | None:
    """Why kernels may not run on a device; ``None`` if all do."""
    lacks = []
    if device.work_group < WORK_GROUP:
        lacks.append(f"work-groups of {WORK_GROUP}")
    if device.local_bytes < LOCAL_BYTES:
        lacks.append(f"{LOCAL_BYTES // 2**10} KiB of local memory")
    return f"not all: it lacks {' and '.join(lacks)}" if lacks else None
