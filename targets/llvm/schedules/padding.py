"""Padding in front of and behind spatial axes, recognized in the block that adds it."""

from __future__ import annotations

from typing import Any

import tvm
from hybridc.targets.llvm.schedules.blocks import (
    axes_of,
    collect,
    is_choice,
    is_spatial,
    loads_of,
    store_of,
)
from hybridc.targets.llvm.schedules.loops import Misfit
from tvm import tirx


def padding_of(block: Any, count: int) -> tuple[Any, tuple[int, ...], float | None]:
    """What a block pads along the ``count`` axes after the first two.

    Returns:
        The buffer that it reads, elements in front of each of these axes, and what they are filled
        with; nothing if the block only copies.

    Raises:
        Misfit: The block does something else.
    """
    store = store_of(block)
    loads = loads_of(block)
    if store is None or not is_spatial(block) or len(loads) != 1:
        raise Misfit("not padding")
    (load,) = loads
    axes, value, data = axes_of(block), store.value, load.source
    padded = range(2, 2 + count)
    straight = (i.same_as(a) for i, a in zip(load.indices, axes, strict=False))
    if len(load.indices) != len(axes) or not all(
        same or axis in padded for axis, same in enumerate(straight)
    ):
        raise Misfit("padding of images or channels")
    before = tuple(_offset(load.indices[i], axes[i]) for i in padded)
    if load.same_as(value):
        if any(before) or _sizes(store.buffer) != _sizes(data):
            raise Misfit("a copy that is not whole")
        return data, before, None
    return data, before, _fill(value, load, before, axes)


def _sizes(buffer: Any) -> list[int]:
    return [int(dim) for dim in buffer.shape]


def _offset(index: Any, axis: Any) -> int:
    """The constant k of ``axis - k``."""
    coefficients = tvm.sym.detect_linear_equation(index, [axis])
    if len(coefficients) != 2 or not all(isinstance(c, tirx.IntImm) for c in coefficients):
        raise Misfit("not affine padding")
    scale, base = map(int, coefficients)
    if scale != 1 or base > 0:
        raise Misfit("not padding")
    return -base


def _fill(value: Any, load: Any, before: tuple[int, ...], axes: list[Any]) -> float:
    """The constant that ``value`` is outside of the data; inside it must be the load."""
    if not is_choice(value):
        raise Misfit("not padding")
    condition, inside, outside = value.args
    if not inside.same_as(load) or not isinstance(outside, tirx.FloatImm):
        raise Misfit("not padding with a constant")
    low: list[int] = [0 for _ in before]
    high: list[int | None] = [None for _ in before]
    for comparison in collect(condition, tirx.LT, tirx.LE, tirx.GT, tirx.GE, tirx.Or, tirx.Not):
        if not isinstance(comparison, tirx.LT | tirx.LE):
            raise Misfit("an unexpected condition")
        _narrow(comparison, axes[2 : 2 + len(before)], low, high)
    sizes = _sizes(load.source)[2:]
    for axis, top in enumerate(before):
        bottom = top + sizes[axis]
        end = high[axis]
        if low[axis] != top or (bottom if end is None else end) != bottom:
            raise Misfit("padding that hides data")
    return float(outside.value)


def _narrow(comparison: Any, axes: list[Any], low: list[int], high: list[int | None]) -> None:
    """Take account of ``k <= axis`` or ``axis < k``."""
    left, right = comparison.a, comparison.b
    for i, axis in enumerate(axes):
        if (
            isinstance(comparison, tirx.LE)
            and right.same_as(axis)
            and isinstance(left, tirx.IntImm)
        ):
            low[i] = max(low[i], int(left))
            return
        if (
            isinstance(comparison, tirx.LT)
            and left.same_as(axis)
            and isinstance(right, tirx.IntImm)
        ):
            high[i] = int(right)
            return
    raise Misfit("an unexpected comparison")
