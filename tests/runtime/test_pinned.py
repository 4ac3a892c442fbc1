"""Results in pinned memory: it comes back when nothing refers to it, and no sooner."""

from __future__ import annotations

import ctypes
import gc

import numpy as np
import pytest

from hybridc.runtime import pinned
from hybridc.runtime.pinned import MIN_BYTES, PinnedMemory
from hybridc.runtime.tensors import to_array, to_tensor

SIZE = MIN_BYTES // 4


class Runtime:
    """CUDA's functions over plain memory."""

    def __init__(self):
        self.memory = {}

    def cudaMallocHost(self, address, size):
        memory = ctypes.create_string_buffer(size.value)
        address._obj.value = ctypes.addressof(memory)
        self.memory[address._obj.value] = memory
        return 0

    def cudaFreeHost(self, address):
        del self.memory[address.value]


@pytest.fixture
def runtime(monkeypatch):
    found = Runtime()
    monkeypatch.setattr(pinned.ctypes, "CDLL", lambda _: found)
    monkeypatch.setattr(pinned, "is_cuda", lambda _: True)
    monkeypatch.setattr(pinned, "synchronize", lambda _: None)
    return found


def received(memory, values):
    return to_array(memory.received(to_tensor(values)))


def test_an_array_keeps_its_memory(runtime):
    memory = PinnedMemory()
    values = np.arange(SIZE, dtype="float32").reshape(2, -1)
    first = received(memory, values)
    part = first[1, 3:]
    del first
    gc.collect()
    second = received(memory, -values)
    assert np.array_equal(part, values[1, 3:])
    assert np.array_equal(second, -values)
    assert len(runtime.memory) == 2


def test_memory_is_used_again(runtime):
    memory = PinnedMemory()
    values = np.ones(SIZE, "float32")
    for _ in range(5):
        received(memory, values)
        gc.collect()
    assert len(runtime.memory) == 1


def test_all_is_freed(runtime):
    memory = PinnedMemory()
    kept = received(memory, np.ones(SIZE, "float32"))
    received(memory, np.ones(2 * SIZE, "float32"))
    del memory
    gc.collect()
    assert runtime.memory
    assert kept.sum() == SIZE
    del kept
    gc.collect()
    assert not runtime.memory


def test_small_and_very_many_results_stay_in_other_memory(runtime, monkeypatch):
    memory = PinnedMemory()
    monkeypatch.setattr(pinned, "move", lambda tensor, _: tensor)
    received(memory, np.ones(8, "float32"))
    assert not runtime.memory
    monkeypatch.setattr(pinned, "MAX_BYTES", 3 * MIN_BYTES)
    kept = [received(memory, np.ones(SIZE, "float32")) for _ in range(5)]
    assert len(runtime.memory) == 3
    assert all(array.sum() == SIZE for array in kept)
