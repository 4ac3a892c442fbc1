"""What this machine offers the cuda target."""

from __future__ import annotations

from hybridc.targets.cuda.nvcc import find_nvcc
from hybridc.targets.cuda.nvrtc import find_nvrtc
from hybridc.targets.protocol import Found

from hybridc.runtime.cuda import DriverError, devices, driver_version, find_runtime


def probe() -> list[Found]:
    """The GPUs that the driver shows; one entry with what is missing if there are none."""
    compiler = find_nvcc() or find_nvrtc()
    missing = () if compiler else ("a CUDA compiler: the toolkit, or the extra cuda-compiler",)
    common = {"compiler": compiler or "none", "runtime library": find_runtime() or "none"}
    try:
        version, found = driver_version(), devices()
    except DriverError as error:
        return [Found("no GPU", {"reason": str(error), **common}, missing)]
    return [
        Found(
            gpu.name,
            {
                "compute capability": f"{gpu.capability[0]}.{gpu.capability[1]}",
                "memory": f"{gpu.memory_bytes / 2**30:.1f} GiB",
                "driver supports": f"CUDA {version[0]}.{version[1]}",
                **common,
            },
            missing,
        )
        for gpu in found
    ]
