"""Resize and Upsample: interpolation that is separable over the axes.

Each resized axis maps an output position to a position in the input, and that to a few taps with
weights. The arithmetic is ONNX Runtime's, in float32 and in the same order, because a rounding
difference can move the nearest element. Where the sizes are known it is done here with numpy, and
the kernel reads taps and weights from small tables; otherwise it is part of the kernel. A nearest
element that is just an integer quotient of the position becomes that quotient.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from tvm import te, tirx

from hybridc.lowering.call import Call, Operator, Unsupported, as_expression, shape_of
from hybridc.lowering.ops.common import (
    HALF_TYPES,
    Own,
    cast,
    compute,
    derived_constant,
    emit_kernel,
    is_float,
    normalize_axes,
    reduce_axis,
    simplify,
)
from hybridc.lowering.ops.coordinates import (
    NUMPY,
    TIRX,
    Axis,
    Interpolation,
    Taps,
    reach,
    stretched_tap,
    taps_of,
)
from hybridc.lowering.ops.run_time_scales import (
    as_vector,
    scales_by_sizes,
    sizes_by_scales,
    tables,
)
from hybridc.lowering.value import Dim, Expression, Value


def resize(call: Call) -> Value:
    """Resize by scales or to sizes (opset 11 and later)."""
    how = Interpolation(
        mode=call.attribute("mode", "nearest"),
        transformation=call.attribute("coordinate_transformation_mode", "half_pixel"),
        nearest=call.attribute("nearest_mode", "round_prefer_floor"),
        cubic=float(call.attribute("cubic_coeff_a", -0.75)),
        exclude_outside=bool(call.attribute("exclude_outside", 0)),
        extrapolation=float(call.attribute("extrapolation_value", 0.0)),
        antialias=bool(call.attribute("antialias", 0)),
    )
    axes = call.attribute("axes")
    chosen = normalize_axes(axes if axes is not None else range(call.rank(0)), call.rank(0))
    if not all(call.is_known(i) for i in range(1, 4) if call.has(i) and call.shape(i) != (0,)):
        return _resize_by_data(call, how, chosen, as_vector(call, 2))
    return _interpolate(call, how, _axes(call, how, chosen))


def resize_10(call: Call) -> Value:
    """Resize by scales, with positions divided by the scale (opset 10)."""
    if not call.is_known(1):
        mode = call.attribute("mode", "nearest")
        how = Interpolation(mode=mode, transformation="asymmetric", nearest="simple")
        return _resize_by_data(call, how, range(call.rank(0)), as_vector(call, 1))
    scales = call.constant(1, "the scales of Resize").astype(np.float32)
    return _scaled(call, call.attribute("mode", "nearest"), scales)


def upsample_attributes(call: Call) -> Value:
    """Upsample by scales as an attribute (opset 7)."""
    scales = np.array(call.attribute("scales"), np.float32)
    return _scaled(call, call.attribute("mode", "nearest"), scales)


def _scaled(call: Call, mode: str, scales: Iterable[np.float32]) -> Value:
    how = Interpolation(mode=mode, transformation="asymmetric", nearest="simple")
    sizes = call.shape(0)
    axes = [
        Axis(size, _scaled_size(size, scale), scale)
        for size, scale in zip(sizes, scales, strict=True)
    ]
    return _interpolate(call, how, axes)


def _axes(call: Call, how: Interpolation, chosen: Sequence[int]) -> list[Axis]:
    """How each axis of the input is resized; those not ``chosen`` stay."""
    result = [Axis(size, size, np.float32(1)) for size in call.shape(0)]
    regions = _regions(call, how, len(chosen))
    given = call.has(2) and call.shape(2) != (0,)
    if given:
        scales = list(call.constant(2, "the scales of Resize").astype(np.float32))
        if len(scales) != len(chosen):
            raise Unsupported("Resize with a wrong number of scales")
        outputs: list[Dim] = [
            _scaled_size(result[axis].size, scale)
            for axis, scale in zip(chosen, scales, strict=True)
        ]
    else:
        outputs = call.integers(3, "the sizes of Resize")
        scales, outputs = _scales_of_sizes(call, [result[axis].size for axis in chosen], outputs)
    for axis, output, scale, region in zip(chosen, outputs, scales, regions, strict=True):
        result[axis] = Axis(result[axis].size, output, scale, region)
    return result


def _regions(call: Call, how: Interpolation, count: int) -> list[tuple[Any, Any]]:
    if how.transformation != "tf_crop_and_resize":
        return [(np.float32(0), np.float32(1))] * count
    region = call.constant(1, "the region of Resize").astype(np.float32)
    return list(zip(region[:count], region[count:], strict=True))


def _scaled_size(size: Dim, scale: np.float32) -> Dim:
    """``floor(size * scale)``, multiplied in float32."""
    if isinstance(size, int):
        return int(np.floor(np.float32(size) * scale))
    if not float(scale).is_integer():
        raise Unsupported("Resize of a symbolic dimension by a scale that is not whole")
    return simplify(size * int(scale))


def _scales_of_sizes(
    call: Call, sizes: Sequence[Dim], outputs: Sequence[Dim]
) -> tuple[list[Any], list[Dim]]:
    """Scales that lead to given sizes, and the sizes as the aspect-ratio policy corrects them."""
    policy = call.attribute("keep_aspect_ratio_policy", "stretch")
    known = all(isinstance(dim, int) for dim in (*sizes, *outputs))
    if not known and policy != "stretch":
        raise Unsupported(f"{policy} needs a static shape")
    if not known:
        return [_ratio(out, size) for out, size in zip(outputs, sizes, strict=True)], list(outputs)
    scales = [np.float32(out) / np.float32(size) for out, size in zip(outputs, sizes, strict=True)]
    if policy == "stretch":
        return scales, list(outputs)
    if policy not in ("not_larger", "not_smaller"):
        raise Unsupported(f"keep_aspect_ratio_policy {policy!r}")
    scale = min(scales) if policy == "not_larger" else max(scales)
    rounded = [int(np.floor(np.float32(scale * np.float32(size)) + 0.5)) for size in sizes]
    return [scale] * len(scales), rounded


def _ratio(output: Dim, size: Dim) -> Any:
    if isinstance(output, int) and isinstance(size, int):
        return np.float32(output) / np.float32(size)
    ratio = simplify(as_expression(output) - as_expression(size))
    if isinstance(ratio, int) and ratio == 0:
        return np.float32(1)
    return as_expression(output).astype("float32") / as_expression(size).astype("float32")


def _interpolate(call: Call, how: Interpolation, axes: Sequence[Axis]) -> Value:
    how.check()
    resized = [i for i, axis in enumerate(axes) if not axis.unchanged(how)]
    if not resized:
        return call.value(0)
    if how.mode != "nearest" and not is_float(call.dtype(0)):
        raise Unsupported(f"{how.mode} Resize of {call.dtype(0)}")
    if how.antialias:
        return _antialiased(call, how, {i: axes[i] for i in resized})
    plans = {i: _plan(call, how, axes[i], i) for i in resized}
    return _emit(call, how, [axis.output for axis in axes], plans)


def _antialiased(call: Call, how: Interpolation, axes: dict[int, Axis]) -> Value:
    """Interpolation with a filter of many taps."""
    if not all(axis.known for axis in axes.values()):
        raise Unsupported("Resize with antialias of symbolic dimensions by scales that are known")
    plans = {}
    for i, axis in axes.items():
        taps = np.arange(2 * int(reach(how, axis.scale, NUMPY)), dtype=np.int64)
        positions = np.arange(axis.output, dtype=np.int64)[:, None]
        places, weights = stretched_tap(how, axis, positions, taps, NUMPY)
        weights = weights / weights.sum(1, keepdims=True, dtype=np.float32)
        plans[i] = [
            call.materialize(derived_constant(call, f"places{i}", places.astype(np.int32))),
            call.materialize(derived_constant(call, f"weights{i}", weights.astype(np.float32))),
        ]
    return _filter_axes(call, how, plans)


def _filter_axes(call: Call, how: Interpolation, plans: dict[int, list[Expression]]) -> Expression:
    """Weighted sums along one axis after the other, by tables of places and weights."""
    dtype = call.dtype(0)
    data = cast(call, call.tensor(0), "float32" if dtype in HALF_TYPES else dtype)
    for axis, tables_of_axis in plans.items():
        data = _filtered(call, how, data, axis, tables_of_axis)
    return cast(call, data, dtype)


def _filtered(
    call: Call, how: Interpolation, data: Expression, axis: int, tables: Sequence[Expression]
) -> Expression:
    """Weighted sums along one axis."""
    outputs = shape_of(tables[0])[0]
    shape = [*shape_of(data)[:axis], outputs, *shape_of(data)[axis + 1 :]]

    def kernel(own: Own, data: te.Tensor, places: te.Tensor, weights: te.Tensor) -> te.Tensor:
        tap = reduce_axis(places.shape[1], "tap")

        def term(*index: Any) -> Any:
            place = tirx.max(places(index[axis], tap), tirx.const(0, "int32"))
            item = data(*index[:axis], place, *index[axis + 1 :])
            return te.sum(item * weights(index[axis], tap).astype(data.dtype), axis=tap)

        total = compute(map(own, shape), term, "filtered")
        if not how.extrapolates:
            return total
        filler = tirx.const(how.extrapolation, data.dtype)

        def element(*index: Any) -> Any:
            return tirx.Select(places(index[axis], 0) < 0, filler, total(*index))

        return compute(map(own, shape), element, "extrapolated")

    return emit_kernel(call, kernel, data, *tables, name="resize")


def _resize_by_data(
    call: Call, how: Interpolation, chosen: Sequence[int], scales: Expression | None
) -> Value:
    """Resize whose scales, sizes or region are known only when the model runs."""
    how.check()
    if how.mode != "nearest" and not is_float(call.dtype(0)):
        raise Unsupported(f"{how.mode} Resize of {call.dtype(0)}")
    shape = list(call.shape(0))
    sizes = [shape[axis] for axis in chosen]
    if scales is None:
        policy = call.attribute("keep_aspect_ratio_policy", "stretch")
        outputs, scales = scales_by_sizes(call, sizes, call.tensor(3), policy)
    else:
        outputs = sizes_by_scales(call, sizes, scales)
    region = as_vector(call, 1) if how.extrapolates else None
    plans: dict[int, list[Any]] = {}
    for place, (axis, output) in enumerate(zip(chosen, outputs, strict=True)):
        extent, shape[axis] = (shape[axis], output), output
        plans[axis] = tables(call, how, extent, (place, len(chosen)), scales, region)
    if how.antialias:
        return _filter_axes(call, how, plans)
    return _emit(call, how, shape, {axis: _Plan(tables=rows) for axis, rows in plans.items()})


def _emit(call: Call, how: Interpolation, shape: Sequence[Dim], plans: dict[int, _Plan]) -> Value:
    rows = [table for plan in plans.values() for table in plan.tables]

    def kernel(own: Own, data: te.Tensor, *arrays: te.Tensor) -> te.Tensor:
        remaining = iter(arrays)
        taps = {i: plan.bind(remaining, own) for i, plan in plans.items()}
        return _compute(data, [own(dim) for dim in shape], taps, how)

    operands = [call.tensor(0), *(call.materialize(table) for table in rows)]
    return emit_kernel(call, kernel, *operands, name="resize")


@dataclass(frozen=True)
class _Plan:
    """How one axis finds its taps: from tables, or by a formula of the output position."""

    formula: Callable[[Own, Any], Taps] | None = None
    tables: list[Value] = field(default_factory=list)

    def bind(self, arrays: Any, own: Own) -> Callable[[Any], Taps]:
        """The function from an output position to its taps, given the tables as tensors."""
        if self.formula is not None:
            return functools.partial(self.formula, own)
        given = [next(arrays) for _ in self.tables]
        places, weights = given[0], given[1] if len(given) > 1 else None

        def read(position: Any) -> Taps:
            count = int(places.shape[1])
            return Taps(
                tuple(places(position, i) for i in range(count)),
                None if weights is None else tuple(weights(position, i) for i in range(count)),
            )

        return read


def _plan(call: Call, how: Interpolation, axis: Axis, number: int) -> _Plan:
    if not axis.known:
        quotient = _whole_quotient(how, axis)

        def formula(own: Own, position: Any) -> Taps:
            return taps_of(how, axis.translated(own), position, TIRX)

        return _Plan(quotient or formula)
    positions = np.arange(axis.output, dtype=np.int64)
    taps = taps_of(how, axis, positions, NUMPY)
    if how.mode == "nearest" and not how.extrapolates:
        step = axis.output // axis.size if axis.size else 0
        if step and np.array_equal(taps.places[0], positions // step):
            return _Plan(lambda _own, position: Taps((tirx.floordiv(position, step),), None))
    tables: list[Value] = [
        derived_constant(call, f"places{number}", np.stack(taps.places, 1).astype(np.int32))
    ]
    if taps.weights is not None:
        weights = np.stack(np.broadcast_arrays(*taps.weights), 1).astype(np.float32)
        tables.append(derived_constant(call, f"weights{number}", weights))
    return _Plan(tables=tables)


def _whole_quotient(how: Interpolation, axis: Axis) -> Callable[[Own, Any], Taps] | None:
    """``position // scale`` where that is what a symbolic axis comes to."""
    if (
        how.mode != "nearest"
        or how.transformation != "asymmetric"
        or how.nearest
        not in (
            "floor",
            "simple",
        )
    ):
        return None
    if not isinstance(axis.scale, np.float32) or not float(axis.scale).is_integer():
        return None
    return lambda _own, position: Taps((tirx.floordiv(position, int(axis.scale)),), None)


