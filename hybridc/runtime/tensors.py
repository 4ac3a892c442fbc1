"""Between numpy arrays and tvm_ffi tensors, without copies where that is possible."""

from __future__ import annotations

from typing import Any

import numpy as np
import tvm_ffi

from hybridc.bundle.dtypes import NARROW, carrier, dtype_named
from hybridc.bundle.tensors import Array


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
    if array.dtype.name not in NARROW:
        return tvm_ffi.from_dlpack(array)
    tensor = tvm_ffi.from_dlpack(array.view(carrier(array.dtype)))
    return _with_dtype(tensor, array.dtype.name)


def to_array(tensor: Any) -> Any:
    """An array over a host tensor's memory; what is no tensor is given back as it is."""
    if not isinstance(tensor, tvm_ffi.Tensor):
        return tensor
    name = str(tensor.dtype)
    if name not in NARROW:
        return np.from_dlpack(tensor)
    dtype = dtype_named(name)
    return np.from_dlpack(_with_dtype(tensor, carrier(dtype).name)).view(dtype)


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
