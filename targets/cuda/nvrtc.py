"""NVRTC, CUDA's compiler as a library, out of the package ``nvidia-cuda-nvrtc``.

It makes machine code for one architecture at a time, and no fat binaries.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path

from hybridc.errors import DeviceError, InternalError
from hybridc.runtime.cuda import find_runtime, package_folders

_LIBRARY = "libnvrtc.so.13"


def find_nvrtc() -> str | None:
    """Path of the library, or its name if the system knows it; ``None`` if there is none."""
    return find_runtime(_LIBRARY)


def compile_with_nvrtc(source: str, architectures: Sequence[str]) -> bytes:
    """Machine code for one architecture.

    Raises:
        DeviceError: There are several architectures.
    """
    if len(architectures) != 1:
        raise DeviceError(
            "NVRTC makes code for one architecture at a time; name one, as in --target "
            "cuda:sm_90, or install the CUDA toolkit"
        )
    library = find_nvrtc()
    assert library is not None
    return _Program(ctypes.CDLL(library), source).compile(architectures[0])


class _Program:
    """One program of NVRTC's."""

    def __init__(self, library: ctypes.CDLL, source: str) -> None:
        self._library = library
        self._handle = ctypes.c_void_p()
        text = source.encode()
        self._call(
            "nvrtcCreateProgram", ctypes.byref(self._handle), text, b"part.cu", 0, None, None
        )

    def compile(self, architecture: str) -> bytes:
        options = [f"--gpu-architecture={architecture}", "--std=c++17", "-w"]
        options += [f"--include-path={folder}" for folder in _header_folders()]
        array = (ctypes.c_char_p * len(options))(*[option.encode() for option in options])
        try:
            status = self._library.nvrtcCompileProgram(self._handle, len(options), array)
            if status:
                raise InternalError(f"NVRTC refused a kernel:\n{self._read('ProgramLog')}")
            return self._bytes("CUBIN")
        finally:
            self._library.nvrtcDestroyProgram(ctypes.byref(self._handle))

    def _call(self, name: str, *arguments: object) -> None:
        status = getattr(self._library, name)(*arguments)
        if status:
            raise InternalError(f"{name} failed with status {status}")

    def _bytes(self, what: str) -> bytes:
        size = ctypes.c_size_t()
        self._call(f"nvrtcGet{what}Size", self._handle, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        self._call(f"nvrtcGet{what}", self._handle, buffer)
        return buffer.raw

    def _read(self, what: str) -> str:
        return self._bytes(what).decode(errors="replace")[-4000:]


def _header_folders() -> list[Path]:
    """Where CUDA's headers are: in packages, or in an installed toolkit."""
    folders = [*package_folders("include"), Path("/usr/local/cuda/include")]
    inner = [folder / "cccl" for folder in folders]
    return [folder for folder in (*folders, *inner) if folder.is_dir()]
