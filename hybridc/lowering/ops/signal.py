"""Fourier transforms, windows and mel filters.

A discrete Fourier transform is a product with a matrix of roots of unity. The roots are computed
in float64 from the exact remainder of their index, so that a long transform is as exact as a
short one. A length that is a product of two factors is transformed in two steps, by matrices of
the factors' sizes with roots ("twiddles") multiplied in between:

    n = n1 * L2 + n2, k = k2 * L1 + k1:
    y[k] = sum over n2 of w(L2)^(n2 k2) * w(L)^(n2 k1) * (sum over n1 of w(L1)^(n1 k1) * x[n])
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from tvm import relax, te, tirx

from hybridc.lowering.call import Call, Operator, Unsupported, as_expression
from hybridc.lowering.ops.common import (
    Own,
    cast,
    compute,
    derived_constant,
    dtype_name,
    emit_kernel,
    floor_divide,
    normalize_axes,
    reshape,
    simplify,
)
from hybridc.lowering.ops.loops import Array, count, emit_program, equals
from hybridc.lowering.runtime_sizes import known_or_read
from hybridc.lowering.value import Dim, Expression

DIRECT_LENGTH = 256
"""Longest transform that is made in one step."""


@dataclass(frozen=True)
class _Complex:
    """A tensor of complex numbers as two of real ones; without an imaginary part it is real."""

    real: Expression
    imaginary: Expression | None = None


def dft_attribute(call: Call) -> Expression:
    """DFT with the axis as an attribute (opset 17)."""
    return _dft(call, int(call.attribute("axis", 1)))


def dft_input(call: Call) -> Expression:
    """DFT with the axis as an input (opset 20)."""
    return _dft(call, int(call.constant(2, "the axis of DFT").item()) if call.has(2) else -2)


def _dft(call: Call, axis: int) -> Expression:
    rank = call.rank(0)
    axis = normalize_axes([axis], rank)[0]
    parts = call.shape(0)[-1]
    if axis == rank - 1 or parts not in (1, 2):
        raise Unsupported(f"DFT of shape {call.shape(0)} along axis {axis}")
    inverse = bool(call.attribute("inverse", 0))
    onesided = bool(call.attribute("onesided", 0))
    size = call.shape(0)[axis]
    if not isinstance(size, int):
        raise Unsupported("DFT along a dimension that is not static")
    length = 2 * (size - 1) if inverse and onesided else size
    if call.has(1):
        length = int(call.constant(1, "the length of DFT").item())
    if length < 1:
        raise Unsupported(f"DFT of length {length}")
    half = inverse and onesided
    kept = length // 2 + 1 if onesided else length
    data = _columns(call, axis, kept if half else length, mirrored=length if half else None)
    result = _transform(call, data, length, -1 if not inverse else 1)
    return _assembled(call, result, axis, 1 if half else 2, length if half else kept, length)


def _columns(call: Call, axis: int, used: int, mirrored: int | None) -> _Complex:
    """The input's parts with the axis last, in the type that is computed in.

    Args:
        call: The node; its input has the real and imaginary parts last.
        axis: What is transformed.
        used: How many elements along it are read; those missing are zero.
        mirrored: Length that the conjugated mirror image fills up to, for half a spectrum.
    """
    shape = call.shape(0)
    size, dtype = shape[axis], call.dtype(0)
    work = "float64" if dtype == "float64" else "float32"
    rest = [dim for i, dim in enumerate(shape[:-1]) if i != axis]
    available = min(size, used)

    def part(which: int) -> Expression:
        def kernel(own: Own, data: te.Tensor) -> te.Tensor:
            def element(*index: Any) -> Any:
                place, sign = index[-1], tirx.const(1, work)
                if mirrored is not None:
                    other = mirrored - place
                    sign = tirx.Select(place >= used, tirx.const(1 - 2 * which, work), sign)
                    # The first element, and the middle one of an even length, are real.
                    alone = tirx.any(equals(place, 0), equals(2 * place, mirrored))
                    sign = tirx.Select(alone, tirx.const(1 - which, work), sign)
                    place = tirx.Select(place >= used, other, place)
                inside = tirx.min(place, available - 1)
                value = data(*index[:axis], inside, *index[axis:-1], which).astype(work)
                return tirx.Select(place < available, sign * value, tirx.const(0, work))

            return compute([*map(own, rest), mirrored or used], element, "signal")

        return emit_kernel(call, kernel, call.tensor(0), name="signal")

    return _Complex(part(0), part(1) if shape[-1] == 2 else None)


def _transform(call: Call, data: _Complex, length: int, sign: int) -> _Complex:
    """The transform along the last axis, unscaled; ``sign`` is that of the exponent."""
    first = _factor(length)
    if length <= DIRECT_LENGTH or first == 1:
        return _times_roots(call, data, length, sign)
    second = length // first
    *rest, _ = call.with_inputs([data.real]).shape(0)
    steps = _mapped(data, lambda x: _swapped(call, x, (*rest, first, second)))
    inner = _transform(call, steps, first, sign)
    twisted = _twisted(call, inner, first, second, sign)
    turned = _mapped(twisted, lambda x: _swapped(call, x, (*rest, second, first)))
    outer = _transform(call, turned, second, sign)
    return _mapped(outer, lambda x: _flattened(call, x, (*rest, first, second), length))


def _factor(length: int) -> int:
    """The largest divisor not above the square root."""
    return next(n for n in range(math.isqrt(length), 0, -1) if length % n == 0)


def _mapped(data: _Complex, function: Callable[[Expression], Expression]) -> _Complex:
    other = data.imaginary
    return _Complex(function(data.real), None if other is None else function(other))


def _swapped(call: Call, tensor: Expression, shape: tuple[Dim, ...]) -> Expression:
    """A tensor reshaped to ``shape``, its last two axes exchanged."""
    order = [*range(len(shape) - 2), len(shape) - 1, len(shape) - 2]
    return call.emit(relax.op.permute_dims(reshape(call, tensor, shape), order))


def _flattened(call: Call, tensor: Expression, shape: tuple[Dim, ...], length: int) -> Expression:
    """The two last axes exchanged and made one."""
    return reshape(call, _swapped(call, tensor, shape), (*shape[:-2], length))


def _roots(exponents: np.ndarray[Any, Any], length: int, sign: int) -> np.ndarray[Any, Any]:
    angles = 2 * np.pi * (exponents % length) / length
    return np.asarray(np.exp(1j * sign * angles))


def _constants(
    call: Call, name: str, roots: np.ndarray[Any, Any], dtype: str
) -> tuple[Expression, Expression]:
    pair = (np.real(roots).astype(dtype), np.imag(roots).astype(dtype))
    unique = call.builder.get_unique_name(name)
    return tuple(
        call.materialize(derived_constant(call, f"{unique}.{i}", part))
        for i, part in enumerate(pair)
    )  # type: ignore[return-value]


def _times_roots(call: Call, data: _Complex, length: int, sign: int) -> _Complex:
    indices = np.arange(length, dtype=np.int64)
    roots = _roots(np.outer(indices, indices), length, sign)
    real, imaginary = _constants(call, f"roots{length}", roots, str(data.real.ty.dtype))

    def times(left: Expression, right: Expression) -> Expression:
        return call.emit(relax.op.matmul(left, right))

    if data.imaginary is None:
        return _Complex(times(data.real, real), times(data.real, imaginary))
    return _Complex(
        call.emit(relax.op.subtract(times(data.real, real), times(data.imaginary, imaginary))),
        call.emit(relax.op.add(times(data.real, imaginary), times(data.imaginary, real))),
    )


def _twisted(call: Call, data: _Complex, first: int, second: int, sign: int) -> _Complex:
    """The inner transform, of shape (..., second, first), times its twiddles."""
    exponents = np.outer(np.arange(second, dtype=np.int64), np.arange(first, dtype=np.int64))
    roots = _roots(exponents, first * second, sign)
    real, imaginary = _constants(call, f"twiddles{first}", roots, str(data.real.ty.dtype))

    def combined(subtract: bool, other: Expression, third: Expression) -> Expression:
        left = call.emit(relax.op.multiply(data.real, other))
        right = call.emit(relax.op.multiply(data.imaginary, third))
        return call.emit(relax.op.subtract(left, right) if subtract else relax.op.add(left, right))

    return _Complex(combined(True, real, imaginary), combined(False, imaginary, real))


def _assembled(
    call: Call, data: _Complex, axis: int, parts: int, kept: int, length: int
) -> Expression:
    """The first ``kept`` elements with the axis put back and the parts last; scaled if inverse."""
    *rest, _ = call.with_inputs([data.real]).shape(0)
    dtype = call.dtype(0)
    scale = 1 / length if call.attribute("inverse", 0) else 1.0
    operands = [data.real, data.imaginary][:parts]

    def kernel(own: Own, *tensors: te.Tensor) -> te.Tensor:
        def element(*index: Any) -> Any:
            place = (*index[:axis], *index[axis + 1 : -1], index[axis])
            value = tensors[0](*place)
            if parts == 2:
                value = tirx.Select(equals(index[-1], 0), value, tensors[1](*place))
            return (value * tirx.const(scale, tensors[0].dtype)).astype(dtype)

        shape = [*rest[:axis], kept, *rest[axis:], parts]
        return compute(map(own, shape), element, "spectrum")

    return emit_kernel(call, kernel, *operands, name="spectrum")


def stft(call: Call) -> Expression:
    """Transforms of frames of a signal, each weighted by a window."""
    step = int(call.constant(1, "the frame step of STFT").item())
    _, samples, parts = call.shape(0)
    length: Dim = samples
    if call.has(3):
        length = int(call.constant(3, "the frame length of STFT").item())
    elif call.has(2):
        length = call.shape(2)[0]
    if not isinstance(length, int) or step < 1 or parts not in (1, 2):
        raise Unsupported(f"STFT with frames of {length}, {step} apart, of shape {call.shape(0)}")
    if call.has(2) and call.shape(2) != (length,):
        raise Unsupported(f"STFT with frames of {length} and a window of {call.shape(2)}")
    frames = simplify(floor_divide(samples - length, step) + 1)
    data = _framed(call, frames, length, step)
    result = _transform(call, data, length, -1)
    onesided = call.attribute("onesided", 1) and parts == 1
    kept = length // 2 + 1 if onesided else length
    return _assembled(call, result, 2, 2, kept, length)


def _framed(call: Call, frames: Dim, length: int, step: int) -> _Complex:
    batch, _, parts = call.shape(0)
    dtype = call.dtype(0)
    work = "float64" if dtype == "float64" else "float32"
    operands = [call.tensor(0), *([call.tensor(2)] if call.has(2) else [])]

    def part(which: int) -> Expression:
        def kernel(own: Own, data: te.Tensor, *window: te.Tensor) -> te.Tensor:
            def element(n: Any, frame: Any, place: Any) -> Any:
                value = data(n, frame * step + place, which).astype(work)
                return value * window[0](place).astype(work) if window else value

            return compute(map(own, (batch, frames, length)), element, "frames")

        return emit_kernel(call, kernel, *operands, name="frames")

    return _Complex(part(0), part(1) if parts == 2 else None)


def window(*coefficients: float) -> Callable[[Call], Expression]:
    """Converter for a window that is a sum of cosines.

    Args:
        coefficients: Of the cosines with 0, 1, 2, ... periods in the window.
    """

    def convert(call: Call) -> Expression:
        size = known_or_read(call, 0, "the size of a window")[0]
        dtype = dtype_name(call.attribute("output_datatype", 1))
        periodic = bool(call.attribute("periodic", 1))

        def kernel(own: Own) -> te.Tensor:
            span = own(size) + tirx.const(0 if periodic else -1, "int64")

            def element(i: Any) -> Any:
                angle = i.astype("float64") * tirx.const(2 * math.pi, "float64")
                # A symmetric window of one element is its own middle.
                angle = angle / tirx.max(span, tirx.const(1, "int64")).astype("float64")
                total = tirx.const(coefficients[0], "float64")
                for order, coefficient in enumerate(coefficients[1:], 1):
                    turn = tirx.cos(angle * tirx.const(order, "float64"))
                    total = total + turn * tirx.const(coefficient, "float64")
                return total.astype(dtype)

            return compute([own(size)], element, "window")

        return emit_kernel(call, kernel, name="window")

    return convert


def mel_weight_matrix(call: Call) -> Expression:
    """Triangular filters that are evenly spaced on the mel scale.

    The edges are rounded down to spectrum bins with the arithmetic of the standard's reference.
    """
    bands = known_or_read(call, 0, "the number of mel bands")[0]
    length = known_or_read(call, 1, "the length of the mel spectrum")[0]
    bins = simplify(floor_divide(length, 2) + 1)
    dtype = dtype_name(call.attribute("output_datatype", 1))

    def program(own: Own, rate: Array, low: Array, high: Array, edges: Array, out: Array) -> None:
        sizes = as_expression(own(bands)), as_expression(own(length))
        _mel_edges(sizes, rate[()], low[()], high[()], edges)
        with count(own(bands)) as band:
            left, center, right = (edges[band + i] for i in range(3))
            with count(own(bins)) as place:
                out[place, band] = _triangle(place, left, center, right).astype(dtype)

    edges = simplify(bands + 2)
    scalars = [cast(call, reshape(call, call.tensor(i), ()), "float64") for i in (2, 3, 4)]
    results = [((edges,), "int64"), ((bins, bands), dtype)]
    return emit_program(call, program, results, *scalars, name="mel_weights")[1]


def _mel_edges(sizes: tuple[Any, Any], rate: Any, low: Any, high: Any, edges: Array) -> None:
    bands, length = sizes

    def real(number: Any) -> Any:
        return tirx.const(number, "float64")

    ten, width = real(math.log(10)), real(700)
    low, high = (real(2595) * tirx.log1p(edge / width) / ten for edge in (low, high))
    with count(bands + 2) as i:
        step = (high - low) / (bands + 2).astype("float64")
        mel = i.astype("float64") * step + low
        hertz = width * (tirx.exp(mel / real(2595) * ten) - real(1))
        edges[i] = tirx.floor((length + 1).astype("float64") * hertz / rate).astype("int64")


def _triangle(place: Any, left: Any, center: Any, right: Any) -> Any:
    one, zero = tirx.const(1, "float64"), tirx.const(0, "float64")
    rise, fall = center - left, right - center

    def share(part: Any, whole: Any) -> Any:
        return part.astype("float64") / tirx.max(whole, 1).astype("float64")

    rising = tirx.all(rise > 0, place >= left, place <= center)
    peak = tirx.all(rise <= 0, equals(place, center))
    falling = tirx.all(fall > 0, place >= center, place < right)
    before = tirx.Select(rising, share(place - left, rise), tirx.Select(peak, one, zero))
    return tirx.Select(falling, share(right - place, fall), before)


_HAMMING = 25 / 46

OPERATORS: tuple[Operator, ...] = (
    Operator("DFT", dft_attribute, since=17),
    Operator("DFT", dft_input, since=20),
    Operator("STFT", stft, since=17),
    Operator("HannWindow", window(0.5, -0.5), since=17),
    Operator("HammingWindow", window(_HAMMING, _HAMMING - 1), since=17),
    Operator("BlackmanWindow", window(0.42, -0.5, 0.08), since=17),
    Operator("MelWeightMatrix", mel_weight_matrix, since=17),
)
