"""Operators that read a picture at positions of their own: sampling grids and their makers.

Coordinates are computed first, by a kernel of their own, so that the channels share them. Reads
outside the picture never leave the tensor, whatever the coordinates are: an index is brought
inside it before it is used.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from tvm import relax, te, tirx

from hybridc.lowering.call import Call, Operator, Unsupported
from hybridc.lowering.ops.common import (
    HALF_TYPES,
    Own,
    cast,
    compute,
    emit_kernel,
    floor_divide,
    is_float,
    product,
    reduce_axis,
    reshape,
    same_dim,
)
from hybridc.lowering.ops.loops import Array, count, emit_program, equals, when
from hybridc.lowering.ops.regions import REGIONS
from hybridc.lowering.runtime_sizes import known_or_read
from hybridc.lowering.value import Dim, Expression

_MODES = {
    "bilinear": "linear",
    "linear": "linear",
    "bicubic": "cubic",
    "cubic": "cubic",
    "nearest": "nearest",
}
_CUBIC = -0.75
"""Coefficient of the cubic kernel, which the standard fixes."""


def work_type(dtype: str) -> str:
    """Type that interpolation is done in: float64 for itself, float32 for all others."""
    return "float64" if dtype == "float64" else "float32"


def grid_sample(call: Call) -> Expression:
    """The input interpolated at the positions that a grid holds, in any number of dimensions."""
    mode = _MODES.get(call.attribute("mode", "linear"))
    padding = call.attribute("padding_mode", "zeros")
    aligned = bool(call.attribute("align_corners", 0))
    if mode is None or padding not in ("zeros", "border", "reflection"):
        raise Unsupported(f"GridSample with {call.attribute('mode')!r} and {padding!r}")
    if mode != "nearest" and not is_float(call.dtype(0)):
        raise Unsupported(f"{mode} GridSample of {call.dtype(0)}")
    sizes = call.shape(0)[2:]
    if not same_dim(call.shape(1)[-1], len(sizes)) or call.rank(1) != len(sizes) + 2:
        raise Unsupported(f"GridSample of {call.shape(0)} at {call.shape(1)}")
    places = _grid_coordinates(call, sizes, mode, aligned)
    work = work_type(call.dtype(0))
    shape = (*call.shape(0)[:2], *call.shape(1)[1:-1])

    def kernel(own: Own, data: te.Tensor, coordinates: te.Tensor) -> te.Tensor:
        extents = [own(size) for size in sizes]

        def element(n: Any, c: Any, *where: Any) -> Any:
            taps = [
                _taps(mode, coordinates(n, *where, axis).astype(work)) for axis in range(len(sizes))
            ]
            total: Any = tirx.const(0, data.dtype if mode == "nearest" else work)
            for combination in itertools.product(*taps):
                pixel = _pixel(data, (n, c), combination, extents, padding, aligned)
                total = total + _weighted(pixel, [weight for _, weight in combination], work)
            return total.astype(data.dtype)

        return compute(map(own, shape), element, "grid_sample")

    return emit_kernel(call, kernel, call.tensor(0), places, name="grid_sample")


def _grid_coordinates(call: Call, sizes: Sequence[Dim], mode: str, aligned: bool) -> Expression:
    """Positions in elements, outermost axis first; a grid has the innermost first, from -1 to 1."""
    work = work_type(call.dtype(1))
    shape = call.shape(1)

    def kernel(own: Own, grid: te.Tensor) -> te.Tensor:
        def element(*index: Any) -> Any:
            *where, axis = index
            result: Any = tirx.const(0, work)
            for i, size in enumerate(sizes):
                given = grid(*where, len(sizes) - 1 - i).astype(work)
                place = _denormalized(given, own(size), aligned, work)
                place = tirx.nearbyint(place) if mode == "nearest" else place
                result = tirx.Select(equals(axis, i), place, result)
            return result

        return compute(map(own, shape), element, "grid_coordinates")

    return emit_kernel(call, kernel, call.tensor(1), name="grid_coordinates")


def _denormalized(given: Any, size: Dim, aligned: bool, work: str) -> Any:
    one, two = tirx.const(1, work), tirx.const(2, work)
    length = _float(size, work)
    if aligned:
        return (given + one) / two * (length - one)
    return ((given + one) * length - one) / two


def _float(dim: Dim, dtype: str) -> Any:
    return tirx.const(dim, dtype) if isinstance(dim, int) else dim.astype(dtype)


def _taps(mode: str, place: Any) -> list[tuple[Any, Any]]:
    """Index and weight of each element that a coordinate is made of."""
    if mode == "nearest":
        return [(place.astype("int64"), None)]
    base = tirx.floor(place)
    first, rest = base.astype("int64"), place - base
    one = tirx.const(1, str(place.ty.dtype))
    if mode == "linear":
        return [(first, one - rest), (first + 1, rest)]
    return [(first + i - 1, weight) for i, weight in enumerate(_cubic_weights(rest, one))]


def _cubic_weights(s: Any, one: Any) -> list[Any]:
    a = one * _CUBIC

    def near(x: Any) -> Any:
        return ((a + 2.0 * one) * x - (a + 3.0 * one)) * x * x + one

    def far(x: Any) -> Any:
        return ((a * x - 5.0 * a) * x + 8.0 * a) * x - 4.0 * a

    return [far(s + one), near(s), near(one - s), far(2.0 * one - s)]


def _pixel(
    data: te.Tensor,
    head: Sequence[Any],
    taps: Sequence[tuple[Any, Any]],
    sizes: Sequence[Dim],
    padding: str,
    aligned: bool,
) -> Any:
    """The element at the taps' indices, or what stands there outside the picture."""
    indices = [index for index, _ in taps]
    if padding == "reflection":
        folded = [_folded(i, size, aligned) for i, size in zip(indices, sizes, strict=True)]
        return data(*head, *map(_clamped, folded, sizes))
    value = data(*head, *map(_clamped, indices, sizes))
    if padding == "border":
        return value
    inside = [tirx.all(i >= 0, i < size) for i, size in zip(indices, sizes, strict=True)]
    return tirx.Select(tirx.all(*inside), value, tirx.const(0, data.dtype))


