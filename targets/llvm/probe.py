"""What this machine offers the llvm target."""

from __future__ import annotations

import importlib.util
import os
import platform
from pathlib import Path

from hybridc.targets.llvm.cpu import KERNEL_FLAGS, PORTABLE_LEVEL, parse_cpu
from hybridc.targets.llvm.link import linker_name
from hybridc.targets.protocol import Found

from hybridc.runtime.machine import cpu_flags


def probe() -> list[Found]:
    """This machine's CPU, with what building for it and for other architectures needs.

    Where the compiler is not installed, only what a bundle may need is told.
    """
    here = platform.machine()
    known = set(KERNEL_FLAGS.get(here, {}).values())
    details = {
        "cpu": _model_name(),
        "architecture": here,
        "cores": str(len(os.sched_getaffinity(0))),
        "instruction sets": " ".join(sorted(known & cpu_flags())),
    }
    if not importlib.util.find_spec("tvm"):
        return [Found("CPU", details)]
    linker = linker_name(here)
    missing = () if linker else ("a C linker: apt-get install gcc",)
    return [Found("CPU", {**details, **_for_building(here, linker)}, missing)]


def _for_building(here: str, linker: str | None) -> dict[str, str]:
    host = parse_cpu("host")
    other = "aarch64" if here == "x86_64" else "x86_64"
    return {
        "llvm": host.llvm_name,
        "portable level": PORTABLE_LEVEL.get(here, ""),
        "vector bytes": str(host.vector_bytes),
        "compile for it with": "--target llvm:host",
        "linker": linker or "none",
        f"linker for {other}": linker_name(other) or "none (apt-get install lld)",
    }


def _model_name() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith(("model name", "Model", "CPU part")):
            return line.partition(":")[2].strip()
    return platform.processor() or "unknown"
