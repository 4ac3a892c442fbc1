"""Padding in front of and behind spatial axes, recognized in the block that adds it."""

from __future__ import annotations

from typing import Any

import tvm
from hybridc.targets.fitting import Misfit
from hybridc.targets.llvm.schedules.blocks import (
    axes_of,
    collect,
    is_choice,
    is_spatial,
    loads_of,
    same_size,
    store_of,
)
from hybridc.targets.llvm.schedules.tails import variables_of
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


def check_padding(block: Any, before: tuple[int, ...]) -> None:
    """Check a block that pads in front, where sizes are known at run time only.

    Args:
        block: One that pads, with typical sizes in place of its own.
        before: Elements in front of the axes after the first two.

    Raises:
        Misfit: It does not copy all of its input, or not to the same place for all sizes.
    """
    (load,) = loads_of(block)
    axes, store = axes_of(block), store_of(block)
    check_indices(block)
    if store is None:
        raise Misfit("not padding")
    for comparison in collect(store.value, tirx.LT, tirx.LE, tirx.GT, tirx.GE):
        if variables_of(comparison) <= set(axes):
            continue
        behind = int(isinstance(comparison, tirx.LE))
        ends = [
            same_size(comparison.b + behind, load.source.shape[2 + i] + top)
            for i, top in enumerate(before)
            if isinstance(comparison, tirx.LT | tirx.LE) and comparison.a.same_as(axes[2 + i])
        ]
        if ends != [True]:
            raise Misfit("padding that depends on a size")


def check_indices(block: Any) -> None:
    """Raise if a block's elements are not at the same place whatever the sizes are."""
    axes = set(axes_of(block))
    stores = [store.indices for store in collect(block.body, tirx.BufferStore)]
    for indices in [*stores, *(load.indices for load in loads_of(block))]:
        if not all(variables_of(index) <= axes for index in indices):
            raise Misfit("a place that depends on a size")


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
    """Take account of ``k <= axis``, ``axis < k`` or ``axis <= k``."""
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
        if (
            isinstance(comparison, tirx.LE)
            and left.same_as(axis)
            and isinstance(right, tirx.IntImm)
        ):
            high[i] = int(right) + 1
            return
    raise Misfit("an unexpected comparison")
