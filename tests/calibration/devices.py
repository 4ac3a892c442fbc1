"""Devices of tests: two to measure, and profiles of a CPU and of one with memory of its own."""

import dataclasses

from hybridc.cost_models.device import DeviceProfile, MemoryLevel
from hybridc.cost_models.link import Route

CPU = DeviceProfile(
    "cpu", "calibrated", "", {"float32": 1e9}, (MemoryLevel("memory", 10**9, 1e9),), 1e-6
)
GPU = dataclasses.replace(
    CPU, in_host_memory=False, to_host=Route(1e-5, 1e9), from_host=Route(2e-5, 1e9)
)

TARGETS = ("--target", "llvm:0", "--target", "llvm:1")
"""Options for two devices of the same code."""
