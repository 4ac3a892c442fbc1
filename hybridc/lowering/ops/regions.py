"""Operators over regions of interest: RoiAlign and MaxRoiPool.

How many elements a bin of a region covers is data, so both are loops of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tvm import tirx

from hybridc.lowering.call import Call, Converter, Operator, Unsupported
from hybridc.lowering.ops.common import Own
from hybridc.lowering.ops.loops import Array, count, emit_program, local
from hybridc.lowering.value import Expression


def roi_align(half_pixel: bool) -> Converter:
    """Converter for RoiAlign.

    Args:
        half_pixel: Whether regions are shifted by half an element unless the node says.
    """
    default = "half_pixel" if half_pixel else "output_half_pixel"

    def convert(call: Call) -> Expression:
        transformation = call.attribute("coordinate_transformation_mode", default)
        mode = call.attribute("mode", "avg")
        if mode not in ("avg", "max") or transformation not in ("half_pixel", "output_half_pixel"):
            raise Unsupported(f"RoiAlign with {mode!r} and {transformation!r}")
        return _roi_align(call, mode, transformation == "half_pixel")

    return convert


@dataclass(frozen=True)
class _Alignment:
    """The attributes of RoiAlign, and the type that it computes in."""

    pooled: tuple[int, int]
    scale: float
    ratio: int
    mode: str
    shifted: bool
    work: str

    def real(self, number: float) -> Any:
        """An immediate of the type that is computed in."""
        return tirx.const(number, self.work)


def _roi_align(call: Call, mode: str, shifted: bool) -> Expression:
    batch, channels, height, width = call.shape(0)
    regions, dtype = call.shape(1)[0], call.dtype(0)
    how = _Alignment(
        pooled=(int(call.attribute("output_height", 1)), int(call.attribute("output_width", 1))),
        scale=float(call.attribute("spatial_scale", 1.0)),
        ratio=int(call.attribute("sampling_ratio", 0)),
        mode=mode,
        shifted=shifted,
        work="float64" if dtype == "float64" else "float32",
    )

    def program(own: Own, data: Array, rois: Array, batches: Array, target: Array) -> None:
        sizes = (own(height), own(width))
        with count(own(regions) * own(channels), parallel=True) as task:
            region = tirx.floordiv(task, own(channels))
            channel = tirx.floormod(task, own(channels))
            image = tirx.max(tirx.min(batches[region].astype("int64"), own(batch) - 1), 0)
            grid = _sampling_grid(how, rois, region)
            with count(how.pooled[0]) as row, count(how.pooled[1]) as column:
                result = _bin(how, data, (image, channel), (row, column), grid, sizes)
                target[region, channel, row, column] = result.astype(dtype)

    shape = (regions, channels, *how.pooled)
    operands = (call.tensor(0), call.tensor(1), call.tensor(2))
    return emit_program(call, program, [(shape, dtype)], *operands, name="roi_align")[0]


def _sampling_grid(how: _Alignment, rois: Array, region: Any) -> tuple[Array, Array, Array]:
    """Where a region starts, the size of its bins, and the samples in each, by axis."""
    starts, steps = local(how.work, 0, 2), local(how.work, 0, 2)
    samples = local("int64", 0, 2)
    for axis in (0, 1):
        low, high = (
            rois[region, end + 1 - axis].astype(how.work) * how.real(how.scale)
            - how.real(0.5 if how.shifted else 0)
            for end in (0, 2)
        )
        length = high - low if how.shifted else tirx.max(high - low, how.real(1))
        starts[axis] = low
        steps[axis] = length / how.real(how.pooled[axis])
        adaptive = tirx.ceil(steps[axis]).astype("int64")
        samples[axis] = tirx.const(how.ratio, "int64") if how.ratio > 0 else adaptive
    return starts, steps, samples


def _bin(
    how: _Alignment,
    data: Array,
    plane: tuple[Any, Any],
    where: tuple[Any, Any],
    grid: tuple[Array, Array, Array],
    sizes: tuple[Any, Any],
) -> Any:
    """The mean or the largest of a bin's samples."""
    starts, steps, samples = grid
    total, first = local(how.work, 0), local("bool", True)
    with count(samples[0]) as i, count(samples[1]) as j:
        places = []
        for axis, number in enumerate((i, j)):
            fraction = (number.astype(how.work) + how.real(0.5)) * steps[axis]
            bin_start = starts[axis] + where[axis].astype(how.work) * steps[axis]
            places.append(bin_start + fraction / samples[axis].astype(how.work))
        parts = _corners(data, *plane, places, sizes, how.work)
        if how.mode == "avg":
            total[0] = total[0] + ((parts[0] + parts[1]) + parts[2]) + parts[3]
        else:
            # The largest weighted corner, not the largest interpolated value: ONNX's reference
            # and ONNX Runtime both define it so.
            largest = tirx.max(tirx.max(parts[0], parts[1]), tirx.max(*parts[2:]))
            total[0] = tirx.Select(first[0], largest, tirx.max(total[0], largest))
            first[0] = False
    if how.mode == "max":
        return total[0]
    several = tirx.max(samples[0] * samples[1], tirx.const(1, "int64"))
    return total[0] / several.astype(how.work)