def _clamped(index: Any, size: Dim) -> Any:
    return tirx.max(tirx.min(index, size - 1), tirx.const(0, "int64"))


def _folded(index: Any, size: Dim, aligned: bool) -> Any:
    """An index mirrored back into the picture: at its edge elements, or at the edges of those."""
    overlap = 1 if aligned else 0
    period = tirx.max(2 * (size - overlap) + tirx.const(0, "int64"), 1)
    turn = tirx.floormod(index, period)
    return tirx.min(turn, period - (1 - overlap) - turn)


def _weighted(pixel: Any, weights: Sequence[Any], work: str) -> Any:
    if weights[0] is None:
        return pixel
    total = pixel.astype(work)
    for weight in weights:
        total = total * weight
    return total


def affine_grid(call: Call) -> Expression:
    """The grid for GridSample that an affine map of the output positions gives."""
    aligned = bool(call.attribute("align_corners", 0))
    size = known_or_read(call, 1, "the size of AffineGrid")
    if len(size) not in (4, 5):
        raise Unsupported(f"AffineGrid of {len(size)} dimensions")
    batch, extents = call.shape(0)[0], size[2:]
    dims, dtype = len(extents), call.dtype(0)
    work = work_type(dtype)

    def kernel(own: Own, theta: te.Tensor) -> te.Tensor:
        def element(n: Any, *index: Any) -> Any:
            *where, row = index
            total = theta(n, row, dims).astype(work)
            for axis in range(dims):
                place = _position(where[axis], own(extents[axis]), aligned, work)
                total = total + theta(n, row, dims - 1 - axis).astype(work) * place
            return total.astype(dtype)

        return compute(map(own, (batch, *extents, dims)), element, "affine_grid")

    return emit_kernel(call, kernel, call.tensor(0), name="affine_grid")


def _position(index: Any, size: Dim, aligned: bool, work: str) -> Any:
    """Where an output element lies between -1 and 1."""
    one, length, i = tirx.const(1, work), _float(size, work), index.astype(work)
    if aligned:
        return 2.0 * i / tirx.max(length - one, one) - one
    return (2.0 * i + one) / length - one


