"""The runtime's libraries, for all targets.

TVM's: this machine's out of the installed wheel, another architecture's out of that architecture's
wheel of the same version, fetched once and kept in the user's cache. And our own for OpenCL, which
is built from source. Any target of a plan may be asked for any of them.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import tempfile
import zipfile
from importlib.metadata import version
from pathlib import Path

from hybridc.bundle.files import replacing
from hybridc.errors import DeviceError

PACKAGE = "apache-tvm"
OPENCL_STEM = "hybridc_opencl"
_PLATFORMS = ("manylinux_2_28", "manylinux_2_27", "manylinux2014", "manylinux_2_17")


def runtime_library(stem: str, architecture: str) -> bytes:
    """Bytes of ``lib<stem>.so`` for an architecture.

    Raises:
        DeviceError: The wheel for the architecture cannot be had, or the library not be built.
    """
    if stem == OPENCL_STEM:
        from hybridc.targets.opencl.plugin import plugin

        return plugin(architecture).read_bytes()
    if architecture == platform.machine():
        import tvm

        return (Path(tvm.__file__).parent / "lib" / f"lib{stem}.so").read_bytes()
    cached = cache_folder() / f"{PACKAGE}-{version(PACKAGE)}-{architecture}" / f"lib{stem}.so"
    if not cached.exists():
        _fetch(cached, architecture)
    return cached.read_bytes()


def cache_folder() -> Path:
    """Where hybridc keeps what it can make or fetch again."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "hybridc"


def _fetch(cached: Path, architecture: str) -> None:
    with tempfile.TemporaryDirectory(prefix="hybridc-") as folder:
        wheel = _download(Path(folder), architecture)
        with zipfile.ZipFile(wheel) as archive:
            data = archive.read(f"tvm/lib/{cached.name}")
    cached.parent.mkdir(parents=True, exist_ok=True)
    with replacing(cached) as beside:
        beside.write_bytes(data)


def _download(folder: Path, architecture: str) -> Path:
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--dest",
        str(folder),
    ]
    command += ["--only-binary", ":all:", "--python-version", "3.12"]
    for platform_tag in _PLATFORMS:
        command += ["--platform", f"{platform_tag}_{architecture}"]
    command.append(f"{PACKAGE}=={version(PACKAGE)}")
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if result.returncode or not wheels:
        reason = (result.stderr.strip().splitlines() or ["pip gave no reason"])[-1]
        raise DeviceError(
            f"the TVM runtime for {architecture} comes out of the {PACKAGE} wheel for it, which "
            f"could not be fetched: {reason}"
        )
    return wheels[0]
