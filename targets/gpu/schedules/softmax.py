"""Whether a function is a softmax over the last axis, whatever its blocks are called.

    most[r] = max over k of x[r, k]
    total[r] = sum over k of exp(x[r, k] - most[r])
    y[r, k] = exp(x[r, k] - most[r]) / total[r]

x may be converted to float32 first, and y to another type last.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tvm
import tvm_ffi
from hybridc.targets.fitting import Misfit
from hybridc.targets.llvm.schedules.blocks import (
    axes_of,
    blocks_of,
    extents_of,
    is_reduction,
    is_spatial,
    output_block,
    same_variables,
    starts_from,
    store_of,
)
from tvm import tirx
from tvm.s_tir import Schedule

DTYPE = "float32"
"""The type in which it is computed."""


def check_softmax(function: tirx.PrimFunc) -> None:
    """Refuse a function that is no softmax of its first parameter, stored in its second.

    Raises:
        Misfit: It is none.
    """
    if len(function.params) != 2:
        raise Misfit("not one tensor and one result")
    source, result = function.params
    maximum, total, last = _three_blocks(function)
    score = _Score(source, _buffer_of(maximum))
    lowest = float(tirx.min_value(DTYPE).value)
    if not (starts_from(maximum, lowest) and starts_from(total, 0.0)):
        raise Misfit("other values to begin with")
    _check_reduction(maximum, source, tirx.Max, score.plain)
    _check_reduction(total, source, tirx.Add, score.weight)
    store: Any = store_of(last)
    axes = axes_of(last)
    share = score.weight(axes) / tirx.BufferLoad(_buffer_of(total), axes[:-1])
    if str(result.dtype) != DTYPE:
        share = share.astype(str(result.dtype))
    if not (store.buffer.same_as(result) and same_variables(store.indices, axes)):
        raise Misfit("results in another order")
    _check_same(store.value, share)


def _three_blocks(function: tirx.PrimFunc) -> tuple[Any, Any, Any]:
    """Both reductions and the block of the results, with all others inlined."""
    schedule = Schedule(tvm.IRModule({"main": function}))
    last = output_block(schedule)
    for block in blocks_of(schedule):
        node = schedule.get(block)
        if is_spatial(node) and (last is None or not node.same_as(schedule.get(last))):
            schedule.compute_inline(block)
    nodes = list(map(schedule.get, blocks_of(schedule)))
    if len(nodes) != 3 or [is_reduction(node) for node in nodes] != [True, True, False]:
        raise Misfit("not two reductions and what follows them")
    if not all(map(store_of, nodes)):
        raise Misfit("more than stores")
    return nodes[0], nodes[1], nodes[2]


class _Score:
    """A score, and its exponential, as expressions.

    Args:
        source: The buffer of the scores.
        most: The buffer of the largest one of each row.
    """

    def __init__(self, source: Any, most: Any) -> None:
        self.source, self.most = source, most

    def plain(self, axes: Sequence[Any]) -> Any:
        """The score at a place."""
        load = tirx.BufferLoad(self.source, axes)
        return load if str(self.source.dtype) == DTYPE else load.astype(DTYPE)

    def weight(self, axes: Sequence[Any]) -> Any:
        """The exponential of the score at a place."""
        return tirx.exp(self.plain(axes) - tirx.BufferLoad(self.most, axes[:-1]))


def _check_reduction(node: Any, source: Any, kind: type, term: Any) -> None:
    """Refuse a reduction that does not reduce ``term`` over the last axis of the scores."""
    store: Any = store_of(node)
    axes = axes_of(node)
    kinds = [axis.iter_type == tirx.IterVar.CommReduce for axis in node.iter_vars]
    if kinds != [False] * (len(kinds) - 1) + [True]:
        raise Misfit("not a reduction over the last axis")
    if extents_of(node) != list(map(_size, source.shape)):
        raise Misfit("another number of scores")
    if not same_variables(store.indices, axes[:-1]):
        raise Misfit("rows in another order")
    _check_same(store.value, kind(tirx.BufferLoad(store.buffer, axes[:-1]), term(axes)))


def _check_same(value: Any, expected: Any) -> None:
    if not tvm_ffi.structural_equal(value, expected):
        raise Misfit("another formula")


def _buffer_of(node: Any) -> Any:
    store: Any = store_of(node)
    return store.buffer


def _size(dim: Any) -> int:
    if not isinstance(dim, tirx.IntImm):
        raise Misfit("a size that is not known")
    return int(dim)
