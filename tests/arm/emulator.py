"""AArch64 by emulation: bundles that are built here run under qemu, with the loader alone."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from pathlib import Path

import numpy as np

import hybridc

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path(os.environ.get("HYBRIDC_ARM", ROOT / ".cache" / "arm"))
QEMU = shutil.which("qemu-aarch64")

Array = np.ndarray


def why_not() -> str | None:
    """Why nothing can be emulated here; ``None`` if it can."""
    if platform.machine() != "x86_64":
        return "emulation is for x86-64 machines"
    if QEMU is None:
        return "qemu-aarch64 is not installed"
    if not (FOLDER / "finished").exists():
        return f"{FOLDER} was not made by tests/arm/prepare.sh"
    return None


def run_all(folder: Path) -> None:
    """Run all bundles of a folder in one emulated process; see :mod:`tests.arm.run`."""
    source = Path(hybridc.__file__).resolve().parent.parent
    paths = [str(source), str(FOLDER / "site")]
    environment = {
        "QEMU_LD_PREFIX": str(FOLDER / "root"),
        "PYTHONPATH": ":".join(paths),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    python = FOLDER / "root" / "usr" / "bin" / "python3"
    script = Path(__file__).with_name("run.py")
    subprocess.run([str(QEMU), str(python), "-S", script, folder], check=True, env=environment)


def outputs_of(bundle: Path) -> dict[str, Array]:
    """What a bundle gave.

    Raises:
        AssertionError: It could not be run.
    """
    error = bundle.with_suffix(".error")
    assert not error.exists(), error.read_text()
    return dict(np.load(bundle.with_suffix(".outputs.npz")))
