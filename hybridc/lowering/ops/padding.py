"""Pad: rows of a constant, of mirrored elements, of the border or of the other end.

Negative paddings cut elements off. They are applied first, so that a mirror or border is that of
what remains.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from tvm import te, tirx

from hybridc.lowering.call import Call, Operator, Unsupported
from hybridc.lowering.ops.at_run_time import pad_at_run_time
from hybridc.lowering.ops.common import (
    Own,
    compute,
    emit_kernel,
    immediate,
    normalize_axes,
    simplify,
)
from hybridc.lowering.value import Constant, Dim, Expression, Value

MODES = ("constant", "reflect", "edge", "wrap")


def pad_attributes(call: Call) -> Expression:
    """Pad with paddings and value as attributes (opset 2)."""
    value = Constant("", np.array(call.attribute("value", 0.0), call.dtype(0)))
    return _pad(call, call.attribute("pads"), value)


def pad_inputs(call: Call) -> Expression:
    """Pad with paddings, and optionally value and axes, as inputs (opset 11)."""
    if not call.is_known(1) or (call.has(3) and not call.is_known(3)):
        return pad_at_run_time(call, _folded)
    pads = call.integers(1, "the pads of Pad")
    if call.has(3):
        pads = _for_all_axes(pads, call.integers(3, "the axes of Pad"), call.rank(0))
    zero = Constant("", np.zeros((), call.dtype(0)))
    return _pad(call, pads, call.value(2) if call.has(2) else zero)


def _for_all_axes(pads: Sequence[Dim], axes: Sequence[int], rank: int) -> list[Dim]:
    result: list[Dim] = [0] * (2 * rank)
    for i, axis in enumerate(normalize_axes(axes, rank)):
        result[axis], result[axis + rank] = pads[i], pads[i + len(axes)]
    return result


def _pad(call: Call, pads: Sequence[Dim], value: Value) -> Expression:
    mode = call.attribute("mode", "constant")
    rank = call.rank(0)
    if mode not in MODES or len(pads) != 2 * rank:
        raise Unsupported(f"Pad with mode {mode!r} and pads {list(pads)}")
    if not all(isinstance(pad, int) for pad in pads):
        raise Unsupported("the pads of Pad must be known at compile time")
    sides = list(zip(pads[:rank], pads[rank:], strict=True))
    shape = [
        simplify(dim + before + after)
        for dim, (before, after) in zip(call.shape(0), sides, strict=True)
    ]
    filler = immediate(value)
    tensors = [call.tensor(0)]
    if mode == "constant" and filler is None:
        tensors.append(call.materialize(value))

    def kernel(own: Own, data: te.Tensor, *values: te.Tensor) -> te.Tensor:
        def element(*index: Any) -> Any:
            if mode != "constant":
                return data(*_sources(mode, index, data.shape, sides))
            fill = values[0](*(0 for _ in values[0].shape)) if values else filler
            return _constant_padded(data, index, sides, fill)

        return compute(map(own, shape), element, "pad")

    return emit_kernel(call, kernel, *tensors, name="pad")


def _constant_padded(data: te.Tensor, index: Sequence[Any], sides: Any, fill: Any) -> Any:
    source = [i - before for i, (before, _) in zip(index, sides, strict=True)]
    conditions = []
    for i, size, (before, after) in zip(source, data.shape, sides, strict=True):
        conditions += [i >= 0] if before > 0 else []
        conditions += [i < size] if after > 0 else []
    if not conditions:
        return data(*source)
    return tirx.if_then_else(tirx.all(*conditions), data(*source), fill)


def _sources(mode: str, index: Sequence[Any], shape: Sequence[Dim], sides: Any) -> list[Any]:
    """Where in the input each element of the padded tensor comes from."""
    result = []
    for i, size, (before, after) in zip(index, shape, sides, strict=True):
        cut = max(-before, 0)
        kept = simplify(size - cut - max(-after, 0))
        padded = before > 0 or after > 0
        inner = i - max(before, 0)
        result.append(cut + (_folded(mode, inner, kept) if padded else inner))
    return result


def _folded(mode: str, index: Any, size: Dim) -> Any:
    """An index on an endless axis, folded back into ``size`` elements."""
    if mode == "edge":
        return tirx.max(tirx.min(index, size - 1), 0)
    if mode == "wrap":
        return tirx.floormod(index, size)
    if isinstance(size, int) and size == 1:
        return index * 0
    period = 2 * size - 2
    turn = tirx.floormod(index, period)
    return tirx.min(turn, period - turn)


PADDING: tuple[Operator, ...] = (
    Operator("Pad", pad_attributes),
    Operator("Pad", pad_inputs, since=11),
)
