"""Where an output position of Resize lies in the input, and which elements it is made of.

Everything is written once over numpy arrays and ``tirx`` expressions: see :class:`Arithmetic`.
All intermediate values are float32 and in ONNX Runtime's order of operations.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from tvm import tirx

from hybridc.lowering.call import Unsupported
from hybridc.lowering.ops.common import Own
from hybridc.lowering.value import Dim

TRANSFORMATIONS = (
    "half_pixel",
    "half_pixel_symmetric",
    "pytorch_half_pixel",
    "tf_half_pixel_for_nn",
    "align_corners",
    "asymmetric",
    "tf_crop_and_resize",
)
NEAREST = ("round_prefer_floor", "round_prefer_ceil", "floor", "ceil", "simple")


@dataclass(frozen=True)
class Interpolation:
    """The attributes of Resize; ``simple`` is the nearest mode of Upsample and of opset 10."""

    mode: str
    transformation: str
    nearest: str = "round_prefer_floor"
    cubic: float = -0.75
    exclude_outside: bool = False
    extrapolation: float = 0.0
    antialias: bool = False

    @property
    def extrapolates(self) -> bool:
        """Whether positions outside the input take a value of their own."""
        return self.transformation == "tf_crop_and_resize"

    def check(self) -> None:
        """Refuse attributes that do not exist."""
        if self.mode not in ("nearest", "linear", "bilinear", "cubic"):
            raise Unsupported(f"Resize with mode {self.mode!r}")
        if self.antialias and self.mode == "nearest":
            raise Unsupported("Resize with antialias and mode 'nearest'")
        if self.transformation not in TRANSFORMATIONS or self.nearest not in NEAREST:
            raise Unsupported(f"Resize with {self.transformation!r} and {self.nearest!r}")


@dataclass(frozen=True)
class Axis:
    """One axis of Resize.

    Attributes:
        size: Input elements.
        output: Output elements.
        scale: Output over input as float32: a number, or an expression if sizes are symbolic.
        region: Start and end of the part that tf_crop_and_resize looks at, from 0 to 1.
    """

    size: Dim
    output: Dim
    scale: Any
    region: tuple[Any, Any] = (np.float32(0), np.float32(1))

    @property
    def known(self) -> bool:
        """Whether the sizes and the scale are numbers."""
        sizes = isinstance(self.size, int) and isinstance(self.output, int)
        return sizes and isinstance(self.scale, np.float32)

    def translated(self, own: Own) -> Axis:
        """The same with dimensions translated into those of a kernel."""
        scale = self.scale if isinstance(self.scale, np.float32) else own(self.scale)
        return replace(self, size=own(self.size), output=own(self.output), scale=scale)

    def unchanged(self, how: Interpolation) -> bool:
        """Whether the axis stays as it is."""
        whole = not how.extrapolates or self.region == (0, 1)
        return isinstance(self.scale, np.float32) and self.scale == 1 and whole


@dataclass(frozen=True)
class Taps:
    """The input elements that an output position is made of.

    Attributes:
        places: Positions in the input, kept inside it; -1 stands for a position outside that
            takes the extrapolation value.
        weights: Their weights; ``None`` for a single tap of weight one.
    """

    places: tuple[Any, ...]
    weights: tuple[Any, ...] | None


@dataclass(frozen=True)
class Arithmetic:
    """The operations that numpy arrays and ``tirx`` expressions spell differently."""

    number: Callable[[Any], Any]
    integer: Callable[[Any], Any]
    floor: Callable[[Any], Any]
    ceil: Callable[[Any], Any]
    select: Callable[[Any, Any, Any], Any]
    smaller: Callable[[Any, Any], Any]
    larger: Callable[[Any, Any], Any]


def _tirx_number(value: Any) -> Any:
    if isinstance(value, int | float | np.floating):
        return tirx.const(float(value), "float32")
    return value.astype("float32")


NUMPY = Arithmetic(
    number=lambda value: np.asarray(value).astype(np.float32),
    integer=lambda value: np.asarray(value).astype(np.int64),
    floor=np.floor,
    ceil=np.ceil,
    select=np.where,
    smaller=np.minimum,
    larger=np.maximum,
)
TIRX = Arithmetic(
    number=_tirx_number,
    integer=lambda value: value.astype("int64"),
    floor=tirx.floor,
    ceil=tirx.ceil,
    select=tirx.Select,
    smaller=tirx.min,
    larger=tirx.max,
)


def original(how: Interpolation, axis: Axis, position: Any, by: Arithmetic) -> Any:
    """Coordinate in the input, as float32, of an output position."""
    x = by.number(position)
    size, output, scale = (by.number(v) for v in (axis.size, axis.output, axis.scale))
    half, one, zero = by.number(0.5), by.number(1.0), by.number(0.0)
    several = output > one
    match how.transformation:
        case "asymmetric":
            return x / scale
        case "tf_half_pixel_for_nn":
            return (x + half) / scale
        case "pytorch_half_pixel":
            return by.select(several, (x + half) / scale - half, zero * x)
        case "align_corners":
            last = by.larger(output - one, one)
            return by.select(several, x * (size - one) / last, zero * x)
        case "half_pixel_symmetric":
            adjustment = output / (scale * size)
            offset = size / by.number(2.0) * (one - adjustment)
            return offset + (x + half) / scale - half
        case "tf_crop_and_resize":
            start, end = (by.number(v) for v in axis.region)
            last = by.larger(output - one, one)
            inside = start * (size - one) + (x * (end - start) * (size - one)) / last
            return by.select(several, inside, half * (start + end) * (size - one) + zero * x)
    return (x + half) / scale - half


def taps_of(how: Interpolation, axis: Axis, position: Any, by: Arithmetic) -> Taps:
    """The taps of an output position along one axis."""
    x = by.number(position) if axis.unchanged(how) else original(how, axis, position, by)
    if how.mode == "nearest":
        taps = Taps((_inside(_nearest(how, axis, x, by), axis, by),), None)
    elif how.mode == "cubic":
        taps = _cubic(how, axis, x, by)
    else:
        taps = _linear(axis, x, by)
    if not how.extrapolates:
        return taps
    outside, missing = _beyond(x, axis, by), by.integer(by.number(-1.0))
    return Taps(tuple(by.select(outside, missing, place) for place in taps.places), taps.weights)


def _beyond(x: Any, axis: Axis, by: Arithmetic) -> Any:
    """Whether a coordinate is outside the input."""
    last = by.number(axis.size) - by.number(1.0)
    return (x < by.number(0.0)) | (x > last) if by is NUMPY else tirx.any(x < 0.0, x > last)


def _inside(place: Any, axis: Axis, by: Arithmetic) -> Any:
    last = by.integer(tirx.const(0, "int64") + axis.size - 1) if by is TIRX else axis.size - 1
    zero = tirx.const(0, "int64") if by is TIRX else 0
    return by.larger(by.smaller(place, last), zero)


def _nearest(how: Interpolation, axis: Axis, x: Any, by: Arithmetic) -> Any:
    half = by.number(0.5)
    match how.nearest:
        case "floor":
            return by.integer(by.floor(x))
        case "ceil":
            return by.integer(by.ceil(x))
        case "round_prefer_floor":
            return by.integer(by.ceil(x - half))
        case "round_prefer_ceil":
            return by.integer(by.floor(x + half))
    # Upsample truncates, but takes the next element when it shrinks.
    return by.integer(by.select(by.number(axis.scale) < by.number(1.0), by.ceil(x), by.floor(x)))


def _linear(axis: Axis, x: Any, by: Arithmetic) -> Taps:
    last, zero, one = by.number(axis.size) - by.number(1.0), by.number(0.0), by.number(1.0)
    x = by.larger(zero, by.smaller(x, last))
    low = by.floor(x)
    high = by.smaller(low + one, last)
    fraction = x - low
    return Taps((by.integer(low), by.integer(high)), (one - fraction, fraction))


def _cubic(how: Interpolation, axis: Axis, x: Any, by: Arithmetic) -> Taps:
    base = by.floor(x)
    weights = _cubic_weights(x - base, by.number(how.cubic), by)
    places = [by.integer(base + by.number(float(i))) for i in range(-1, 3)]
    if how.exclude_outside:
        zero, size = by.number(0.0), axis.size
        weights = [
            by.select(_outside(place, size, by), zero, weight)
            for place, weight in zip(places, weights, strict=True)
        ]
        total = weights[0] + weights[1] + weights[2] + weights[3]
        weights = [weight / total for weight in weights]
    return Taps(tuple(_inside(place, axis, by) for place in places), tuple(weights))


def _outside(place: Any, size: Dim, by: Arithmetic) -> Any:
    if by is NUMPY:
        return (place < 0) | (place >= size)
    return tirx.any(place < 0, place >= size)


def _cubic_weights(s: Any, a: Any, by: Arithmetic) -> list[Any]:
    """Weights of the four taps around a coordinate whose fraction is ``s``."""
    one, two, three, four, five, eight = (by.number(float(n)) for n in (1, 2, 3, 4, 5, 8))
    next_one, rest, after = s + one, one - s, two - s
    return [
        ((a * next_one - five * a) * next_one + eight * a) * next_one - four * a,
        ((a + two) * s - (a + three)) * s * s + one,
        ((a + two) * rest - (a + three)) * rest * rest + one,
        ((a * after - five * a) * after + eight * a) * after - four * a,
    ]


def reach(how: Interpolation, scale: Any, by: Arithmetic) -> Any:
    """How far the filter for antialiasing reaches, in whole input elements to either side."""
    several = by.number(2.0 if how.mode == "cubic" else 1.0)
    return by.ceil(several / by.smaller(by.number(scale), by.number(1.0)))


def stretched_tap(
    how: Interpolation, axis: Axis, position: Any, tap: Any, by: Arithmetic
) -> tuple[Any, Any]:
    """Place and weight, not normalized yet, of one of the ``2 * reach`` taps for antialiasing.

    The filter is as wide as an output element, but not narrower than an input element.
    """
    x = by.number(position) if axis.unchanged(how) else original(how, axis, position, by)
    one = by.number(1.0)
    place = by.floor(x) - reach(how, axis.scale, by) + one + by.number(tap)
    scale = by.smaller(by.number(axis.scale), one)
    distance = by.larger(place - x, x - place) * scale
    weight = _filter(how, distance, by)
    whole = by.integer(place)
    if how.exclude_outside:
        weight = by.select(_outside(whole, axis.size, by), by.number(0.0), weight)
    whole = _inside(whole, axis, by)
    if how.extrapolates:
        whole = by.select(_beyond(x, axis, by), by.integer(by.number(-1.0)), whole)
    return whole, weight


def _filter(how: Interpolation, distance: Any, by: Arithmetic) -> Any:
    """Weight of a tap by its distance from the center, in units of the filter's width."""
    zero, one, two = (by.number(float(n)) for n in range(3))
    if how.mode != "cubic":
        return by.larger(one - distance, zero)
    a, s = by.number(how.cubic), distance
    near = ((a + two) * s - (a + by.number(3.0))) * s * s + one
    far = ((a * s - by.number(5.0) * a) * s + by.number(8.0) * a) * s - by.number(4.0) * a
    return by.select(s <= one, near, by.select(s < two, far, zero))