def max_unpool(call: Call) -> Expression:
    """Zeros with the elements put back where MaxPool found them.

    Positions count in the tensor that MaxPool's attributes lead to; one of a larger output shape
    holds it at its beginning, as the standard's own test has it.
    """
    kernel_shape = call.attribute("kernel_shape")
    dims = len(kernel_shape)
    strides = call.attribute("strides") or [1] * dims
    pads = call.attribute("pads") or [0] * (2 * dims)
    source = call.shape(0)
    pooled = [
        (size - 1) * strides[i] - (pads[i] + pads[i + dims]) + kernel_shape[i]
        for i, size in enumerate(source[2:])
    ]
    shape = (*source[:2], *pooled)
    flat = _scattered(call, product(shape))
    result = reshape(call, flat, shape)
    if not call.has(2):
        return result
    return _grown(call, result, shape, known_or_read(call, 2, "the output shape of MaxUnpool"))


def _scattered(call: Call, total: Dim) -> Expression:
    dtype = call.dtype(0)
    elements = product(call.shape(0))
    values = reshape(call, call.value(0), (elements,))
    places = reshape(call, call.value(1), (elements,))

    def program(own: Own, values: Array, places: Array, target: Array) -> None:
        with count(own(total)) as i:
            target[i] = 0
        with count(own(elements)) as i:
            place = places[i].astype("int64")
            with when(tirx.all(place >= 0, place < own(total))):
                target[place] = values[i]

    operands = (call.materialize(values), call.materialize(places))
    return emit_program(call, program, [((total,), dtype)], *operands, name="max_unpool")[0]


def _grown(
    call: Call, tensor: Expression, shape: Sequence[Dim], wanted: Sequence[Dim]
) -> Expression:
    if len(wanted) != len(shape):
        raise Unsupported(f"MaxUnpool of {len(shape)} dimensions to {len(wanted)}")
    if all(map(same_dim, wanted, shape)):
        return tensor

    def kernel(own: Own, data: te.Tensor) -> te.Tensor:
        sizes = list(map(own, shape))

        def element(*index: Any) -> Any:
            inside = [i < size for i, size in zip(index, sizes, strict=True)]
            value = data(*map(_clamped, index, sizes))
            return tirx.Select(tirx.all(*inside), value, tirx.const(0, data.dtype))

        return compute(map(own, wanted), element, "grow")

    return emit_kernel(call, kernel, tensor, name="grow")


def col2im(call: Call) -> Expression:
    """Columns of blocks summed back into the picture that they were cut from."""
    image = known_or_read(call, 1, "the image shape of Col2Im")
    block = known_or_read(call, 2, "the block shape of Col2Im")
    dims = len(block)
    strides = call.attribute("strides") or [1] * dims
    dilations = call.attribute("dilations") or [1] * dims
    pads = call.attribute("pads") or [0] * (2 * dims)
    batch, rows, _ = call.shape(0)
    channels = floor_divide(rows, product(block))
    dtype = call.dtype(0)
    work = "float32" if dtype in HALF_TYPES else dtype
    spans = [
        floor_divide(
            image[i] + pads[i] + pads[i + dims] - dilations[i] * (block[i] - 1) - 1, strides[i]
        )
        + 1
        for i in range(dims)
    ]

    def kernel(own: Own, data: te.Tensor) -> te.Tensor:
        offsets = [reduce_axis(own(extent), f"k{i}") for i, extent in enumerate(block)]

        def element(n: Any, c: Any, *pixel: Any) -> Any:
            row, column, inside = c, tirx.const(0, "int64"), []
            for i, offset in enumerate(offsets):
                span = own(spans[i])
                shifted = pixel[i] + pads[i] - offset.var * dilations[i]
                step = tirx.floordiv(shifted, strides[i])
                inside += [step >= 0, step < span, step * strides[i] >= shifted]
                row = row * own(block[i]) + offset.var
                column = column * span + _clamped(step, span)
            value = data(n, row, column).astype(work)
            return te.sum(tirx.Select(tirx.all(*inside), value, tirx.const(0, work)), axis=offsets)

        return compute(map(own, (batch, channels, *image)), element, "col2im")

    return cast(call, emit_kernel(call, kernel, call.tensor(0), name="col2im"), dtype)