def _compute(
    data: te.Tensor,
    shape: Sequence[Dim],
    taps: dict[int, Callable[[Any], Taps]],
    how: Interpolation,
) -> te.Tensor:
    """The kernel: a weighted sum over the taps of one axis inside that of another."""
    work = "float32" if str(data.dtype) in HALF_TYPES else str(data.dtype)

    def element(*index: Any) -> Any:
        found = {i: function(index[i]) for i, function in taps.items()}
        value = _sum(data, list(index), list(found.items()), work)
        if how.extrapolates:
            places = [place for one in found.values() for place in one.places]
            filler = tirx.const(how.extrapolation, work)
            value = tirx.if_then_else(tirx.any(*(p < 0 for p in places)), filler, value)
        return value.astype(data.dtype)

    return compute(shape, element, "resize")


def _sum(data: te.Tensor, index: list[Any], taps: list[tuple[int, Taps]], work: str) -> Any:
    if not taps:
        return data(*index).astype(work)
    (axis, own), rest = taps[0], taps[1:]
    parts = [
        _sum(data, [*index[:axis], place, *index[axis + 1 :]], rest, work) for place in own.places
    ]
    if own.weights is None:
        return parts[0]
    terms = [part * weight.astype(work) for part, weight in zip(parts, own.weights, strict=True)]
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total


RESIZING: tuple[Operator, ...] = (
    Operator("Resize", resize_10),
    Operator("Resize", resize, since=11),
    Operator("Upsample", upsample_attributes),
    Operator("Upsample", resize_10, since=9),
)