def _corners(
    data: Array, image: Any, channel: Any, places: Sequence[Any], sizes: Sequence[Any], work: str
) -> list[Any]:
    """The four elements around a place, times their weights; zeros far outside the picture."""
    one, zero = tirx.const(1, work), tirx.const(0, work)
    outside = tirx.any(
        *(
            condition
            for place, size in zip(places, sizes, strict=True)
            for condition in (place < -one, place > one * size)
        )
    )
    axes = []
    for place, size in zip(places, sizes, strict=True):
        last = tirx.const(0, "int64") + size - 1
        place = tirx.max(place, zero)
        low = tirx.max(tirx.min(place.astype("int64"), last), 0)
        fraction = tirx.Select(low >= last, zero, place - low.astype(work))
        axes.append(((low, one - fraction), (tirx.min(low + 1, last), fraction)))
    return [
        tirx.Select(outside, zero, wy * wx * data[image, channel, y, x].astype(work))
        for y, wy in axes[0]
        for x, wx in axes[1]
    ]


def max_roi_pool(call: Call) -> Expression:
    """The largest element of each bin of each region; zero for an empty bin."""
    pooled = [int(size) for size in call.attribute("pooled_shape")]
    scale = float(call.attribute("spatial_scale", 1.0))
    batch, channels, *sizes = call.shape(0)
    regions, dtype = call.shape(1)[0], call.dtype(0)
    if len(sizes) != 2 or len(pooled) != 2:
        raise Unsupported("MaxRoiPool of other than two spatial dimensions")

    def program(own: Own, data: Array, rois: Array, target: Array) -> None:
        with count(own(regions) * own(channels), parallel=True) as task:
            region = tirx.floordiv(task, own(channels))
            channel = tirx.floormod(task, own(channels))
            image = rois[region, 0].astype("int64")
            image = tirx.max(tirx.min(image, own(batch) - 1), 0)
            with count(pooled[0]) as row, count(pooled[1]) as column:
                spans = [
                    _span(rois, region, axis, bin_, pooled[axis], own(sizes[axis]), scale)
                    for axis, bin_ in ((0, row), (1, column))
                ]
                (top, bottom), (left, right) = spans
                best = local(dtype, tirx.min_value(dtype))
                with count(bottom - top, top) as y, count(right - left, left) as x:
                    best[0] = tirx.max(best[0], data[image, channel, y, x])
                empty = tirx.any(bottom <= top, right <= left)
                target[region, channel, row, column] = tirx.Select(
                    empty, tirx.const(0, dtype), best[0]
                )

    shape = (regions, channels, *pooled)
    operands = (call.tensor(0), call.tensor(1))
    return emit_program(call, program, [(shape, dtype)], *operands, name="max_roi_pool")[0]


def _span(
    rois: Array, region: Any, axis: int, bin_: Any, bins: int, size: Any, scale: float
) -> tuple[Any, Any]:
    """First element of a bin along an axis, and the one after its last."""
    start, end = (
        _rounded(rois[region, column].astype("float32") * tirx.const(scale, "float32"))
        for column in (2 - axis, 4 - axis)
    )
    length = tirx.max(end - start + 1, tirx.const(1, "int64"))
    step = length.astype("float32") / tirx.const(bins, "float32")
    first = tirx.floor(bin_.astype("float32") * step).astype("int64") + start
    last = tirx.ceil((bin_ + 1).astype("float32") * step).astype("int64") + start

    def inside(place: Any) -> Any:
        return tirx.max(tirx.min(place, size), tirx.const(0, "int64"))

    return inside(first), inside(last)


def _rounded(number: Any) -> Any:
    """To the nearest integer; halves away from zero, as C rounds."""
    half = tirx.const(0.5, "float32")
    up, down = tirx.floor(number + half), tirx.ceil(number - half)
    return tirx.Select(number >= 0.0, up, down).astype("int64")


REGIONS: tuple[Operator, ...] = (
    Operator("RoiAlign", roi_align(half_pixel=False), since=10),
    Operator("RoiAlign", roi_align(half_pixel=True), since=16),
    Operator("MaxRoiPool", max_roi_pool),
)
