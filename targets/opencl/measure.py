"""Measuring kernels on an OpenCL device of the compiling machine."""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Mapping
from dataclasses import replace

import tvm
import tvm_ffi
from hybridc.targets.gpu.tunable import Bench
from hybridc.targets.gpu.tunable_convolutions import Convolutions, tunable_module
from hybridc.targets.opencl.build import build_kernels, make_kernels
from hybridc.targets.opencl.devices import parse_devices
from hybridc.targets.opencl.plugin import plugin
from hybridc.targets.protocol import Device
from hybridc.targets.tuning import TunableKernel, Tuning

from hybridc.bundle.tensors import Array
from hybridc.runtime.opencl import OpenclDevice, choose
from hybridc.runtime.parts import place_of_kind


def measuring_device(device: Device) -> OpenclDevice:
    """The device that would run what is built, were the bundle loaded here.

    Raises:
        OpenclError: There is none.
    """
    return choose(parse_devices(device.specification).device_code, device.name)


def tunable(
    module: tvm.IRModule,
    weights: Mapping[str, Array],
    device: Device,
    strict_math: bool = False,
    at_once: int = 1,
) -> list[TunableKernel]:
    """The kernels of a lowered module, to be measured on this machine's device.

    Args:
        module: What is compiled.
        weights: Its weights.
        device: The device in the plan.
        strict_math: Whether kernels may change sums in nothing but their order.
        at_once: Calls in a row.

    Raises:
        DeviceError: There is no device, or the plug-in cannot be built.
    """
    devices = replace(parse_devices(device.specification), strict_math=strict_math)
    place = (place_of_kind(device.kind)[0], measuring_device(device).index)
    _load_plugin()

    def build(kernels: tvm.IRModule, tuning: Tuning) -> bytes:
        return build_kernels(kernels, replace(devices, tuning=tuning))[0]

    def fuse(
        module: tvm.IRModule, weights: Mapping[str, Array], tuning: Tuning
    ) -> tuple[tvm.IRModule, Mapping[str, Array]]:
        return make_kernels(module, weights, replace(devices, tuning=tuning))

    bench = Bench(build, devices.target, devices.limits, place, at_once)
    return tunable_module(module, weights, Convolutions(fuse, bench))


def _load_plugin() -> None:
    """Bring the plug-in into the process, unless TVM or a loaded bundle did."""
    if tvm_ffi.get_global_func("device_api.opencl", allow_missing=True) is None:
        ctypes.CDLL(str(plugin(platform.machine())), ctypes.RTLD_GLOBAL)
