"""Sizes that are known only when the model runs.

A tensor that says which shape to take (a target with -1 in it, bounds of a slice, paddings) is not
a list of sizes yet. A small kernel resolves it to one, and :meth:`Call.dims_of` turns that into
symbolic dimensions, which are then plain variables: nothing is left to be proved about them.
Invalid requests, for which ONNX demands an error, resolve to sizes that are not negative.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tvm import tirx

from hybridc.lowering.call import Call, Unsupported, as_expression, dtype_of, shape_of
from hybridc.lowering.ops.common import Own, is_float
from hybridc.lowering.ops.loops import Array, count, emit_program, equals, local, unraveled, when
from hybridc.lowering.value import Dim, Expression


def known_or_read(call: Call, index: int, what: str) -> list[Dim]:
    """Input ``index`` as sizes, read when the model runs unless they are known before.

    Args:
        call: The node being lowered.
        index: An integer input of rank 0 or 1 whose elements are sizes as they stand.
        what: What it is, for a refusal.
    """
    if call.is_known(index):
        return call.integers(index, what)
    return call.dims_of(call.tensor(index), what)


def known_length(call: Call, tensor: Expression, what: str) -> int:
    """Number of elements of a run-time vector; refuses if it is not known."""
    shape = shape_of(tensor)
    if len(shape) != 1 or not isinstance(shape[0], int):
        raise Unsupported(f"{what} must have a known length")
    return shape[0]


def resolve(
    call: Call, length: int, program: Callable[..., None], *operands: Expression, name: str
) -> list[Dim]:
    """Dimensions that a program writes, as int64, to an array of ``length`` elements."""
    if length == 0:
        return []
    (sizes,) = emit_program(call, program, [((length,), "int64")], *operands, name=name)
    return call.dims_of(sizes, name)


def _not_negative(number: Any) -> Any:
    return tirx.max(number, _whole(0))


def _whole(number: int) -> Any:
    return tirx.const(number, "int64")


def reshape_dims(
    call: Call, source: Sequence[Dim], target: Expression, keep_zero: bool
) -> list[Dim]:
    """A Reshape target with its zeros, unless they stay, and its -1 replaced."""
    length = known_length(call, target, "the shape of Reshape")

    def program(own: Own, target: Array, result: Array) -> None:
        total, others = local("int64", 1), local("int64", 1)
        for dim in source:
            total[0] = total[0] * own(dim)
        for i in range(length):
            wanted = target[i].astype("int64")
            if not keep_zero and i < len(source):
                wanted = tirx.Select(equals(wanted, 0), as_expression(own(source[i])), wanted)
            result[i] = wanted
            others[0] = others[0] * tirx.Select(wanted < 0, _whole(1), wanted)
        missing = tirx.floordiv(total[0], tirx.max(others[0], _whole(1)))
        for i in range(length):
            result[i] = tirx.Select(result[i] < 0, missing, result[i])

    return resolve(call, length, program, target, name="reshape_dims")


def broadcast_dims(call: Call, source: Sequence[Dim], target: Expression) -> list[Dim]:
    """Common shape of a tensor and a shape by numpy's rule."""
    length = known_length(call, target, "the shape of Expand")
    rank = max(length, len(source))

    def program(own: Own, target: Array, result: Array) -> None:
        for i in range(rank):
            own_place, place = i - (rank - len(source)), i - (rank - length)
            have = as_expression(own(source[own_place])) if own_place >= 0 else _whole(1)
            want = target[place].astype("int64") if place >= 0 else _whole(1)
            result[i] = _not_negative(tirx.Select(equals(have, 1), want, have))

    return resolve(call, rank, program, target, name="broadcast_dims")


def range_length(call: Call, start: Expression, limit: Expression, step: Expression) -> Dim:
    """Number of elements from a start to a limit by a step, all of rank 0."""
    exact = not is_float(dtype_of(start))

    def program(_own: Own, start: Array, limit: Array, step: Array, result: Array) -> None:
        span, stride = limit[()] - start[()], step[()]
        if exact:
            span, stride = limit[()].astype("int64") - start[()].astype("int64"), stride
            stride = stride.astype("int64")
            up = tirx.floordiv(span + stride - 1, tirx.max(stride, _whole(1)))
            down = tirx.floordiv(-span - stride - 1, tirx.max(-stride, _whole(1)))
            result[0] = _not_negative(tirx.Select(stride > 0, up, down))
        else:
            steps = tirx.ceil(span.astype("float64") / stride.astype("float64"))
            result[0] = _not_negative(steps.astype("int64"))

    return resolve(call, 1, program, start, limit, step, name="range_length")[0]


