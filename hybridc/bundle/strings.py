"""Tensors of strings as tensors of bytes, which safetensors can hold.

A tensor of strings is stored in UTF-8 with one more axis, each string filled up with zero bytes to
the length of the longest. Zero bytes at the end of a string are lost.
"""

from __future__ import annotations

import numpy as np

from hybridc.bundle.tensors import Array


def pack_strings(array: Array) -> Array:
    """Strings of any shape as ``uint8[..., length]``."""
    texts = np.char.encode(array.astype(str), "utf-8")
    width = max(texts.dtype.itemsize, 1)
    flat = np.ascontiguousarray(texts.astype(f"S{width}")).reshape(-1)
    return flat.view(np.uint8).reshape((*array.shape, width))


def unpack_strings(packed: Array) -> Array:
    """What :func:`pack_strings` was given, as an array of ``str`` objects."""
    width = packed.shape[-1]
    flat = np.ascontiguousarray(packed).reshape(-1).view(f"S{width}")
    texts: Array = np.char.decode(flat, "utf-8").astype(object).reshape(packed.shape[:-1])
    return texts
