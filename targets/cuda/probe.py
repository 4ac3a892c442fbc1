"""What this machine offers the cuda target."""

from __future__ import annotations

from hybridc.targets.cuda.architectures import OLDEST, TENSOR_CORES
from hybridc.targets.cuda.nvcc import find_nvcc
from hybridc.targets.cuda.nvrtc import find_nvrtc
from hybridc.targets.protocol import Found

from hybridc.runtime.cuda import DriverError, GpuInfo, devices, driver_version, find_runtime


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
                "number": str(gpu.index),
                "compute capability": f"{gpu.capability[0]}.{gpu.capability[1]}",
                "memory": f"{gpu.memory_bytes / 2**30:.1f} GiB",
                **_abilities(gpu),
                "driver supports": f"CUDA {version[0]}.{version[1]}",
                **common,
            },
            missing,
        )
        for gpu in found
    ]


def _abilities(gpu: GpuInfo) -> dict[str, str]:
    """What a GPU can do for hybridc."""
    capability = 10 * gpu.capability[0] + gpu.capability[1]
    if capability < OLDEST:
        return {"runs bundles": f"no: it is older than sm_{OLDEST}"}
    tensor_cores = "fp16, bf16, and tf32 on demand" if capability >= TENSOR_CORES else "not used"
    return {
        "floats": "fp32, fp64, fp16" + (", bf16" if capability >= TENSOR_CORES else ""),
        "tensor cores": tensor_cores,
        "runs bundles": "yes" if find_runtime() else "no: pip install 'hybridc[cuda]'",
        "compile for it with": f"--target cuda:sm_{capability}",
    }
