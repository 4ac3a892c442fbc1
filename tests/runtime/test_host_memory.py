"""Memory for what comes from devices: it comes back when nothing refers to it, and no sooner."""

from __future__ import annotations

import ctypes
import gc

import numpy as np
import pytest

from hybridc.runtime import host_memory
from hybridc.runtime.host_memory import MIN_PINNED_BYTES, HostMemory
from hybridc.runtime.tensors import to_array, to_tensor

SIZE = MIN_PINNED_BYTES // 4


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
    monkeypatch.setattr(host_memory.ctypes, "CDLL", lambda _: found)
    monkeypatch.setattr(host_memory, "is_cuda", lambda _: True)
    monkeypatch.setattr(host_memory, "synchronize", lambda _: None)
    return found


def received(memory, values):
    return to_array(memory.received(to_tensor(values)))


def test_an_array_keeps_its_memory(runtime):
    memory = HostMemory()
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
    memory = HostMemory()
    values = np.ones(SIZE, "float32")
    for _ in range(5):
        received(memory, values)
        gc.collect()
    assert len(runtime.memory) == 1


def test_all_is_freed(runtime):
    memory = HostMemory()
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
    memory = HostMemory()
    monkeypatch.setattr(host_memory, "move", lambda tensor, _: tensor)
    received(memory, np.ones(8, "float32"))
    assert not runtime.memory
    monkeypatch.setattr(host_memory, "MAX_PINNED_BYTES", 3 * MIN_PINNED_BYTES)
    kept = [received(memory, np.ones(SIZE, "float32")) for _ in range(5)]
    assert len(runtime.memory) == 3
    assert all(array.sum() == SIZE for array in kept)


@pytest.fixture
def plain(monkeypatch):
    """Small tensors of a device without pinned memory count as large ones."""
    monkeypatch.setattr(host_memory, "MIN_BYTES", 1024)
    monkeypatch.setattr(host_memory, "is_cuda", lambda _: False)


def address_of(array):
    return array.__array_interface__["data"][0]


def test_large_results_of_other_devices_use_memory_again(plain):
    memory, values = HostMemory(), np.arange(SIZE, dtype="float32")
    first = received(memory, values)
    second = received(memory, 2 * values)
    assert np.array_equal(first, values)
    assert np.array_equal(second, 2 * values)
    addresses = {address_of(first), address_of(second)}
    assert all(address % 64 == 0 for address in addresses)
    del first, second
    gc.collect()
    again = [received(memory, values * factor) for factor in (3, 4)]
    assert {address_of(array) for array in again} == addresses
    del memory
    gc.collect()
    assert np.array_equal(again[1], 4 * values)


def test_no_more_is_kept_than_was_in_use_at_once(plain):
    memory = HostMemory()
    kept = [received(memory, np.full(SIZE, number, "float32")) for number in range(3)]
    del kept
    gc.collect()
    assert memory.unused_bytes == 3 * 4 * SIZE
    other = received(memory, np.ones(2 * SIZE, "float32"))
    assert memory.unused_bytes == 4 * SIZE
    kept = [received(memory, np.full(SIZE, number, "float32")) for number in range(2)]
    assert memory.unused_bytes == 0
    assert [array[0] for array in (*kept, other)] == [0, 1, 1]
    del kept, other
    gc.collect()
    assert memory.unused_bytes == 4 * 4 * SIZE


def test_sizes_that_change_do_not_pile_up(plain):
    memory = HostMemory()
    for size in range(SIZE, SIZE + 2000, 100):
        assert received(memory, np.ones(size, "float32")).sum() == size
        gc.collect()
        assert memory.unused_bytes == 4 * size


def test_what_cannot_be_pinned_is_kept_all_the_same(runtime, monkeypatch):
    monkeypatch.setattr(host_memory, "MIN_BYTES", 1024)
    monkeypatch.setattr(host_memory, "MAX_PINNED_BYTES", 4 * SIZE)
    memory = HostMemory()
    kept = [received(memory, np.full(SIZE, number, "float32")) for number in range(3)]
    assert len(runtime.memory) == 1
    assert [array[0] for array in kept] == [0, 1, 2]
    del kept
    gc.collect()
    assert memory.unused_bytes == 2 * 4 * SIZE
