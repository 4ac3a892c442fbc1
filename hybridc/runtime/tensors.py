"""Between numpy arrays and tvm_ffi tensors, without copies where that is possible."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import tvm_ffi

from hybridc.bundle.dtypes import EXTENSIONS, NARROW, container, dtype_named, restored
from hybridc.bundle.tensors import Array

Place: TypeAlias = tuple[int, int]
"""Where a tensor is: DLPack's device type, and which device of that type."""

HOST: Place = (1, 0)
_KINDS = {1: "cpu", 2: "cuda", 4: "opencl"}


def to_tensor(array: Array) -> Any:
    """A tensor over an array's memory.

    An array that is not contiguous or not writable is copied: DLPack cannot carry a read-only
    flag to TVM.
    """
    flags = array.flags
    if not array.size:
        array = _compact(array)
    elif not (flags.c_contiguous and flags.writeable):
        array = np.array(array, order="C", copy=True)
    if array.dtype.name not in EXTENSIONS:
        return tvm_ffi.from_dlpack(array)
    tensor = tvm_ffi.from_dlpack(array.view(container(array.dtype)))
    return _with_dtype(tensor, array.dtype.name)


def to_array(tensor: Any, dtype: str = "") -> Any:
    """An array over a host tensor's memory; what is no tensor is given back as it is.

    Args:
        tensor: A tensor of any type that compiled code computes with.
        dtype: The narrow type whose carriers the tensor holds, if it does.
    """
    if not isinstance(tensor, tvm_ffi.Tensor):
        return tensor
    if dtype in NARROW:
        return restored(np.from_dlpack(tensor), dtype)
    name = str(tensor.dtype)
    if name not in EXTENSIONS:
        return np.from_dlpack(tensor)
    extension = dtype_named(name)
    return np.from_dlpack(_with_dtype(tensor, container(extension).name)).view(extension)


def float8_codes(tensor: Any) -> Array:
    """A host tensor of 8-bit floats as an array of their bit patterns."""
    return np.from_dlpack(_with_dtype(tensor, "uint8"))


def is_cuda(place: Place) -> bool:
    """Whether a place is an NVIDIA GPU."""
    return _KINDS.get(place[0]) == "cuda"


def place_of(tensor: Any) -> Place:
    """Where a tensor is."""
    kind, index = tensor.__dlpack_device__()
    return int(kind), int(index)


def allocate(like: Any, place: Place) -> Any:
    """A tensor of the shape and type of another, with new memory."""
    make = tvm_ffi.get_global_func("runtime.TVMTensorAllocWithScope")
    device = tvm_ffi.device(_KINDS[place[0]], place[1])
    return make(tvm_ffi.Shape(like.shape), like.dtype, device, None)  # no special memory scope


def copy(source: Any, destination: Any) -> None:
    """Copy a tensor's contents to one of the same shape and type, perhaps on another device.

    The contents have arrived when a copy to the host returns.
    """
    tvm_ffi.get_global_func("runtime.TVMTensorCopyFromTo")(source, destination)


def move(tensor: Any, place: Place) -> Any:
    """A tensor at a place: itself if it is there, else a copy."""
    if place_of(tensor) == place:
        return tensor
    moved = allocate(tensor, place)
    copy(tensor, moved)
    return moved


def synchronize(place: Place) -> None:
    """Wait until a device has done what it was given; the host has always."""
    if place != HOST:
        device = tvm_ffi.device(_KINDS[place[0]], place[1])
        tvm_ffi.get_global_func("runtime.Device_StreamSync")(device, 0)


def _with_dtype(tensor: Any, dtype: str) -> Any:
    """The same memory under another element type of the same size."""
    view = tvm_ffi.get_global_func("runtime.TVMTensorCreateView")
    return view(tensor, tvm_ffi.Shape(tensor.shape), tvm_ffi.dtype(dtype), 0)


def _compact(array: Array) -> Array:
    """An array without elements like ``array``, with the strides that TVM expects of it."""
    strides, step = [], array.itemsize
    for dim in reversed(array.shape):
        strides.append(step)
        step *= dim
    memory = bytearray(array.itemsize)
    compact: Array = np.ndarray(array.shape, array.dtype, memory, 0, strides[::-1])
    return compact
