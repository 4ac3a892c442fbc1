"""The GPUs that code is made for.

A specification is the part after ``cuda:`` on the command line:

    (nothing)              sm_80 and sm_90, and PTX for what is newer
    sm_90                  machine code for compute capability 9.0, and PTX for what is newer
    sm_80,sm_90            machine code for both, and PTX of the newest for what is newer
    sm_90,tf32             float32 products on tensor cores, with factors rounded to tf32
    sm_90+aarch64          with a host of another architecture, named as for the llvm target

Machine code runs on its own compute capability and on a higher one of the same major version.
PTX is compiled by the driver, so it runs on every newer GPU, after a slow first load.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from hybridc.targets.gpu.limits import Limits
from hybridc.targets.llvm.cpu import Cpu, parse_cpu
from hybridc.targets.tuning import UNTUNED, Tuning

from hybridc.errors import UsageError

DEFAULT = ("sm_80", "sm_90")

OLDEST = 75
"""The oldest compute capability that the CUDA 13 compilers make code for."""

TENSOR_CORES = 80
"""The oldest compute capability with the instructions of the kernels for tensor cores."""

TF32 = "tf32"

_ARCHITECTURE = re.compile(r"sm_(\d+)")

RUNTIME = "libcudart.so.13"
"""CUDA's runtime library that TVM's is linked against."""


@dataclass(frozen=True)
class Gpu:
    """GPUs to make code for, and the host that calls it.

    Attributes:
        architectures: nvcc's names in rising order, such as ``sm_90``.
        host: The host's CPU.
        tf32: Whether products of float32 may round their factors to tf32.
        tuning: Choices of the schedules that were measured.
        strict_math: Whether kernels may change sums in nothing but their order.
    """

    architectures: tuple[str, ...]
    host: Cpu
    tf32: bool = False
    tuning: Tuning = UNTUNED
    strict_math: bool = False

    @property
    def name(self) -> str:
        """The specification with the default already resolved."""
        words = (*self.architectures, *([TF32] if self.tf32 else []))
        return f"{','.join(words)}+{self.host.name}"

    @property
    def device_code(self) -> tuple[str, ...]:
        """What the fat binary holds: machine code (``sm_90``) and PTX (``compute_90``)."""
        return (*self.architectures, self.architectures[-1].replace("sm_", "compute_"))

    @property
    def runtime_library(self) -> str:
        """The library of CUDA's that the loading machine must have beside the driver."""
        return RUNTIME

    @property
    def limits(self) -> Limits:
        """What a kernel may use on every one of the GPUs."""
        types = {"int8", "uint8", "float16", "bfloat16", *(["float32"] if self.tf32 else [])}
        if _capability(self.architectures[0]) < TENSOR_CORES:
            types = set()
        return Limits(
            1024,
            32,
            shared_bytes=48 * 1024,
            matrix_types=frozenset(types),
            tuning=self.tuning,
            strict_math=self.strict_math,
        )

    @cached_property
    def target(self) -> Any:
        """The ``tvm.target.Target``; source is made for the oldest architecture."""
        import tvm

        return tvm.target.Target(
            {
                "kind": "cuda",
                "arch": self.architectures[0],
                "max_threads_per_block": self.limits.threads,
                "max_shared_memory_per_block": self.limits.shared_bytes,
                "thread_warp_size": self.limits.warp,
                "host": self.host.target,
            }
        )


def parse_gpu(specification: str) -> Gpu:
    """The GPUs that a specification names.

    Raises:
        UsageError: An architecture is not written as nvcc writes it, or is too old.
    """
    devices, _, host = specification.partition("+")
    words = [word for word in devices.split(",") if word]
    names = [word for word in words if word != TF32] or list(DEFAULT)
    for name in names:
        match = _ARCHITECTURE.fullmatch(name)
        if match is None:
            raise UsageError(
                f"{name!r} is no GPU architecture; give compute capabilities as in "
                "cuda:sm_90 or cuda:sm_80,sm_90"
            )
        if int(match[1]) < OLDEST:
            raise UsageError(f"{name} is older than sm_{OLDEST}, the oldest that CUDA 13 knows")
    unique = tuple(sorted(set(names), key=_capability))
    if TF32 in words and _capability(unique[0]) < TENSOR_CORES:
        raise UsageError(f"{unique[0]} has no {TF32}, which came with sm_{TENSOR_CORES}")
    return Gpu(unique, parse_cpu(host), TF32 in words)


def _capability(architecture: str) -> int:
    return int(architecture.removeprefix("sm_"))
