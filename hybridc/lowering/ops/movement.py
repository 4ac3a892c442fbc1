"""Operators that move elements without computing: reshapes, slices, concatenation, padding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from tvm import relax, te, tirx

from hybridc.lowering.call import Call, Invalid, Operator, Unsupported, as_expression
from hybridc.lowering.checks import checked, require_equal
from hybridc.lowering.ops.at_run_time import (
    expand_at_run_time,
    first_along,
    reshape_at_run_time,
    slice_at_run_time,
    squeeze_at_run_time,
    tile_at_run_time,
    unsqueeze_at_run_time,
)
from hybridc.lowering.ops.common import (
    MAX_OPERANDS,
    Own,
    at_least,
    broadcast_shape,
    cast,
    compute,
    emit_kernel,
    floor_divide,
    immediate,
    map_elements,
    normalize_axes,
    number,
    optional_axes,
    product,
    reads_axes,
    reshape,
    same_dim,
    simplify,
)
from hybridc.lowering.ops.creation import CREATION
from hybridc.lowering.ops.indexing import INDEXING
from hybridc.lowering.ops.padding import PADDING
from hybridc.lowering.ops.resize import RESIZING
from hybridc.lowering.runtime_sizes import known_or_read
from hybridc.lowering.value import Dim, Expression, Integers, Value


def rearrange(
    call: Call,
    value: Value,
    shape: Sequence[Dim],
    source: Callable[..., Sequence[Any]],
    name: str,
) -> Expression:
    """A tensor of the given shape whose element ``i`` is element ``source(*i)`` of ``value``."""

    def kernel(own: Own, data: te.Tensor) -> te.Tensor:
        return compute(map(own, shape), lambda *index: data(*map(own, source(*index))), name)

    return emit_kernel(call, kernel, call.materialize(value), name=name)


def reshape_to(call: Call) -> Value:
    """The elements in another shape, in which 0 copies a dimension and -1 is worked out."""
    if not call.is_known(1):
        return reshape_at_run_time(call)
    source = call.shape(0)
    wanted = call.integers(1, "the shape of Reshape")
    if not call.attribute("allowzero", 0):
        wanted = [
            source[i] if isinstance(dim, int) and dim == 0 else dim for i, dim in enumerate(wanted)
        ]
    unknown = [i for i, dim in enumerate(wanted) if isinstance(dim, int) and dim == -1]
    if len(unknown) > 1:
        raise Unsupported("Reshape with more than one -1")
    if unknown:
        others = [dim for dim in wanted if not (isinstance(dim, int) and dim == -1)]
        wanted[unknown[0]] = _quotient(source, others)
    else:
        require_equal(call, product(source), product(wanted), "numbers of elements")
    return reshape(call, call.value(0), wanted)


def _quotient(source: Sequence[Dim], others: Sequence[Dim]) -> Dim:
    """Product of ``source`` over the product of ``others``; dimensions that both have cancel."""
    remaining = list(source)
    divisors: list[Dim] = []
    for dim in others:
        match = next((i for i, own in enumerate(remaining) if same_dim(own, dim)), None)
        if match is None:
            divisors.append(dim)
        else:
            del remaining[match]
    total, divisor = product(remaining), product(divisors)
    if same_dim(divisor, 0):
        raise Unsupported("Reshape with -1 beside a dimension of zero")
    quotient = floor_divide(total, divisor)
    if not same_dim(quotient * divisor, total):
        raise Unsupported(f"{total} elements cannot be proved to divide by {divisor}")
    return quotient


def flatten(call: Call) -> Value:
    """A matrix of the dimensions in front of an axis, and those from it on."""
    shape = call.shape(0)
    axis = int(call.attribute("axis", 1))
    if not -len(shape) <= axis <= len(shape):
        raise Unsupported(f"axis {axis} is out of range for rank {len(shape)}")
    axis = axis + len(shape) if axis < 0 else axis
    return reshape(call, call.value(0), (product(shape[:axis]), product(shape[axis:])))


def squeeze(call: Call) -> Value:
    """The same without dimensions of one: those given, or all of them."""
    if reads_axes(call, 1):
        return squeeze_at_run_time(call)
    shape = call.shape(0)
    axes = optional_axes(call, 1)
    if axes is None:
        if not all(isinstance(dim, int) for dim in shape):
            raise Unsupported("Squeeze without axes needs a static shape")
        gone = [i for i, dim in enumerate(shape) if dim == 1]
    else:
        gone = normalize_axes(axes, len(shape))
    for i in gone:
        require_equal(call, shape[i], 1, "the size of a dimension to remove")
    return reshape(call, call.value(0), [dim for i, dim in enumerate(shape) if i not in gone])


def unsqueeze(call: Call) -> Value:
    """The same with dimensions of one put in."""
    if reads_axes(call, 1):
        return unsqueeze_at_run_time(call)
    axes = optional_axes(call, 1)
    if axes is None:
        raise Unsupported("Unsqueeze without axes")
    rank = call.rank(0) + len(axes)
    places = normalize_axes(axes, rank)
    remaining = iter(call.shape(0))
    dims = [1 if i in places else next(remaining) for i in range(rank)]
    return reshape(call, call.value(0), dims)


def transpose(call: Call) -> Value:
    """The dimensions in another order, reversed unless told."""
    rank = call.rank(0)
    order = call.attribute("perm")
    order = list(range(rank))[::-1] if order is None else normalize_axes(order, rank)
    if order == list(range(rank)):
        return call.value(0)
    return call.emit(relax.op.permute_dims(call.tensor(0), order))


def concat(call: Call) -> Value:
    """Tensors one after another along an axis."""
    if len(call.inputs) == 1:
        return call.value(0)
    axis = call.axis(1)
    first = call.shape(0)
    pieces = []
    for i in range(len(call.inputs)):
        if call.rank(i) != len(first):
            raise Invalid(f"Concat of ranks {len(first)} and {call.rank(i)}")
        shape = [*first[:axis], call.shape(i)[axis], *first[axis + 1 :]]
        pieces.append(checked(call, call.tensor(i), shape, "sizes to put together"))
    while len(pieces) > MAX_OPERANDS:
        groups = range(0, len(pieces), MAX_OPERANDS)
        parts = [pieces[start : start + MAX_OPERANDS] for start in groups]
        pieces = [call.emit(relax.op.concat(part, axis)) for part in parts]
    return call.emit(relax.op.concat(pieces, axis))


def split(call: Call) -> tuple[Value, ...]:
    """Pieces along an axis: of given sizes, or as equal as the number of outputs lets them be."""
    axis = call.axis(0)
    size = call.shape(0)[axis]
    count = len(call.node.outputs)
    sizes = _split_sizes(call, size, count)
    known = not call.has(1) or call.is_known(1)
    if len(sizes) != count or (known and not same_dim(sum(sizes), size)):
        raise Unsupported(f"Split of {size} elements into {sizes}")
    if not known:
        # As an input, so that the kernels know the variables.
        call = call.with_inputs([call.value(0), Integers(tuple(sizes))])
    starts = [sum(sizes[:i]) for i in range(count)]
    return tuple(
        _cut(call, {axis: (start, 1, piece)}) for start, piece in zip(starts, sizes, strict=True)
    )


def _split_sizes(call: Call, size: Dim, count: int) -> list[Dim]:
    if call.has(1):
        return known_or_read(call, 1, "the sizes of Split")
    sizes = call.attribute("split")
    if sizes is not None:
        return [int(piece) for piece in sizes]
    if not isinstance(size, int):
        piece = floor_divide(size, count)
        if not same_dim(piece * count, size):
            raise Unsupported(f"{size} elements cannot be proved to divide by {count}")
        return [piece] * count
    piece = -(-size // count)
    return [piece] * (count - 1) + [size - piece * (count - 1)]


def _cut(call: Call, ranges: dict[int, tuple[Dim, int, Dim]]) -> Value:
    """Part of the first input: ``(start, step, count)`` for some axes, all of the others."""
    shape = list(call.shape(0))
    if all(
        same_dim(start, 0) and step == 1 and same_dim(count, shape[axis])
        for axis, (start, step, count) in ranges.items()
    ):
        return call.value(0)
    for axis, (_, _, count) in ranges.items():
        shape[axis] = count

    def source(*index: Any) -> list[Any]:
        return [
            ranges[axis][0] + i * ranges[axis][1] if axis in ranges else i
            for axis, i in enumerate(index)
        ]

    return rearrange(call, call.value(0), shape, source, "slice")


def slice_attributes(call: Call) -> Value:
    """Slice with bounds as attributes (opset 1)."""
    starts, ends = call.attribute("starts"), call.attribute("ends")
    axes = call.attribute("axes") or list(range(len(starts)))
    return _slice(call, starts, ends, axes, [1] * len(starts))


def slice_inputs(call: Call) -> Value:
    """Slice with bounds, and optionally axes and steps, as inputs (opset 10)."""
    if not all(call.is_known(i) for i in range(1, 5) if call.has(i)):
        return slice_at_run_time(call)
    starts = call.integers(1, "the starts of Slice")
    ends = call.integers(2, "the ends of Slice")
    axes = call.integers(3, "the axes of Slice") if call.has(3) else list(range(len(starts)))
    steps = call.integers(4, "the steps of Slice") if call.has(4) else [1] * len(starts)
    return _slice(call, starts, ends, axes, steps)


def _slice(
    call: Call, starts: Sequence[Dim], ends: Sequence[Dim], axes: Sequence[Dim], steps: Any
) -> Value:
    if not all(isinstance(number, int) for number in (*axes, *steps)):
        raise Unsupported("the axes and steps of Slice must be known at compile time")
    shape = call.shape(0)
    bounds = zip(normalize_axes(axes, len(shape)), starts, ends, steps, strict=True)
    return _cut(
        call,
        {axis: _slice_range(shape[axis], start, end, step) for axis, start, end, step in bounds},
    )


def _slice_range(size: Dim, start: Dim, end: Dim, step: int) -> tuple[Dim, int, Dim]:
    """First index, step and number of elements of one axis of a slice."""
    if step == 0:
        raise Unsupported("Slice with a step of zero")
    if step > 0:
        first, last = _bound(start, size, 0, size), _bound(end, size, 0, size)
        span, stride = last - first, step
    else:
        top = size - 1
        first, last = _bound(start, size, 0, top), _bound(end, size, -1, top)
        span, stride = first - last, -step
    count = floor_divide(simplify(span + stride - 1), stride)
    return first, step, count if at_least(count, 0) else _maximum(count, 0)


def _bound(bound: Dim, size: Dim, low: Dim, high: Dim) -> Dim:
    """A bound counted from the front and clamped to ``low`` and ``high``."""
    if at_least(bound, 0):
        counted = bound
    elif at_least(-1 - bound, 0):
        counted = simplify(bound + size)
    else:
        raise Unsupported(f"Slice with the bound {bound}, whose sign is not known")
    # Models write the largest integer for "to the end".
    if isinstance(counted, int) and counted >= 1 << 31:
        return high
    if not at_least(simplify(high - counted), 0):
        counted = high if at_least(simplify(counted - high), 0) else _minimum(counted, high)
    return counted if at_least(simplify(counted - low), 0) else _maximum(counted, low)


def _minimum(left: Dim, right: Dim) -> Dim:
    both = isinstance(left, int) and isinstance(right, int)
    return min(left, right) if both else simplify(tirx.min(as_expression(left), right))


def _maximum(left: Dim, right: Dim) -> Dim:
    both = isinstance(left, int) and isinstance(right, int)
    return max(left, right) if both else simplify(tirx.max(as_expression(left), right))


def expand(call: Call) -> Value:
    """The input broadcast together with a shape."""
    if not call.is_known(1):
        return expand_at_run_time(call)
    wanted = call.integers(1, "the shape of Expand")
    source = call.shape(0)
    shape = broadcast_shape(source, wanted)
    if len(shape) == len(source) and all(map(same_dim, shape, source)):
        return call.value(0)
    offset = len(shape) - len(source)

    def read(*index: Any) -> list[Any]:
        pairs = zip(index[offset:], source, strict=True)
        return [0 if same_dim(dim, 1) else i for i, dim in pairs]

    return rearrange(call, call.value(0), shape, read, "expand")


def tile(call: Call) -> Value:
    """The input repeated along each axis."""
    if not call.is_known(1):
        return tile_at_run_time(call)
    repeats = call.integers(1, "the repeats of Tile")
    source = call.shape(0)
    shape = [simplify(dim * times) for dim, times in zip(source, repeats, strict=True)]

    def read(*index: Any) -> list[Any]:
        rows = zip(index, source, repeats, strict=True)
        return [i if same_dim(times, 1) else tirx.floormod(i, dim) for i, dim, times in rows]

    return rearrange(call, call.value(0), shape, read, "tile")


def depth_to_space(call: Call) -> Value:
    """Blocks of channels laid out as blocks of pixels, in the order DCR or CRD."""
    batch, channels, height, width = call.shape(0)
    block = int(call.attribute("blocksize"))
    mode = call.attribute("mode", "DCR")
    depth = floor_divide(channels, block * block)
    if mode not in ("DCR", "CRD") or not same_dim(depth * block * block, channels):
        raise Unsupported(f"DepthToSpace of {channels} channels in blocks of {block}, {mode}")

    def read(n: Any, c: Any, y: Any, x: Any) -> list[Any]:
        cell = tirx.floormod(y, block) * block + tirx.floormod(x, block)
        channel = cell * depth + c if mode == "DCR" else c * (block * block) + cell
        return [n, channel, tirx.floordiv(y, block), tirx.floordiv(x, block)]

    shape = (batch, depth, simplify(height * block), simplify(width * block))
    return rearrange(call, call.value(0), shape, read, "depth_to_space")


def space_to_depth(call: Call) -> Value:
    """Blocks of pixels laid out as blocks of channels."""
    batch, channels, height, width = call.shape(0)
    block = int(call.attribute("blocksize"))
    mode = call.attribute("mode", "DCR")
    if mode not in ("DCR", "CRD"):
        raise Unsupported(f"SpaceToDepth in the order {mode!r}")

    def read(n: Any, c: Any, y: Any, x: Any) -> list[Any]:
        inner = channels if mode == "DCR" else block * block
        outer, rest = tirx.floordiv(c, inner), tirx.floormod(c, inner)
        cell, channel = (outer, rest) if mode == "DCR" else (rest, outer)
        row, column = tirx.floordiv(cell, block), tirx.floormod(cell, block)
        return [n, channel, y * block + row, x * block + column]

    sizes = (floor_divide(height, block), floor_divide(width, block))
    shape = (batch, simplify(channels * block * block), *sizes)
    return rearrange(call, call.value(0), shape, read, "space_to_depth")


def reverse_sequence(call: Call) -> Expression:
    """Each batch element with its first elements, as many as the second input says, reversed."""
    time, batch = int(call.attribute("time_axis", 0)), int(call.attribute("batch_axis", 1))
    if {time, batch} != {0, 1}:
        raise Unsupported("ReverseSequence over axes other than 0 and 1")

    def kernel(data: te.Tensor, lengths: te.Tensor) -> te.Tensor:
        def element(*index: Any) -> Any:
            length, position = lengths(index[batch]), index[time]
            mirrored = tirx.Select(position < length, length - 1 - position, position)
            return data(*(mirrored if i == time else own for i, own in enumerate(index)))

        return compute(data.shape, element, name="reverse_sequence")

    operands = (call.tensor(0), call.tensor(1))
    return call.emit_te(kernel, *operands, primfunc_name_hint="reverse_sequence")


def trilu(call: Call) -> Expression:
    """Matrices with zeros above or below a diagonal."""
    upper = bool(call.attribute("upper", 1))
    known = immediate(call.value(1)) if call.has(1) else tirx.const(0, "int64")
    read = [call.materialize(reshape(call, call.value(1), ()))] if known is None else []

    def kernel(data: te.Tensor, *diagonals: te.Tensor) -> te.Tensor:
        def element(*index: Any) -> Any:
            row, column = index[-2:]
            diagonal = diagonals[0]() if diagonals else known
            kept = column - row >= diagonal if upper else column - row <= diagonal
            return tirx.Select(kept, data(*index), number(0, data))

        return compute(data.shape, element, name="trilu")

    return call.emit_te(kernel, call.tensor(0), *read, primfunc_name_hint="trilu")


def top_k(call: Call) -> tuple[Expression, Expression]:
    """The k largest or smallest elements along an axis, sorted, and their positions as int64."""
    largest = bool(call.attribute("largest", 1))
    if call.is_known(1):
        return _top_k(call, int(np.ravel(call.constant(1, "the k of TopK"))[0]), largest)
    axis = call.axis(-1)
    count = call.dims_of(call.tensor(1), "the k of TopK")[0]
    results = _top_k(call, call.static_shape(0, "the input of TopK")[axis], largest)
    values, indices = (first_along(call, result, axis, count) for result in results)
    return values, indices


def top_k_attribute(call: Call) -> tuple[Expression, Expression]:
    """TopK with the number of elements as an attribute (opset 1)."""
    return _top_k(call, int(call.attribute("k")), True)


_SORTABLE = {
    "float16": "float32",
    "float32": "float32",
    "float64": "float64",
    "int8": "int32",
    "int16": "int32",
    "int32": "int32",
    "int64": "int64",
    "uint8": "int32",
    "uint16": "int32",
    "uint32": "int64",
    "uint64": "int64",
}
"""Types that TVM's runtime sorts for each element type; all hold its values, uint64's moved."""


def _top_k(call: Call, count: int, largest: bool) -> tuple[Expression, Expression]:
    axis, dtype = call.axis(-1), call.dtype(0)
    if dtype not in _SORTABLE:
        raise Unsupported(f"TopK of {dtype}")
    size = call.shape(0)[axis]
    if not isinstance(size, int) or not 0 < count <= size:
        raise Unsupported(f"TopK of {count} from {size} elements")
    if dtype == "uint64":
        data = _other_sign(call, call.tensor(0), "int64")
    else:
        data = cast(call, call.tensor(0), _SORTABLE[dtype])
    pair = call.emit(relax.op.topk(data, count, axis, "both", largest, "int64"))
    values, indices = (call.emit(relax.TupleGetItem(pair, i)) for i in (0, 1))
    if dtype == "uint64":
        return _other_sign(call, values, dtype), indices
    return cast(call, values, dtype), indices


def _other_sign(call: Call, tensor: Expression, dtype: str) -> Expression:
    """64-bit integers of the other signedness in the same order: the topmost bit is turned over."""

    def turned(x: Any) -> Any:
        top = tirx.const(-(1 << 63), "int64")
        return tirx.reinterpret(dtype, tirx.bitwise_xor(tirx.reinterpret("int64", x), top))

    return map_elements(call, turned, tensor, name="other_sign")


OPERATORS: tuple[Operator, ...] = (
    Operator("Reshape", reshape_to),
    Operator("Flatten", flatten),
    Operator("Squeeze", squeeze),
    Operator("Unsqueeze", unsqueeze),
    Operator("Transpose", transpose),
    Operator("Concat", concat),
    Operator("Split", split),
    Operator("Slice", slice_attributes),
    Operator("Slice", slice_inputs, since=10),
    Operator("Expand", expand),
    Operator("Tile", tile),
    Operator("DepthToSpace", depth_to_space),
    Operator("SpaceToDepth", space_to_depth),
    Operator("ReverseSequence", reverse_sequence),
    Operator("Trilu", trilu),
    Operator("TopK", top_k_attribute),
    Operator("TopK", top_k, since=10),
    *INDEXING,
    *CREATION,
    *PADDING,
    *RESIZING,
)
