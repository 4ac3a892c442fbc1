"""NVRTC, CUDA's compiler as a library, out of the package ``nvidia-cuda-nvrtc``.

It makes machine code for one architecture at a time, and no fat binaries.

Sources include two headers of CUDA's C++ library for a few names. These take two seconds to
read, fifty times as long as a small kernel takes to compile, so NVRTC gets headers with these names
alone in their place.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from pathlib import Path

from hybridc.errors import DeviceError, InternalError
from hybridc.runtime.cuda import find_runtime, package_folders

_LIBRARY = "libnvrtc.so.13"

_DEFINED = ("--define-macro=__builtin_memcpy=memcpy",)
"""What nvcc has beyond NVRTC, of all that sources use."""

_HEADERS = {
    "cuda/std/cstdint": """
#pragma once
namespace cuda { namespace std {
  typedef unsigned char uint8_t;
  typedef unsigned short uint16_t;
  typedef unsigned int uint32_t;
  typedef unsigned long long uint64_t;
  typedef signed char int8_t;
  typedef short int16_t;
  typedef int int32_t;
  typedef long long int64_t;
}}
""",
    "cuda/std/type_traits": """
#pragma once
namespace cuda { namespace std {
  template <bool V> struct bool_constant { static constexpr bool value = V; };
  template <class A, class B> struct is_same : bool_constant<false> {};
  template <class A> struct is_same<A, A> : bool_constant<true> {};
  template <class A, class B> constexpr bool is_same_v = is_same<A, B>::value;
  template <class A, class... B> constexpr bool is_any = (is_same_v<A, B> || ...);
  template <class A> constexpr bool has_sign =
    is_any<A, signed char, short, int, long, long long> || (is_same_v<A, char> && char(-1) < 0);
  template <class A> constexpr bool is_real = is_any<A, float, double>;
  template <class A> struct is_integral : bool_constant<has_sign<A> || is_any<
    A, bool, char, unsigned char, unsigned short, unsigned, unsigned long, unsigned long long>> {};
  template <class A> struct is_signed : bool_constant<has_sign<A> || is_real<A>> {};
  template <class A> struct is_unsigned : bool_constant<is_integral<A>::value && !has_sign<A>> {};
  template <class A> struct is_floating_point : bool_constant<is_real<A>> {};
  template <bool C, class A = void> struct enable_if {};
  template <class A> struct enable_if<true, A> { typedef A type; };
  template <bool C, class A, class B> struct conditional { typedef A type; };
  template <class A, class B> struct conditional<false, A, B> { typedef B type; };
}}
""",
}
"""Content of headers by the names that they are included by: all that sources use of them."""


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
    return _Program(load_nvrtc(library), source).compile(architectures[0])


def load_nvrtc(library: str) -> ctypes.CDLL:
    """The library, with its other half, which some versions look for in the system alone."""
    path = Path(library)
    if path.is_absolute():  # what the system knows by its name alone lies in no folder of ours
        for other in sorted(path.parent.glob("libnvrtc-builtins.so.*")):
            ctypes.CDLL(str(other))
    return ctypes.CDLL(library)


class _Program:
    """One program of NVRTC's."""

    def __init__(self, library: ctypes.CDLL, source: str) -> None:
        self._library = library
        self._handle = ctypes.c_void_p()
        names, contents = (_strings(words) for words in (_HEADERS, _HEADERS.values()))
        self._call(
            "nvrtcCreateProgram",
            ctypes.byref(self._handle),
            source.encode(),
            b"part.cu",
            len(_HEADERS),
            contents,
            names,
        )

    def compile(self, architecture: str) -> bytes:
        options = [f"--gpu-architecture={architecture}", "--std=c++17", "-w", *_DEFINED]
        options += [f"--include-path={folder}" for folder in _header_folders()]
        try:
            status = self._library.nvrtcCompileProgram(
                self._handle, len(options), _strings(options)
            )
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


def _strings(words: Iterable[str]) -> ctypes.Array[ctypes.c_char_p]:
    """Texts as an array of C."""
    encoded = [word.encode() for word in words]
    return (ctypes.c_char_p * len(encoded))(*encoded)


def _header_folders() -> list[Path]:
    """Where CUDA's headers are: in packages, or in an installed toolkit."""
    folders = [*package_folders("include"), Path("/usr/local/cuda/include")]
    inner = [folder / "cccl" for folder in folders]
    return [folder for folder in (*folders, *inner) if folder.is_dir()]
