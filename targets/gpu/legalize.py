"""Running sums and sorting as tensor expressions, for which TVM's kernels for GPUs are not right.

TVM scans the last axis inside a warp without barriers, which gives wrong sums on some devices. Here
nothing but sums over an axis is used, so that any schedule of a reduction is right.

Running sum, in chunks of B elements:

    chunk[c]  = sum over j        of x[c B + j]
    before[c] = sum over d < c    of chunk[d]
    y[i]      = before[i / B] + sum over j <= i mod B of x[(i / B) B + j]

Top k, by counting for each element how many come before it; equal ones keep their order, and NaN
comes before everything:

    rank[i]   = number of j with x[j] before x[i]
    index[r]  = sum over i of (i where rank[i] = r)
    value[r]  = x[index[r]]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tvm import relax, te, tirx

CHUNK = 128


def _cumsum(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    attributes, (data,) = call.attrs, call.args
    rank = len(data.ty.shape.values)
    axis = attributes.axis
    if axis is None:
        size = data.ty.shape.values[0]
        for dim in data.ty.shape.values[1:]:
            size = size * dim
        data, rank, axis = relax.op.reshape(data, [size]), 1, 0
    dtype = str(attributes.dtype or "") or str(data.ty.dtype)
    exclusive = bool(attributes.exclusive)
    kernel = _scan(int(axis) % rank, dtype if dtype != "void" else str(call.ty.dtype), exclusive)
    return builder.call_te(kernel, builder.normalize(data), primfunc_name_hint="cumsum")


def _scan(axis: int, dtype: str, exclusive: bool) -> Callable[[te.Tensor], te.Tensor]:
    return lambda data: _Scan(data, axis, dtype, exclusive).sums()


@dataclass(frozen=True)
class _Scan:
    """A running sum of ``data`` along an axis, computed in ``dtype``."""

    data: te.Tensor
    axis: int
    dtype: str
    exclusive: bool

    def sums(self) -> te.Tensor:
        """``y`` of the formula above."""
        size = self.data.shape[self.axis]
        if isinstance(size, tirx.IntImm) and int(size) <= CHUNK:
            return self._within("scan")
        before, partial = self._before(), self._within("partial")

        def element(*index: Any) -> Any:
            chunk = tirx.floordiv(index[self.axis], CHUNK)
            return before(*self._replaced(index, chunk)) + partial(*index)

        return te.compute(self.data.shape, element, "scan")

    def _within(self, name: str) -> te.Tensor:
        """Running sums within each chunk."""
        within = te.reduce_axis((0, CHUNK), "within")

        def inner(*index: Any) -> Any:
            place = tirx.floormod(index[self.axis], CHUNK)
            keep = within < place if self.exclusive else within <= place
            start = tirx.floordiv(index[self.axis], CHUNK) * CHUNK
            return te.sum(self._element(index, start + within, keep), axis=within)

        return te.compute(self.data.shape, inner, name)

    def _before(self) -> te.Tensor:
        """``before`` of the formula: for each chunk the sum of those in front of it."""
        axis = self.axis
        chunks = tirx.floordiv(self.data.shape[axis] + CHUNK - 1, CHUNK)
        step, other = te.reduce_axis((0, CHUNK), "step"), te.reduce_axis((0, chunks), "other")

        def total(*index: Any) -> Any:
            place = index[axis] * CHUNK + step
            return te.sum(self._element(index, place, tirx.const(True, "bool")), axis=step)

        shape = self._replaced(self.data.shape, chunks)
        totals = te.compute(shape, total, "totals")

        def element(*index: Any) -> Any:
            chunk = totals(*self._replaced(index, other))
            zero = tirx.const(0, self.dtype)
            return te.sum(tirx.if_then_else(other < index[axis], chunk, zero), axis=other)

        return te.compute(shape, element, "before")

    def _element(self, index: Sequence[Any], place: Any, keep: Any) -> Any:
        """An element along the axis where ``keep`` holds, and 0 elsewhere."""
        inside = tirx.all(keep, place < self.data.shape[self.axis])
        value = self.data(*self._replaced(index, place)).astype(self.dtype)
        return tirx.if_then_else(inside, value, tirx.const(0, self.dtype))

    def _replaced(self, sizes: Sequence[Any], item: Any) -> list[Any]:
        """Sizes or indices with another one for the axis."""
        return [*sizes[: self.axis], item, *sizes[self.axis + 1 :]]


def _topk(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    attributes, (data,) = call.attrs, call.args
    axis = int(attributes.axis) % len(data.ty.shape.values)
    kernel = _select(axis, int(attributes.k), bool(attributes.largest), str(attributes.dtype))
    both = builder.call_te(kernel, data, primfunc_name_hint="topk")
    if attributes.ret_type == "both":
        return both
    return relax.TupleGetItem(builder.emit(both), int(attributes.ret_type == "indices"))


def _select(axis: int, count: int, largest: bool, dtype: str) -> Callable[..., list[te.Tensor]]:
    def select(data: te.Tensor) -> list[te.Tensor]:
        size = data.shape[axis]
        length = count if count > 0 else size

        def at(index: Any, place: Any) -> Any:
            return data(*index[:axis], place, *index[axis + 1 :])

        def precedes(left: Any, right: Any) -> Any:
            ordered = left > right if largest else left < right
            if not str(data.dtype).startswith(("float", "bfloat")):
                return ordered
            return tirx.any(ordered, tirx.all(left != left, right == right))

        other, place = te.reduce_axis((0, size), "other"), te.reduce_axis((0, size), "place")

        def rank_of(*index: Any) -> Any:
            mine, theirs = at(index, index[axis]), at(index, other)
            tie = tirx.all(tirx.Not(precedes(mine, theirs)), other < index[axis])
            return te.sum(tirx.any(precedes(theirs, mine), tie).astype("int32"), axis=other)

        rank = te.compute(data.shape, rank_of, "rank")
        shape = [*data.shape[:axis], length, *data.shape[axis + 1 :]]

        def index_of(*index: Any) -> Any:
            found = rank(*index[:axis], place, *index[axis + 1 :]) == index[axis].astype("int32")
            return te.sum(
                tirx.if_then_else(found, place.astype(dtype), tirx.const(0, dtype)), axis=place
            )

        indices = te.compute(shape, index_of, "indices")
        values = te.compute(shape, lambda *i: at(i, indices(*i)), "values")
        return [values, indices]

    return select


LEGALIZATIONS = {"relax.cumsum": _cumsum, "relax.topk": _topk}
