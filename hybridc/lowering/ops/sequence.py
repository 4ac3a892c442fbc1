"""Sequences and optionals, resolved while compiling.

A sequence is a list of lowered tensors, so these operators make no code. What cannot be resolved
(a position that is data, a sequence that enters or leaves the model) is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from tvm import relax

from hybridc.lowering.call import Call, Operator, Unsupported
from hybridc.lowering.ops.common import normalize_axes, reshape, same_dim, value_shape
from hybridc.lowering.ops.movement import rearrange
from hybridc.lowering.value import Absent, Constant, Dim, Expression, TensorList, Value


def items_of(call: Call) -> tuple[Value, ...]:
    """Tensors of the sequence that is the first input."""
    value = call.value(0)
    if not isinstance(value, TensorList):
        raise Unsupported("the sequence is not known at compile time")
    return value.items


def construct(call: Call) -> TensorList:
    """A sequence of the inputs."""
    return TensorList(tuple(call.value(i) for i in range(len(call.inputs))))


def empty(_call: Call) -> TensorList:
    """A sequence of nothing."""
    return TensorList(())


def length(call: Call) -> Constant:
    """The number of tensors."""
    name = f"{call.node.outputs[0].name}.length"
    return Constant(name, np.array(len(items_of(call)), np.int64))


def _place(call: Call, index: int, count: int, default: int) -> int:
    """A position given as input ``index``, counted from the front; below ``count``."""
    if not call.has(index):
        return default
    given = int(call.constant(index, "a position in a sequence").item())
    place = given + len(items_of(call)) if given < 0 else given
    if not 0 <= place < count:
        raise Unsupported(f"position {given} in a sequence of {len(items_of(call))}")
    return place


def at(call: Call) -> Value:
    """The tensor at a position."""
    items = items_of(call)
    return items[_place(call, 1, len(items), 0)]


def insert(call: Call) -> TensorList:
    """The sequence with a tensor put in, at the end unless told."""
    items = items_of(call)
    place = _place(call, 2, len(items) + 1, len(items))
    return TensorList((*items[:place], call.value(1), *items[place:]))


def erase(call: Call) -> TensorList:
    """The sequence without a tensor, the last one unless told."""
    items = items_of(call)
    place = _place(call, 1, len(items), len(items) - 1)
    return TensorList((*items[:place], *items[place + 1 :]))


def concat_from_sequence(call: Call) -> Value:
    """The tensors one after another along an axis, or side by side along a new one."""
    items = list(items_of(call))
    if not items:
        raise Unsupported("ConcatFromSequence of an empty sequence")
    stacked = bool(call.attribute("new_axis", 0))
    rank = len(value_shape(call, items[0])) + stacked
    axis = normalize_axes([int(call.attribute("axis"))], rank)[0]
    if stacked:
        items = [_with_axis(call, item, axis) for item in items]
    shapes = [value_shape(call, item) for item in items]
    for shape in shapes[1:]:
        pairs = zip(shapes[0], shape, strict=True)
        if not all(i == axis or same_dim(*pair) for i, pair in enumerate(pairs)):
            raise Unsupported(f"ConcatFromSequence of shapes {shapes[0]} and {shape}")
    if len(items) == 1:
        return items[0]
    return call.emit(relax.op.concat([call.materialize(item) for item in items], axis))


def _with_axis(call: Call, item: Value, axis: int) -> Value:
    shape = list(value_shape(call, item))
    return reshape(call, item, [*shape[:axis], 1, *shape[axis:]])


def split_to_sequence(call: Call) -> TensorList:
    """Pieces along an axis: of given sizes, of one size, or single slices."""
    axis = call.axis(0)
    sizes = _sizes(call, call.shape(0)[axis])
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    pieces = [_piece(call, axis, start, size) for start, size in zip(starts, sizes, strict=True)]
    if not call.has(1) and not call.attribute("keepdims", 1):
        shape = [dim for i, dim in enumerate(call.shape(0)) if i != axis]
        pieces = [reshape(call, piece, shape) for piece in pieces]
    return TensorList(tuple(pieces))


def _sizes(call: Call, total: Dim) -> Sequence[Dim]:
    if call.has(1) and call.rank(1) == 1:
        sizes = call.integers(1, "the sizes of SplitToSequence")
        if not same_dim(sum(sizes), total):
            raise Unsupported(f"SplitToSequence of {total} elements into {sizes}")
        return sizes
    size = int(call.constant(1, "the size of SplitToSequence").item()) if call.has(1) else 1
    if not isinstance(total, int) or size < 1:
        raise Unsupported(f"SplitToSequence of {total} elements into pieces of {size}")
    return [min(size, total - start) for start in range(0, total, size)]


def _piece(call: Call, axis: int, start: Dim, size: Dim) -> Expression:
    shape = list(call.shape(0))
    shape[axis] = size

    def source(*index: Any) -> list[Any]:
        return [place + start if i == axis else place for i, place in enumerate(index)]

    return rearrange(call, call.value(0), shape, source, "split_to_sequence")


def optional(call: Call) -> Value:
    """The input as an optional; an empty one without an input."""
    return call.value(0) if call.has(0) else Absent()


def optional_get_element(call: Call) -> Value:
    """What an optional holds."""
    value = call.value(0)
    if isinstance(value, Absent):
        raise Unsupported("OptionalGetElement of an empty optional")
    return value


def optional_has_element(call: Call) -> Constant:
    """Whether an optional holds something."""
    present = call.has(0) and not isinstance(call.value(0), Absent)
    return Constant(f"{call.node.outputs[0].name}.present", np.array(present))


OPERATORS: tuple[Operator, ...] = (
    Operator("SequenceConstruct", construct, since=11),
    Operator("SequenceEmpty", empty, since=11),
    Operator("SequenceLength", length, since=11),
    Operator("SequenceAt", at, since=11),
    Operator("SequenceInsert", insert, since=11),
    Operator("SequenceErase", erase, since=11),
    Operator("ConcatFromSequence", concat_from_sequence, since=11),
    Operator("SplitToSequence", split_to_sequence, since=11),
    Operator("Optional", optional, since=15),
    Operator("OptionalGetElement", optional_get_element, since=15),
    Operator("OptionalHasElement", optional_has_element, since=15),
)