def slice_ranges(
    call: Call, source: Sequence[Dim], bounds: Sequence[Expression | None]
) -> tuple[Expression, Expression, list[Dim]]:
    """First positions, steps and numbers of elements of a slice, for every axis.

    Args:
        call: The node being lowered.
        source: Shape of what is sliced.
        bounds: Starts, ends, axes and steps; the last two may be left out.

    Returns:
        Two int64 vectors with an element per axis, and the dimensions.
    """
    given = [bound for bound in bounds if bound is not None]
    number = known_length(call, given[0], "the starts of Slice")
    rank = len(source)

    def program(own: Own, *arrays: Array) -> None:
        *inputs, first, step, length = arrays
        remaining = iter(inputs)
        given: list[Any] = [None if bound is None else next(remaining) for bound in bounds]
        starts, ends, axes, steps = given
        for axis in range(rank):
            first[axis], step[axis], length[axis] = 0, 1, as_expression(own(source[axis]))
            for i in range(number):
                chosen = _whole(i) if axes is None else axes[i].astype("int64")
                here = tirx.any(equals(chosen, axis), equals(chosen, axis - rank))
                stride = _whole(1) if steps is None else steps[i].astype("int64")
                size = as_expression(own(source[axis]))
                with when(here):
                    pair = starts[i].astype("int64"), ends[i].astype("int64")
                    first[axis], length[axis] = _clamped_range(*pair, stride, size)
                    step[axis] = stride

    results = [((rank,), "int64")] * 3
    first, step, length = emit_program(call, program, results, *given, name="slice_ranges")
    return first, step, call.dims_of(length, "the sizes of a slice")


def _clamped_range(start: Any, end: Any, step: Any, size: Any) -> tuple[Any, Any]:
    """First position and number of elements along one axis, by numpy's rule."""
    forward = step > 0
    start, end = (tirx.Select(place < 0, place + size, place) for place in (start, end))
    low = tirx.Select(forward, _whole(0), _whole(-1))
    high = tirx.Select(forward, size, size - 1)
    first = tirx.max(tirx.min(start, high), _whole(0))
    last = tirx.max(tirx.min(end, high), low)
    span = tirx.Select(forward, last - first, first - last)
    # A backward slice that starts in front of the first element holds nothing.
    span = tirx.Select(tirx.any(forward, start >= 0), span, _whole(0))
    stride = tirx.max(tirx.Select(forward, step, -step), _whole(1))
    return first, _not_negative(tirx.floordiv(span + stride - 1, stride))


def pad_amounts(
    call: Call, source: Sequence[Dim], pads: Expression, axes: Expression | None
) -> tuple[Expression, Expression, list[Dim]]:
    """Paddings in front of and behind every axis, as int64 vectors, and the padded dimensions."""
    number = known_length(call, pads, "the pads of Pad") // 2
    rank = len(source)

    def program(own: Own, pads: Array, *arrays: Array) -> None:
        *given, before, after, sizes = arrays
        for axis in range(rank):
            before[axis], after[axis] = 0, 0
            for i in range(number):
                chosen = given[0][i].astype("int64") if given else _whole(i)
                with when(tirx.any(equals(chosen, axis), equals(chosen, axis - rank))):
                    before[axis] = pads[i].astype("int64")
                    after[axis] = pads[i + number].astype("int64")
            total = as_expression(own(source[axis])) + before[axis] + after[axis]
            sizes[axis] = _not_negative(total)

    operands = [pads] if axes is None else [pads, axes]
    results = [((rank,), "int64")] * 3
    before, after, sizes = emit_program(call, program, results, *operands, name="pad_amounts")
    return before, after, call.dims_of(sizes, "the padded sizes")