def deform_conv(call: Call) -> Expression:
    """Convolution whose taps are moved by offsets, and weighted by a mask, that are inputs.

    The moved taps are gathered into columns first; a matrix product with the weights follows.
    """
    weights = call.static_shape(1, "the weights of DeformConv")
    if weights[2:] != tuple(call.attribute("kernel_shape") or weights[2:]):
        raise Unsupported("DeformConv whose kernel_shape is not that of its weights")
    group = int(call.attribute("group", 1))
    batch, channels = call.shape(0)[:2]
    places = call.shape(2)[2:]
    columns = _deformed_columns(call, weights[2:], places)
    depth, pixels = weights[1] * int(product(weights[2:])), product(places)
    columns = reshape(call, columns, (batch, group, depth, pixels))
    matrix = reshape(call, call.value(1), (1, group, weights[0] // group, depth))
    if not same_dim(channels, weights[1] * group) or weights[0] % group:
        raise Unsupported(f"DeformConv of {channels} channels in {group} groups")
    dtype = call.dtype(0)
    operands = (call.materialize(matrix), call.materialize(columns))
    result = call.emit(relax.op.matmul(*operands, out_dtype=dtype))
    result = reshape(call, result, (batch, weights[0], *places))
    if not call.has(3):
        return result
    bias = reshape(call, call.value(3), (1, weights[0], *[1] * len(places)))
    return call.emit(relax.op.add(result, call.materialize(bias)))


def _deformed_columns(call: Call, kernel: Sequence[int], places: Sequence[Dim]) -> Expression:
    """The taps as a tensor of shape (batch, channels, taps, places ...)."""
    dims, cells = len(kernel), int(product(kernel))
    strides = call.attribute("strides") or [1] * dims
    dilations = call.attribute("dilations") or [1] * dims
    pads = call.attribute("pads") or [0] * (2 * dims)
    groups = int(call.attribute("offset_group", 1))
    batch, channels, *sizes = call.shape(0)
    if not isinstance(channels, int) or channels % groups:
        raise Unsupported(f"DeformConv of {channels} channels in {groups} offset groups")
    masked = call.has(4)
    work = work_type(call.dtype(0))

    def build(own: Own, data: te.Tensor, offsets: te.Tensor, *mask: te.Tensor) -> te.Tensor:
        extents = list(map(own, sizes))

        def element(n: Any, c: Any, cell: Any, *where: Any) -> Any:
            first = tirx.floordiv(c, channels // groups) * cells + cell
            taps: list[Any] = []
            rest = cell
            for axis in reversed(range(dims)):
                step = tirx.floormod(rest, kernel[axis])
                rest = tirx.floordiv(rest, kernel[axis])
                base = where[axis] * strides[axis] - pads[axis] + step * dilations[axis]
                moved = base.astype(work) + offsets(n, first * dims + axis, *where).astype(work)
                taps.insert(0, _taps("linear", moved))
            total: Any = tirx.const(0, work)
            for combination in itertools.product(*taps):
                pixel = _pixel(data, (n, c), combination, extents, "zeros", False)
                total = total + _weighted(pixel, [weight for _, weight in combination], work)
            if masked:
                total = total * mask[0](n, first, *where).astype(work)
            return total.astype(data.dtype)

        return compute(map(own, (batch, channels, cells, *places)), element, "deformed_columns")

    operands = [call.tensor(0), call.tensor(2), *([call.tensor(4)] if masked else [])]
    return emit_kernel(call, build, *operands, name="deformed_columns")


OPERATORS: tuple[Operator, ...] = (
    Operator("GridSample", grid_sample, since=16),
    Operator("AffineGrid", affine_grid, since=20),
    Operator("MaxUnpool", max_unpool),
    Operator("Col2Im", col2im, since=18),
    Operator("DeformConv", deform_conv, since=19),
    *REGIONS,
)
