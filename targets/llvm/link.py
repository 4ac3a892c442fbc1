"""Link object files to a shared library, for this architecture or another."""

from __future__ import annotations

import platform
import shutil
import subprocess
from collections.abc import Callable, Sequence
from typing import Any

from hybridc.targets.llvm.cpu import Cpu

from hybridc.errors import DeviceError, InternalError

_FLAGS = ("-shared", "-fPIC", "-Wl,--build-id=none", "-Wl,--hash-style=gnu", "-s")


def linker_for(cpu: Cpu) -> Callable[..., None]:
    """A function ``(output, objects, ...)`` that links for the CPU's architecture.

    Raises:
        DeviceError: No linker for it is installed.
    """
    command = _linker_command(cpu)

    def link(output: str, objects: Sequence[str], *_arguments: Any, **_options: Any) -> None:
        _run([*command, "-o", output, *objects, *_libraries(command)])

    link.object_format = "o"  # type: ignore[attr-defined]
    link.get_target_triple = lambda: cpu.triple  # type: ignore[attr-defined]
    return link


def linker_name(architecture: str) -> str | None:
    """The program that links for an architecture here; ``None`` if there is none."""
    native = architecture == platform.machine()
    drivers = ("cc", "gcc", "clang") if native else (f"{architecture}-linux-gnu-gcc",)
    return next((name for name in (*drivers, "ld.lld") if shutil.which(name)), None)


def _linker_command(cpu: Cpu) -> list[str]:
    name = linker_name(cpu.architecture)
    if name is None:
        packages = "gcc" if cpu.architecture == platform.machine() else "lld"
        raise DeviceError(
            f"no linker for {cpu.architecture} is installed; run: apt-get install {packages}"
        )
    if name == "ld.lld":
        return [name, "-shared", "--build-id=none", "--hash-style=gnu", "-s"]
    return [name, *_FLAGS]


def _libraries(command: Sequence[str]) -> list[str]:
    """The C and mathematics libraries; a bare linker leaves them to the process that loads."""
    return [] if command[0] == "ld.lld" else ["-lm"]


def _run(command: Sequence[str]) -> None:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise InternalError(f"linking failed: {' '.join(command)}\n{result.stderr.strip()}")
