"""Sizes that no tensor can have: below zero, or beyond any memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from tvm import relax

from hybridc.frontend.limits import MAX_RANK, MAX_TENSOR_BYTES
from hybridc.lowering.call import Call, Invalid, dtype_of, shape_of
from hybridc.lowering.value import Constant, Integers, Narrow, Value

MAX_CONSTANT_BYTES = 1 << 31
"""Bytes of a result that depends on constants only; TVM computes it while compiling."""


def check_sizes(call: Call, results: tuple[Value, ...]) -> None:
    """Refuse results that cannot exist; dimensions that are not known are left to the run.

    Raises:
        Invalid: Says which shape a result has.
    """
    constant = all(isinstance(_bytes(value), Constant | Integers | None) for value in call.inputs)
    for result in results:
        _check(_bytes(result), MAX_CONSTANT_BYTES if constant else MAX_TENSOR_BYTES)


def shape_fault(dims: Sequence[int], item_bytes: float, most: int) -> str | None:
    """Why a tensor cannot exist; ``None`` if it can.

    Args:
        dims: The dimensions that are known.
        item_bytes: Bytes of an element.
        most: Bytes that it may have.
    """
    if any(dim < 0 for dim in dims):
        return f"would have the shape {list(dims)}"
    if math.prod(dims) * item_bytes > most:
        return f"of shape {list(dims)} has more than {most >> 30} GiB"
    return None


def _bytes(value: Value) -> Value:
    return value.codes if isinstance(value, Narrow) else value


def _check(value: Value, most: int) -> None:
    kind: Any = getattr(value, "ty", None)
    if not isinstance(kind, relax.TensorType) or kind.shape is None:
        return
    shape = shape_of(value)
    if len(shape) > MAX_RANK:
        raise Invalid(f"its result has more than {MAX_RANK} dimensions")
    dims = [dim for dim in shape if isinstance(dim, int)]
    fault = shape_fault(dims, _item_bytes(dtype_of(value)), most)
    if fault is not None:
        raise Invalid(f"its result {fault}")


def _item_bytes(dtype: str) -> int:
    try:
        return np.dtype(dtype).itemsize
    except TypeError:  # of ml_dtypes, which are of one or two bytes
        return 1
