"""Leave to use Intel AMX, which Linux gives to a process that asks for it.

The tile registers are large, and a process has none until it says that it will use them: its
threads then save more when they are interrupted. A process asks once; its threads and those that it
forks have the leave, too.
"""

from __future__ import annotations

import ctypes
import os

FLAG = "amx_tile"
"""The Linux kernel's name of AMX's registers in /proc/cpuinfo."""

_ARCH_PRCTL = 158
"""Number of the system call on x86-64, where alone it is."""

_ARCH_REQ_XCOMP_PERM, _TILE_DATA = 0x1023, 18


def why_not() -> str | None:
    """Why this process may not use AMX on this machine, whose CPU has it; ``None`` if it may.

    Asks for leave, which is given at once or not at all.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    numbers = map(ctypes.c_long, (_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _TILE_DATA))
    if libc.syscall(*numbers) == 0:
        return None
    return f"Linux does not let this process use AMX ({os.strerror(ctypes.get_errno())})"
