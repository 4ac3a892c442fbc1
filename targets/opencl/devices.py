"""The devices that code is made for.

A specification is the part after ``opencl:`` on the command line, words with commas between:

    (nothing)         any device with OpenCL 1.2
    gpu               when the bundle is loaded, take a GPU; so with cpu and accelerator
    nvidia            take a device with that in the name of it, of its vendor or of its platform
    fp64, fp16        the device has 64-bit or 16-bit floats, and the model may use them
    gpu+aarch64       with a host of another architecture, named as for the llvm target

The source is OpenCL C 1.2 and stays within what every common device grants: 256 work-items in a
group and 32 KiB of local memory. Where the bundle is loaded, the user may choose another device.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from hybridc.targets.gpu.limits import Limits
from hybridc.targets.llvm.cpu import Cpu, parse_cpu
from hybridc.targets.tuning import UNTUNED, Tuning

from hybridc.errors import UsageError
from hybridc.runtime.opencl import LANGUAGE

WORK_GROUP, LOCAL_BYTES = 256, 32 * 1024
"""Most work-items of a group, and most local memory that they share."""

FEATURES = {"fp64": ("cl_khr_fp64", "float64"), "fp16": ("cl_khr_fp16", "float16")}
"""The extension that a device must have for a word, and the type that it brings."""

_INTEGERS = frozenset(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))
TYPES = _INTEGERS | {"bool", "float32"}
"""What every device computes with."""


@dataclass(frozen=True)
class Devices:
    """Devices to make code for, and the host that calls it.

    Attributes:
        wanted: Which device to take at load: ``gpu``, ``cpu``, ``accelerator``, or a part of a
            name; any if it is empty.
        features: Words of :data:`FEATURES`.
        host: The host's CPU.
        tuning: Choices of the schedules that were measured.
        strict_math: Whether kernels may change sums in nothing but their order.
    """

    wanted: str
    features: tuple[str, ...]
    host: Cpu
    tuning: Tuning = UNTUNED
    strict_math: bool = False

    @property
    def name(self) -> str:
        """The specification with the default host already resolved."""
        words = ",".join((*filter(None, [self.wanted]), *self.features))
        return f"{words}+{self.host.name}"

    @property
    def device_code(self) -> tuple[str, ...]:
        """The language, the extensions that a device must have, and which device to take."""
        extensions = (FEATURES[word][0] for word in self.features)
        wanted = (f"device={self.wanted}",) if self.wanted else ()
        return (LANGUAGE, *extensions, *wanted)

    @property
    def limits(self) -> Limits:
        """What a kernel may use on every one of the devices."""
        types = TYPES | {FEATURES[word][1] for word in self.features}
        return Limits(
            WORK_GROUP,
            1,
            LOCAL_BYTES,
            types=types,
            tuning=self.tuning,
            strict_math=self.strict_math,
        )

    @cached_property
    def target(self) -> Any:
        """The ``tvm.target.Target``; with warps of more than 1, barriers would go missing."""
        import tvm

        return tvm.target.Target(
            {
                "kind": "opencl",
                "max_threads_per_block": self.limits.threads,
                "max_num_threads": self.limits.threads,
                "max_shared_memory_per_block": self.limits.shared_bytes,
                "thread_warp_size": self.limits.warp,
                "host": self.host.target,
            }
        )


def parse_devices(specification: str) -> Devices:
    """The devices that a specification names.

    Raises:
        UsageError: LLVM does not know the host, or there are two names of devices.
    """
    device, _, host = specification.partition("+")
    words = [word.strip() for word in device.split(",") if word.strip()]
    features = tuple(word for word in FEATURES if word in words)
    wanted = [word for word in words if word not in FEATURES]
    if len(wanted) > 1:
        raise UsageError(
            f"opencl:{device} names several devices; give one of gpu, cpu, accelerator or a "
            "vendor, and fp64 or fp16 if the device has them, as in opencl:gpu,fp64"
        )
    return Devices(wanted[0] if wanted else "", features, parse_cpu(host))
