"""Runs in the emulator: loads each bundle, runs it on stored inputs, and stores what comes out.

``python run.py FOLDER``: of every ``NAME.hyb``, or folder ``NAME.bundle``, with its ``NAME.npz``,
the outputs go to ``NAME.outputs.npz``, or what went wrong to ``NAME.error``.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

import hybridc
from hybridc.errors import HybridcError
from hybridc.runtime import machine

FLAGS = frozenset(
    "fp asimd aes pmull sha1 sha2 crc32 atomics fphp asimdhp asimddp i8mm bf16 sve".split()
)
"""What qemu emulates; its /proc/cpuinfo is that of the machine around it."""


def run(bundle: Path) -> None:
    """Run one bundle."""
    try:
        with hybridc.load(bundle, threads=1) as model:
            outputs = model.run(dict(np.load(bundle.with_suffix(".npz"))))
    except HybridcError as error:
        bundle.with_suffix(".error").write_text(str(error))
    else:
        np.savez(bundle.with_suffix(".outputs.npz"), **outputs)


if __name__ == "__main__":
    machine.cpu_flags = lambda: FLAGS
    for path in sorted(Path(sys.argv[1]).iterdir()):
        if path.suffix in (".hyb", ".bundle"):
            run(path)
