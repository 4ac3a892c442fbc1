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

from collections.abc import Callable
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
    def scan(data: te.Tensor) -> te.Tensor:
        size = data.shape[axis]
        zero = tirx.const(0, dtype)

        def element(index: list[Any], place: Any, keep: Any) -> Any:
            """An element along the axis where ``keep`` holds, and 0 elsewhere."""
            where = [*index[:axis], place, *index[axis + 1 :]]
            inside = tirx.all(keep, place < size)
            return tirx.if_then_else(inside, data(*where).astype(dtype), zero)

        def replaced(dim: Any) -> list[Any]:
            return [*data.shape[:axis], dim, *data.shape[axis + 1 :]]

        within = te.reduce_axis((0, CHUNK), "within")

        def inner(*index: Any) -> Any:
            place = tirx.floormod(index[axis], CHUNK)
            keep = within < place if exclusive else within <= place
            start = tirx.floordiv(index[axis], CHUNK) * CHUNK
            return te.sum(element([*index], start + within, keep), axis=within)

        if isinstance(size, tirx.IntImm) and int(size) <= CHUNK:
            return te.compute(data.shape, inner, "scan")
        chunks = tirx.floordiv(size + CHUNK - 1, CHUNK)
        step, other = te.reduce_axis((0, CHUNK), "step"), te.reduce_axis((0, chunks), "other")
        always = tirx.const(True, "bool")
        totals = te.compute(
            replaced(chunks),
            lambda *i: te.sum(element([*i], i[axis] * CHUNK + step, always), axis=step),
            "totals",
        )
        before = te.compute(
            replaced(chunks),
            lambda *i: te.sum(
                tirx.if_then_else(other < i[axis], totals(*i[:axis], other, *i[axis + 1 :]), zero),
                axis=other,
            ),
            "before",
        )
        partial = te.compute(data.shape, inner, "partial")
        return te.compute(
            data.shape,
            lambda *i: (
                before(*i[:axis], tirx.floordiv(i[axis], CHUNK), *i[axis + 1 :]) + partial(*i)
            ),
            "scan",
        )

    return scan


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
