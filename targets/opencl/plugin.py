"""The plug-in that lets TVM's runtime use OpenCL: built from source once, and kept.

The C++ files in ``native/`` are compiled with this machine's compiler against the headers that
come with TVM, when the first bundle is compiled. The library goes into the user's cache, under a
name that says what it was made of.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import shutil
import subprocess
import tempfile
from importlib.metadata import version
from pathlib import Path

from hybridc.targets.llvm.runtime_library import OPENCL_STEM, cache_folder

from hybridc.errors import DeviceError, InternalError

_FLAGS = (
    "-std=c++17",
    "-O2",
    "-fPIC",
    "-shared",
    "-fvisibility=hidden",
    "-Wl,--build-id=none",
    "-s",
)


def plugin(architecture: str) -> Path:
    """Path of the plug-in for a host, built if it is not there yet; takes about ten seconds.

    Raises:
        DeviceError: No C++ compiler for the architecture, or no OpenCL header, is installed.
    """
    compiler = compiler_for(architecture)
    if compiler is None:
        package = "g++" if architecture == platform.machine() else f"g++-{_dashed(architecture)}"
        raise DeviceError(
            f"the opencl target builds a library for {architecture} and no C++ compiler for it is "
            f"installed; run: apt-get install {package} opencl-c-headers"
        )
    path = built_path(architecture)
    if not path.exists():
        _build(compiler, path)
    return path


def compiler_for(architecture: str) -> str | None:
    """The C++ compiler for a host; ``None`` if there is none."""
    native = architecture == platform.machine()
    names = ("c++", "g++", "clang++") if native else (f"{architecture}-linux-gnu-g++",)
    return next((name for name in names if shutil.which(name)), None)


def built_path(architecture: str) -> Path:
    """Where the plug-in of these sources, for this TVM, is once it is built."""
    digest = hashlib.sha256(repr(_FLAGS).encode())
    for package in ("apache-tvm", "apache-tvm-ffi"):
        digest.update(version(package).encode())
    for source in sorted(_sources().iterdir()):
        digest.update(source.name.encode() + source.read_bytes())
    folder = f"opencl-plugin-{architecture}-{digest.hexdigest()[:16]}"
    return cache_folder() / folder / f"lib{OPENCL_STEM}.so"


def _build(compiler: str, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    includes = [f"-isystem{_package(name) / 'include'}" for name in ("tvm", "tvm_ffi")]
    files = [source.name for source in sorted(_sources().glob("*.cc"))]
    with tempfile.TemporaryDirectory(prefix="hybridc-", dir=path.parent) as folder:
        output = Path(folder) / path.name
        command = [compiler, *_FLAGS, *includes, "-o", str(output), *files, "-ldl", "-s"]
        result = subprocess.run(
            command, capture_output=True, text=True, check=False, cwd=_sources()
        )
        if "CL/cl.h" in result.stderr:
            raise DeviceError(
                "the opencl target builds a library and the OpenCL headers are not installed; "
                "run: apt-get install opencl-c-headers"
            )
        if result.returncode:
            raise InternalError(f"{compiler} refused the plug-in:\n{result.stderr.strip()[-4000:]}")
        os.replace(output, path)


def _sources() -> Path:
    return Path(__file__).parent / "native"


def _package(name: str) -> Path:
    """The folder of an installed package, without importing it."""
    specification = importlib.util.find_spec(name)
    if specification is None or specification.origin is None:
        raise DeviceError(f"the opencl target needs {name}; run: pip install 'hybridc[compiler]'")
    return Path(specification.origin).parent


def _dashed(architecture: str) -> str:
    return f"{architecture.replace('_', '-')}-linux-gnu"
