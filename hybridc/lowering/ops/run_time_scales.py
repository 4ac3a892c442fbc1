"""Resize by sizes, scales or regions that are data.

A kernel works out the sizes of the result and the scales; per axis, another one makes the tables of
taps and weights that :mod:`hybridc.lowering.ops.resize` reads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tvm import relax, te, tirx

from hybridc.lowering.call import Call, Unsupported, as_expression, dtype_of
from hybridc.lowering.ops.common import Own, cast, compute, emit_kernel, reduce_axis
from hybridc.lowering.ops.coordinates import (
    TIRX,
    Axis,
    Interpolation,
    reach,
    stretched_tap,
    taps_of,
)
from hybridc.lowering.ops.loops import Array, emit_program, equals, local
from hybridc.lowering.runtime_sizes import known_length, resolve
from hybridc.lowering.value import Dim, Expression


def sizes_by_scales(call: Call, sizes: Sequence[Dim], scales: Expression) -> list[Dim]:
    """``floor(size * scale)`` in float32 for each axis that is resized."""
    _check_length(call, scales, len(sizes))

    def program(own: Own, scales: Array, result: Array) -> None:
        for i, size in enumerate(sizes):
            scaled = as_expression(own(size)).astype("float32") * scales[i]
            result[i] = tirx.max(tirx.floor(scaled).astype("int64"), tirx.const(0, "int64"))

    return resolve(call, len(sizes), program, scales, name="scaled_sizes")


def _check_length(call: Call, tensor: Expression, count: int) -> None:
    if known_length(call, tensor, "the scales or sizes of Resize") != count:
        raise Unsupported("Resize with a wrong number of scales or sizes")


def scales_by_sizes(
    call: Call, sizes: Sequence[Dim], wanted: Expression, policy: str
) -> tuple[list[Dim], Expression]:
    """Sizes as the aspect-ratio policy corrects them, and the scales that lead to them."""
    count = len(sizes)
    _check_length(call, wanted, count)
    if policy not in ("stretch", "not_larger", "not_smaller"):
        raise Unsupported(f"keep_aspect_ratio_policy {policy!r}")
    pick = tirx.min if policy == "not_larger" else tirx.max

    def program(own: Own, wanted: Array, result: Array, scales: Array) -> None:
        extents = [as_expression(own(size)).astype("float32") for size in sizes]
        for i in range(count):
            result[i] = wanted[i].astype("int64")
            scales[i] = wanted[i].astype("float32") / extents[i]
        if policy == "stretch":
            return
        common = local("float32", scales[0])
        for i in range(1, count):
            common[0] = pick(common[0], scales[i])
        for i in range(count):
            scales[i] = common[0]
            rounded = tirx.floor(common[0] * extents[i] + tirx.const(0.5, "float32"))
            result[i] = rounded.astype("int64")

    results = [((count,), "int64"), ((count,), "float32")]
    outputs, scales = emit_program(call, program, results, wanted, name="scales_by_sizes")
    return call.dims_of(outputs, "the sizes of Resize"), scales


def tables(
    call: Call,
    how: Interpolation,
    extent: tuple[Dim, Dim],
    place: tuple[int, int],
    scales: Expression,
    region: Expression | None,
) -> list[Expression]:
    """Tables of the taps of one axis, of shape (output, taps): places, and weights if any.

    Args:
        call: The node being lowered.
        how: Its attributes.
        extent: Sizes of the axis in the input and in the output.
        place: Which of the resized axes it is, and of how many.
        scales: Vector with the scales of the resized axes.
        region: Vector with their starts and ends, for tf_crop_and_resize.
    """
    index, count = place
    operands = [cast(call, scales, "float32")]
    operands += [] if region is None else [cast(call, region, "float32")]

    def axis_of(own: Own, scales: te.Tensor, *regions: te.Tensor) -> Axis:
        bounds = (tirx.const(0.0, "float32"), tirx.const(1.0, "float32"))
        if regions:
            bounds = (regions[0](index), regions[0](index + count))
        return Axis(own(extent[0]), own(extent[1]), scales(index), bounds)

    if how.antialias:
        return _stretched_tables(call, how, axis_of, extent[1], index, operands)
    several = {"nearest": 1, "cubic": 4}.get(how.mode, 2)

    def table(weights: bool) -> Expression:
        def kernel(own: Own, *arrays: te.Tensor) -> te.Tensor:
            axis = axis_of(own, *arrays)

            def element(position: Any, tap: Any) -> Any:
                taps = taps_of(how, axis, position, TIRX)
                item = _chosen(tap, (taps.weights or ()) if weights else taps.places)
                return item.astype("float32" if weights else "int32")

            return compute([own(extent[1]), several], element, "taps")

        return emit_kernel(call, kernel, *operands, name="taps")

    return [table(False)] if how.mode == "nearest" else [table(False), table(True)]


def _stretched_tables(
    call: Call,
    how: Interpolation,
    axis_of: Callable[..., Axis],
    output: Dim,
    index: int,
    operands: Sequence[Expression],
) -> list[Expression]:
    """The tables for antialiasing; how many taps there are is known only when the model runs."""

    def program(_own: Own, scales: Array, result: Array) -> None:
        result[0] = reach(how, scales[index], TIRX).astype("int64") * 2

    (count,) = resolve(call, 1, program, operands[0], name="taps")

    def places(own: Own, size: te.Tensor, *arrays: te.Tensor) -> te.Tensor:
        def element(position: Any, tap: Any) -> Any:
            place, _ = stretched_tap(how, axis_of(own, *arrays), position, tap, TIRX)
            return place.astype("int32")

        return compute([own(output), size.shape[0]], element, "places")

    def weights(own: Own, size: te.Tensor, *arrays: te.Tensor) -> te.Tensor:
        shape = [own(output), size.shape[0]]

        def element(position: Any, tap: Any) -> Any:
            return stretched_tap(how, axis_of(own, *arrays), position, tap, TIRX)[1]

        raw, step = compute(shape, element, "raw"), reduce_axis(shape[1], "step")
        total = compute(shape[:1], lambda position: te.sum(raw(position, step), step), "total")
        return compute(shape, lambda p, tap: raw(p, tap) / total(p), "weights")

    # The kernels learn the number of taps from a tensor of that length.
    size = call.emit(relax.op.zeros(relax.ShapeExpr([count]), "int8"))
    return [emit_kernel(call, k, size, *operands, name="taps") for k in (places, weights)]


def _chosen(which: Any, items: Sequence[Any]) -> Any:
    """One of several expressions by a number."""
    result = items[0]
    for i, other in enumerate(items[1:], 1):
        result = tirx.Select(equals(which, i), other, result)
    return result


def as_vector(call: Call, index: int) -> Expression | None:
    """Input ``index`` as a run-time tensor; ``None`` if it is left out or has no elements."""
    if not call.has(index) or call.shape(index) == (0,):
        return None
    tensor = call.tensor(index)
    return cast(call, tensor, "float32") if dtype_of(tensor).startswith("float") else tensor
