"""Results in pinned memory: host memory that a GPU writes to by itself, at the speed of its bus.

What is copied to other memory goes through a staging buffer of the driver's and is then copied
once more. Pinning takes long, so memory is kept: an array over it gives it back when it is
collected, and the next result of that size takes it.
"""

from __future__ import annotations

import ctypes
import math
from typing import Any

import numpy as np

from hybridc.runtime.tensors import HOST, copy, is_cuda, move, place_of, synchronize, to_tensor

TYPES = ("float16", "float32", "float64", "int8", "int32", "int64", "uint8")
"""Types of such results; others are copied to other memory."""

MIN_BYTES = 64 * 1024
"""Smaller results gain nothing."""

MAX_BYTES = 256 * 1024 * 1024
"""Most bytes that one executor pins; what goes beyond is copied to other memory."""


class PinnedMemory:
    """Pinned memory of one executor."""

    def __init__(self) -> None:
        self._free: dict[int, list[int]] = {}
        self._taken = 0
        self._runtime = ctypes.CDLL(None)  # where the loader brought CUDA's

    def received(self, tensor: Any) -> Any:
        """A device's tensor as one in host memory, pinned where that is faster."""
        place = place_of(tensor)
        name = str(tensor.dtype)
        if not is_cuda(place) or name not in TYPES:
            return move(tensor, HOST)
        dtype = np.dtype(name)
        size = math.prod(map(int, tensor.shape)) * dtype.itemsize
        address = self._take(size) if size >= MIN_BYTES else None
        if address is None:
            return move(tensor, HOST)
        memory = np.asarray(_Block(self, address, size))
        arrived = to_tensor(memory.view(dtype).reshape(tuple(map(int, tensor.shape))))
        copy(tensor, arrived)
        synchronize(place)
        return arrived

    def give_back(self, address: int, size: int) -> None:
        """Keep memory for the next array of its size."""
        self._free.setdefault(size, []).append(address)

    def _take(self, size: int) -> int | None:
        try:
            return self._free.setdefault(size, []).pop()
        except IndexError:
            pass
        if self._taken + size > MAX_BYTES:
            return None
        address = ctypes.c_void_p()
        if self._runtime.cudaMallocHost(ctypes.byref(address), ctypes.c_size_t(size)):
            self._runtime.cudaGetLastError()  # which nobody else shall find
            return None
        self._taken += size
        return address.value

    def __del__(self) -> None:
        for addresses in self._free.values():
            for address in addresses:
                self._runtime.cudaFreeHost(ctypes.c_void_p(address))


class _Block:
    """Bytes of pinned memory as numpy takes them; every array over them refers to this object."""

    def __init__(self, owner: PinnedMemory, address: int, size: int) -> None:
        self.__array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }
        self._place = (address, size)
        self._owner = owner

    def __del__(self) -> None:
        self._owner.give_back(*self._place)