def tiled_dims(call: Call, source: Sequence[Dim], repeats: Expression) -> list[Dim]:
    """Dimensions times their numbers of repeats."""

    def program(own: Own, repeats: Array, result: Array) -> None:
        for axis, dim in enumerate(source):
            result[axis] = _not_negative(repeats[axis].astype("int64") * own(dim))

    return resolve(call, len(source), program, repeats, name="tiled_dims")


def _chosen(axes: Array, number: int, axis: Any, rank: int) -> Any:
    """Whether an axis is among those that a run-time vector lists."""
    matches = [
        tirx.any(
            equals(axes[i].astype("int64"), axis), equals(axes[i].astype("int64"), axis - rank)
        )
        for i in range(number)
    ]
    return tirx.any(*matches) if len(matches) > 1 else matches[0]


def squeezed_dims(call: Call, source: Sequence[Dim], axes: Expression) -> list[Dim]:
    """The dimensions that a run-time vector of axes does not list."""
    number = known_length(call, axes, "the axes")
    length = len(source) - number

    def program(own: Own, axes: Array, result: Array) -> None:
        filled = local("int64", 0)
        with count(length) as i:
            result[i] = 1
        for axis, dim in enumerate(source):
            listed = _chosen(axes, number, _whole(axis), len(source))
            with when(tirx.all(tirx.Not(listed), filled[0] < length)):
                result[filled[0]] = as_expression(own(dim))
                filled[0] = filled[0] + 1

    return resolve(call, length, program, axes, name="squeezed_dims")


def unsqueezed_dims(call: Call, source: Sequence[Dim], axes: Expression) -> list[Dim]:
    """The dimensions with ones put in where a run-time vector of axes says."""
    number = known_length(call, axes, "the axes")
    rank = len(source) + number

    def program(own: Own, axes: Array, result: Array) -> None:
        taken = local("int64", 0)
        for axis in range(rank):
            listed = _chosen(axes, number, _whole(axis), rank)
            dim: Any = _whole(1)
            for i, size in enumerate(source):
                dim = tirx.Select(equals(taken[0], i), as_expression(own(size)), dim)
            result[axis] = tirx.Select(listed, _whole(1), dim)
            taken[0] = taken[0] + tirx.Select(listed, _whole(0), _whole(1))

    return resolve(call, rank, program, axes, name="unsqueezed_dims")


def reduced_dims(call: Call, source: Sequence[Dim], axes: Expression) -> list[Dim]:
    """The dimensions with 1 where a run-time vector lists their axes.

    Returns:
        Those, the number of elements that they make, and of those that are reduced to each.
    """
    number, rank = known_length(call, axes, "the axes"), len(source)

    def program(own: Own, axes: Array, result: Array) -> None:
        result[rank], result[rank + 1] = 1, 1
        for axis, dim in enumerate(source):
            size = as_expression(own(dim))
            listed = _chosen(axes, number, _whole(axis), rank)
            result[axis] = tirx.Select(listed, _whole(1), size)
            result[rank] = result[rank] * result[axis]
            result[rank + 1] = result[rank + 1] * tirx.Select(listed, size, _whole(1))

    return resolve(call, rank + 2, program, axes, name="reduced_dims")


def split_matrix(call: Call, tensor: Expression, axes: Expression) -> tuple[Expression, list[Dim]]:
    """A tensor as a matrix whose columns run over the axes that a run-time vector lists.

    Returns:
        The matrix, and the tensor's dimensions with 1 in place of those that are listed.
    """
    source, dtype = shape_of(tensor), dtype_of(tensor)
    number, rank = known_length(call, axes, "the axes"), len(source)
    *kept, rows, columns = reduced_dims(call, source, axes)

    def fill(own: Own, data: Array, axes: Array, matrix: Array) -> None:
        total: Any = _whole(1)
        for dim in source:
            total = total * own(dim)
        with count(total, parallel=True) as task:
            index = unraveled(task, list(map(own, source)))
            place = local("int64", 0, 2)
            for axis, dim in enumerate(source):
                side = tirx.Select(_chosen(axes, number, _whole(axis), rank), _whole(1), _whole(0))
                place[side] = place[side] * own(dim) + index[axis]
            matrix[place[0], place[1]] = data[tuple(index)]

    result = ((rows, columns), dtype)
    return emit_program(call, fill, [result], tensor, axes, name="split_matrix")[0], kept
