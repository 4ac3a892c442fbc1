"""From CUDA source to device code, with nvcc or, where that is missing, with NVRTC."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from hybridc.targets.cuda.nvrtc import compile_with_nvrtc, find_nvrtc

from hybridc.errors import DeviceError, InternalError


def compile_source(source: str, architectures: Sequence[str]) -> bytes:
    """Compile kernels.

    Args:
        source: CUDA C++.
        architectures: Such as ``sm_90``, in rising order.

    Returns:
        A fat binary with machine code for each architecture and PTX of the newest; machine code
        alone if NVRTC made it.

    Raises:
        DeviceError: There is no compiler here, or NVRTC is asked for several architectures.
    """
    nvcc = find_nvcc()
    if nvcc is not None:
        return _compile_with_nvcc(nvcc, source, architectures)
    if find_nvrtc() is None:
        raise DeviceError(
            "no CUDA compiler is installed; install the CUDA toolkit, version 13, or run: "
            "pip install 'hybridc[cuda-compiler]'"
        )
    return compile_with_nvrtc(source, architectures)


def find_nvcc() -> str | None:
    """Path of nvcc: in ``$CUDA_HOME``, on the path, or where the toolkit installs itself."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    places = [f"{home}/bin/nvcc"] if home else []
    found = (shutil.which(name) for name in (*places, "nvcc", "/usr/local/cuda/bin/nvcc"))
    return next(filter(None, found), None)


def _compile_with_nvcc(nvcc: str, source: str, architectures: Sequence[str]) -> bytes:
    with tempfile.TemporaryDirectory(prefix="hybridc-") as folder:
        text, binary = Path(folder) / "part.cu", Path(folder) / "part.fatbin"
        text.write_text(source, encoding="utf-8")
        command = [nvcc, "--fatbin", "-O3", "-std=c++17", "-w", *_code_options(architectures)]
        # In the source's folder and by its bare name, since nvcc writes the path into its output.
        result = subprocess.run(
            [*command, "-o", binary.name, text.name],
            capture_output=True,
            text=True,
            check=False,
            cwd=folder,
        )
        if result.returncode:
            raise InternalError(f"nvcc refused a kernel:\n{result.stderr.strip()[-4000:]}")
        return binary.read_bytes()


def _code_options(architectures: Sequence[str]) -> list[str]:
    options = []
    for name in architectures:
        options.append(f"-gencode=arch={name.replace('sm_', 'compute_')},code={name}")
    newest = architectures[-1].replace("sm_", "compute_")
    return [*options, f"-gencode=arch={newest},code={newest}"]
