"""What this machine offers the llvm target."""

from __future__ import annotations

import os
import platform
from pathlib import Path

from hybridc.targets.llvm.cpu import parse_cpu
from hybridc.targets.llvm.link import linker_name
from hybridc.targets.protocol import Found


def probe() -> list[Found]:
    """This machine's CPU, with what building for it and for other architectures needs."""
    host = parse_cpu("host")
    here = platform.machine()
    linker = linker_name(here)
    details = {
        "cpu": _model_name(),
        "architecture": here,
        "llvm": host.llvm_name,
        "portable level": parse_cpu("").name,
        "vector bytes": str(host.vector_bytes),
        "cores": str(len(os.sched_getaffinity(0))),
        "linker": linker or "none",
    }
    other = "aarch64" if here == "x86_64" else "x86_64"
    details[f"linker for {other}"] = linker_name(other) or "none (apt-get install lld)"
    missing = () if linker else ("a C linker: apt-get install gcc",)
    return [Found("CPU", details, missing)]


def _model_name() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith(("model name", "Model", "CPU part")):
            return line.partition(":")[2].strip()
    return platform.processor() or "unknown"
