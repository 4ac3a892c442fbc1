"""Split a reduction over an awkward number of elements into whole vectors and a remainder.

A sum over 197 elements becomes a sum over 192, a sum over 5, and one addition. Each of the three
is a block of its own, so that the first can be cut into vectors without a condition.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import tvm
from hybridc.targets.llvm.schedules.blocks import starts_from, store_of
from hybridc.targets.llvm.schedules.splice import replace_nest
from hybridc.targets.llvm.schedules.tails import substitute
from tvm import tirx
from tvm.s_tir import SBlock, SBlockRealize, Schedule

COMBINING = (tirx.Add, tirx.Mul, tirx.Max, tirx.Min)

NEUTRAL = {tirx.Add: 0.0, tirx.Mul: 1.0}
"""What a sum or product must start from to be done in two parts; extrema may start anywhere."""


def peel_remainder(
    schedule: Schedule, block: Any, axis: int, multiple: int
) -> tirx.PrimFunc | None:
    """Split the reduction ``axis`` of a block at the last multiple of ``multiple``.

    Args:
        schedule: A schedule in which nothing was moved yet; it is not changed.
        block: A reduction whose axes are each bound to one loop.
        axis: Position of the reduction axis; its extent is larger than ``multiple``.
        multiple: Elements of one vector of partial results.

    Returns:
        The new function, or ``None`` if the block does not combine with one plain operation.
    """
    node = schedule.get(block)
    store = store_of(node)
    if store is None or not isinstance(store.value, COMBINING):
        return None
    neutral = NEUTRAL.get(type(store.value))
    if neutral is not None and not starts_from(node, neutral):
        return None
    so_far = store.value.a
    if not isinstance(so_far, tvm.ir.TensorLoad) or not so_far.source.same_as(store.buffer):
        return None
    size = int(node.iter_vars[axis].dom.extent)
    whole = size // multiple * multiple
    sizes = {"main": (0, whole), "rest": (whole, size - whole)}
    buffers, nests = [], []
    for suffix, (start, size) in sizes.items():
        buffer = tirx.decl_buffer(
            store.buffer.shape, store.buffer.dtype, f"{store.buffer.name}_{suffix}"
        )
        piece = _Piece(buffer, axis, start, size, f"{node.name_hint}_{suffix}")
        buffers.append(buffer)
        nests.append(_copy_nest(node, store.buffer, piece))
    nests.append(_combine(node, store, buffers))
    function = schedule.mod["main"]
    return replace_nest(function, str(node.name_hint), nests, buffers)


@dataclass(frozen=True)
class _Piece:
    buffer: Any
    axis: int
    start: int
    size: int
    name: str


def _copy_nest(node: SBlock, old: Any, piece: _Piece) -> Any:
    """A loop nest that does a part of the reduction, into a buffer of its own."""
    axes, mapping = [], {old: piece.buffer}
    for position, axis in enumerate(node.iter_vars):
        variable = tirx.Var(axis.var.name, axis.var.ty.dtype)
        extent = axis.dom.extent
        mapping[axis.var] = variable
        if position == piece.axis:
            extent = tirx.IntImm(axis.var.ty.dtype, piece.size)
            mapping[axis.var] = variable + tirx.IntImm(axis.var.ty.dtype, piece.start)
        axes.append(tirx.IterVar(tvm.ir.Range(0, extent), variable, axis.iter_type))
    parts = (node.body, node.init, list(node.reads), list(node.writes))
    body, init, reads, writes = (substitute(part, mapping) for part in parts)
    return _nest(SBlock(axes, reads, writes, piece.name, body, init))


def _combine(node: SBlock, store: Any, buffers: list[Any]) -> Any:
    """A loop nest that combines the two parts into the block's own buffer."""
    kept = [axis for axis in node.iter_vars if axis.iter_type == tirx.IterVar.DataPar]
    renamed = {axis.var: tirx.Var(axis.var.name, axis.var.ty.dtype) for axis in kept}
    axes = [
        tirx.IterVar(tvm.ir.Range(0, axis.dom.extent), renamed[axis.var], axis.iter_type)
        for axis in kept
    ]
    indices = [substitute(index, renamed) for index in store.indices]
    value = type(store.value)(*(tirx.BufferLoad(buffer, indices) for buffer in buffers))
    point = [
        tvm.ir.Range.from_min_extent(index, tirx.IntImm(index.ty.dtype, 1)) for index in indices
    ]
    reads = [tirx.BufferRegion(buffer, point) for buffer in buffers]
    writes = [tirx.BufferRegion(store.buffer, point)]
    body = tirx.BufferStore(store.buffer, value, indices)
    return _nest(SBlock(axes, reads, writes, f"{node.name_hint}_combined", body))


def _nest(block: SBlock) -> Any:
    loops = [tirx.Var(axis.var.name, axis.var.ty.dtype) for axis in block.iter_vars]
    statement: Any = SBlockRealize(loops, True, block)
    for loop, axis in zip(reversed(loops), reversed(block.iter_vars), strict=True):
        statement = tirx.For(loop, 0, axis.dom.extent, tirx.ForKind.SERIAL, statement)
    return statement
