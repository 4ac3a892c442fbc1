"""Host memory for what comes from devices: kept, and pinned where that is faster.

New memory for a large tensor takes several times as long as the copy to it, since the system maps
and clears each page; what is pinned takes longer still. So memory is kept: an array over it gives
it back when it is collected, and the next tensor of that size takes it. What is kept and what is in
use are together no more than was in use at once before.

A GPU of NVIDIA's writes to pinned memory by itself, at the speed of its bus. What it copies to
other memory goes through a staging buffer of the driver's and is then copied once more.
"""

from __future__ import annotations

import ctypes
import math
import threading
from dataclasses import dataclass
from typing import Any

import numpy as np

from hybridc.bundle.tensors import ALIGNMENT
from hybridc.runtime.tensors import HOST, copy, is_cuda, move, place_of, synchronize, to_tensor

TYPES = ("float16", "float32", "float64", "int8", "int32", "int64", "uint8")
"""Types of such tensors; others are copied to new memory."""

MIN_PINNED_BYTES = 64 * 1024
"""Smaller tensors gain nothing from pinned memory."""

MAX_PINNED_BYTES = 256 * 1024 * 1024
"""Most bytes that one executor pins."""

MIN_BYTES = 16 * 1024 * 1024
"""Smaller tensors get memory that the process has had before anyway, up to 32 MiB with glibc."""


@dataclass(frozen=True)
class _Memory:
    """A piece of memory.

    Attributes:
        address: Where it begins.
        size: Its bytes.
        holder: What keeps it alive; ``None`` for pinned memory, which CUDA's runtime holds.
    """

    address: int
    size: int
    holder: Any = None


class HostMemory:
    """Memory of one executor."""

    def __init__(self) -> None:
        self._free: dict[tuple[int, bool], list[_Memory]] = {}
        self._pinned = 0
        self._used = 0
        self._peak = 0
        self._lock = threading.RLock()  # a collection may give back what this thread asks for
        self._runtime = ctypes.CDLL(None)  # where the loader brought CUDA's

    def received(self, tensor: Any) -> Any:
        """A device's tensor as one in host memory."""
        place = place_of(tensor)
        name = str(tensor.dtype)
        if name not in TYPES:
            return move(tensor, HOST)
        dtype, shape = np.dtype(name), tuple(map(int, tensor.shape))
        with self._lock:
            memory = self._memory(math.prod(shape) * dtype.itemsize, is_cuda(place))
        if memory is None:
            return move(tensor, HOST)
        array = np.asarray(_Block(self, memory)).view(dtype).reshape(shape)
        arrived = to_tensor(array)
        copy(tensor, arrived)
        synchronize(place)
        return arrived

    def _memory(self, size: int, for_cuda: bool) -> _Memory | None:
        """Memory of a size, pinned if it can be; ``None`` if new memory is as good."""
        if for_cuda and size >= MIN_PINNED_BYTES:
            pinned = self._kept(size, True) or self._pin(size)
            if pinned is not None:
                return pinned
        if size < MIN_BYTES:
            return None
        memory = self._kept(size, False)
        self._used += size
        if memory is None:
            self._peak = max(self._peak, self._used)
            self._drop(self._used + self.unused_bytes - self._peak)
            memory = _new_memory(size)
        return memory

    def _kept(self, size: int, is_pinned: bool) -> _Memory | None:
        pieces = self._free.get((size, is_pinned))
        return pieces.pop() if pieces else None

    def _pin(self, size: int) -> _Memory | None:
        if self._pinned + size > MAX_PINNED_BYTES:
            return None
        address = ctypes.c_void_p()
        if self._runtime.cudaMallocHost(ctypes.byref(address), ctypes.c_size_t(size)):
            self._runtime.cudaGetLastError()  # which nobody else shall find
            return None
        self._pinned += size
        assert address.value is not None
        return _Memory(address.value, size)

    def give_back(self, memory: _Memory) -> None:
        """Keep memory for the next tensor of its size."""
        is_pinned = memory.holder is None
        with self._lock:
            self._used -= 0 if is_pinned else memory.size
            self._free.setdefault((memory.size, is_pinned), []).append(memory)

    def _drop(self, excess: int) -> None:
        """Free so many bytes that are kept, those of the sizes first that came first."""
        for (size, is_pinned), pieces in list(self._free.items()):
            while excess > 0 and pieces and not is_pinned:
                pieces.pop()
                excess -= size

    @property
    def unused_bytes(self) -> int:
        """Bytes that are not pinned, and that nothing is in."""
        with self._lock:
            free = list(self._free.items())  # a collection may add to it
        return sum(size * len(pieces) for (size, pinned), pieces in free if not pinned)

    def __del__(self) -> None:
        for pieces in self._free.values():
            for memory in pieces:
                if memory.holder is None:
                    self._runtime.cudaFreeHost(ctypes.c_void_p(memory.address))


def _new_memory(size: int) -> _Memory:
    holder = np.empty(size + ALIGNMENT, np.uint8)
    address = holder.ctypes.data
    return _Memory(address + -address % ALIGNMENT, size, holder)


class _Block:
    """Bytes of memory as numpy takes them; every array over them refers to this object."""

    def __init__(self, owner: HostMemory, memory: _Memory) -> None:
        self.__array_interface__ = {
            "shape": (memory.size,),
            "typestr": "|u1",
            "data": (memory.address, False),
            "version": 3,
        }
        self._memory = memory
        self._owner = owner

    def __del__(self) -> None:
        self._owner.give_back(self._memory)
