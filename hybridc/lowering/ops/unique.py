"""Unique: the different rows of a tensor, where they first occur, and how often.

The rows' numbers are merge-sorted, stably, by the rows' contents, so that equal rows stand together
with the first of them in front. One walk over them numbers the groups.
"""

from __future__ import annotations

from typing import Any

from tvm import relax, tirx

from hybridc.lowering.call import Call, shape_of
from hybridc.lowering.ops.common import Own, is_float, product, reshape
from hybridc.lowering.ops.loops import (
    Array,
    count,
    emit_program,
    equals,
    local,
    repeat_while,
    when,
)
from hybridc.lowering.value import Dim, Expression


def unique(call: Call) -> tuple[Expression, ...]:
    """The different elements, or slices along an axis; first positions, inverse and counts."""
    from hybridc.lowering.ops.data_dependent import first_rows, taken

    given = call.attribute("axis")
    if given is None:
        axis, data = 0, call.materialize(reshape(call, call.value(0), (product(call.shape(0)),)))
    else:
        axis, data = call.axis(0), call.tensor(0)
    shape = shape_of(data)
    others = [i for i in range(len(shape)) if i != axis]
    rows, width = shape[axis], product([shape[i] for i in others])
    table = call.emit(relax.op.permute_dims(data, [axis, *others])) if axis else data
    table = call.materialize(reshape(call, table, (rows, width)))
    first, inverse, counts, total = _groups(call, table, rows, width)
    groups = call.dims_of(total, "the number of groups")[0]
    first, counts = first_rows(call, first, groups), first_rows(call, counts, groups)
    results = (taken(call, data, first, axis), first, inverse, counts)
    return results[: len(call.node.outputs)]


def _groups(call: Call, table: Expression, rows: Dim, width: Dim) -> list[Expression]:
    """First row and size of each group, in order; the group of each row; how many there are."""
    ordered = bool(call.attribute("sorted", 1))

    def program(
        own: Own,
        table: Array,
        first: Array,
        inverse: Array,
        counts: Array,
        total: Array,
        order: Array,
        spare: Array,
    ) -> None:
        size = own(rows)
        with count(size) as i:
            first[i] = 0
            counts[i] = 0
            order[i] = i
        _sort(table, order, spare, size, own(width))
        total[0] = 0
        if ordered:
            _number_sorted(table, order, first, inverse, counts, total, own(width))
        else:
            _number_by_occurrence(table, order, first, inverse, counts, total, own(width))

    vector = ((rows,), "int64")
    results = [vector, vector, vector, ((1,), "int64"), vector, vector]
    return emit_program(call, program, results, table, name="unique")[:4]


def _compare(table: Array, left: Any, right: Any, width: Any) -> Array:
    """A variable that is below, at or above zero as one row is less, equal or greater."""
    verdict, column = local("int64", 0), local("int64", 0)
    with repeat_while(tirx.all(column[0] < width, equals(verdict[0], 0))):
        a, b = table[left, column[0]], table[right, column[0]]
        greater = tirx.Select(_less(b, a, table.dtype), _sign(1), _sign(0))
        verdict[0] = tirx.Select(_less(a, b, table.dtype), _sign(-1), greater)
        column[0] = column[0] + 1
    return verdict


def _sign(number: int) -> Any:
    return tirx.const(number, "int64")


def _less(left: Any, right: Any, dtype: str) -> Any:
    """The order that numbers are sorted in: NaN after all others and equal to itself."""
    if dtype == "bool":
        return left.astype("int32") < right.astype("int32")
    if not is_float(dtype):
        return left < right
    if dtype not in ("float32", "float64"):
        left, right = left.astype("float32"), right.astype("float32")
    return tirx.any(left < right, tirx.all(tirx.isnan(right), tirx.Not(tirx.isnan(left))))


def _sort(table: Array, order: Array, spare: Array, size: Any, width: Any) -> None:
    run = local("int64", 1)
    with repeat_while(run[0] < size):
        with count(tirx.floordiv(size + 2 * run[0] - 1, 2 * run[0])) as pair:
            start = pair * (2 * run[0])
            middle = tirx.min(start + run[0], size)
            end = tirx.min(start + 2 * run[0], size)
            left, right = local("int64", start), local("int64", middle)
            with count(end - start, start) as place:
                first, second = (order[tirx.min(side[0], size - 1)] for side in (right, left))
                verdict = _compare(table, first, second, width)
                from_right = tirx.all(right[0] < end, tirx.any(left[0] >= middle, verdict[0] < 0))
                spare[place] = tirx.Select(from_right, first, second)
                step = local("int64", tirx.Select(from_right, _sign(1), _sign(0)))
                right[0] = right[0] + step[0]
                left[0] = left[0] + (1 - step[0])
        with count(size) as i:
            order[i] = spare[i]
        run[0] = 2 * run[0]


def _begins_group(table: Array, order: Array, place: Any, width: Any) -> Any:
    """Whether the row at a place of the sorted order differs from the one before."""
    before = order[tirx.max(place - 1, 0)]
    verdict = _compare(table, before, order[place], width)
    return tirx.any(equals(place, 0), tirx.Not(equals(verdict[0], 0)))


def _number_sorted(
    table: Array,
    order: Array,
    first: Array,
    inverse: Array,
    counts: Array,
    total: Array,
    width: Any,
) -> None:
    with count(order.shape[0]) as place:
        with when(_begins_group(table, order, place, width)):
            first[total[0]] = order[place]
            total[0] = total[0] + 1
        group = total[0] - 1
        inverse[order[place]] = group
        counts[group] = counts[group] + 1


def _number_by_occurrence(
    table: Array,
    order: Array,
    first: Array,
    inverse: Array,
    counts: Array,
    total: Array,
    width: Any,
) -> None:
    """Groups by their first rows; until it is numbered, a row's group is its first row."""
    leader = local("int64", 0)
    with count(order.shape[0]) as place:
        with when(_begins_group(table, order, place, width)):
            leader[0] = order[place]
        inverse[order[place]] = leader[0]
    with count(order.shape[0]) as row:
        with when(equals(inverse[row], row)):
            first[total[0]] = row
            order[row] = total[0]
            total[0] = total[0] + 1
        group = local("int64", order[inverse[row]])
        inverse[row] = group[0]
        counts[group[0]] = counts[group[0]] + 1
