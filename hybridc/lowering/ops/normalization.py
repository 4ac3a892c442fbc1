"""Normalizations.

The statistics are computed in two passes, first the mean and then the mean of squared deviations:
the one-pass formula loses all digits where the mean is large against the deviation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from tvm import relax, te, tirx

from hybridc.lowering.call import Call, Operator, Unsupported
from hybridc.lowering.ops.common import (
    HALF_TYPES,
    cast,
    compute,
    derived_constant,
    element_type,
    map_elements,
    normalize_axes,
    number,
    per_channel,
    reduce_axis,
    reshape,
)
from hybridc.lowering.value import Constant, Expression, Value


def batch_normalization(call: Call) -> Expression:
    """Normalization by given statistics; constant ones become one factor and one summand."""
    if call.attribute("training_mode", 0) or len(call.node.outputs) > 1:
        raise Unsupported("BatchNormalization in training mode before opset 14")
    if not call.attribute("spatial", 1):
        raise Unsupported("BatchNormalization with spatial=0")
    epsilon = float(call.attribute("epsilon", 1e-5))
    parameters = [call.value(i) for i in range(1, 5)]
    rank = call.rank(0)
    if all(isinstance(value, Constant) for value in parameters):
        factor, summand = _folded(call, parameters, epsilon)
        scaled = relax.op.multiply(call.tensor(0), per_channel(call, factor, rank))
        return call.emit(relax.op.add(call.emit(scaled), per_channel(call, summand, rank)))
    scale, bias, mean, variance = (per_channel(call, value, rank) for value in parameters)
    dtype = call.dtype(0)

    def function(x: Any, s: Any, b: Any, m: Any, v: Any) -> Any:
        x, s, b, m, v = (operand.astype(_wide(dtype)) for operand in (x, s, b, m, v))
        return (x - m) / tirx.sqrt(v + number(epsilon, v)) * s + b

    operands = (call.value(0), scale, bias, mean, variance)
    return map_elements(call, function, *operands, dtype=dtype, name="batch_norm")


def batch_normalization_14(call: Call) -> Value:
    """The same, or in training mode by statistics of the data, which move the given ones."""
    if not call.attribute("training_mode", 0):
        return batch_normalization(call)
    rank, dtype = call.rank(0), call.dtype(0)
    if rank < 2:
        raise Unsupported("BatchNormalization in training mode of a vector")
    axes = [0, *range(2, rank)]
    deviations, mean = centered(call, cast(call, call.tensor(0), _wide(dtype)), axes)
    variance = _mean_square(call, deviations, axes)
    epsilon, momentum = (
        float(call.attribute(name, default))
        for name, default in (("epsilon", 1e-5), ("momentum", 0.9))
    )

    def result(x: Any, v: Any, s: Any, b: Any) -> Any:
        s, b = s.astype(element_type(x)), b.astype(element_type(x))
        return x / tirx.sqrt(v + number(epsilon, v)) * s + b

    def moved(old: Any, new: Any) -> Any:
        work = element_type(new)
        old = old.astype(work) * tirx.const(momentum, work)
        return old + new * tirx.const(1 - momentum, work)

    scale, bias = (per_channel(call, call.value(i), rank) for i in (1, 2))
    normalized = map_elements(
        call, result, deviations, variance, scale, bias, dtype=dtype, name="batch_norm"
    )
    running = [
        map_elements(
            call, moved, call.value(i), reshape(call, new, call.shape(i)), dtype=call.dtype(i)
        )
        for i, new in ((3, mean), (4, variance))
    ]
    return (normalized, *running)


def _folded(
    call: Call, parameters: Sequence[Constant], epsilon: float
) -> tuple[Constant, Constant]:
    scale, bias, mean, variance = (p.array.astype(np.float64) for p in parameters)
    factor = scale / np.sqrt(variance + epsilon)
    dtype = call.dtype(0)
    return (
        derived_constant(call, "factor", factor.astype(dtype)),
        derived_constant(call, "summand", (bias - mean * factor).astype(dtype)),
    )


def _wide(dtype: str) -> str:
    return "float32" if dtype in HALF_TYPES else dtype


def centered(call: Call, data: Expression, axes: Sequence[int]) -> tuple[Expression, Expression]:
    """``data`` minus its mean over ``axes``, and that mean with the axes kept as ones."""
    mean = call.emit(relax.op.mean(data, axis=list(axes), keepdims=True))
    return call.emit(relax.op.subtract(data, mean)), mean


def inverse_deviation(
    call: Call, deviations: Expression, axes: Sequence[int], epsilon: float
) -> Expression:
    """``1 / sqrt(mean of squares + epsilon)`` over ``axes``, which stay as ones."""
    variance = _mean_square(call, deviations, axes)

    def function(x: Any) -> Any:
        return number(1, x) / tirx.sqrt(x + number(epsilon, x))

    return map_elements(call, function, variance, name="inverse_deviation")


def _mean_square(call: Call, data: Expression, axes: Sequence[int]) -> Expression:
    squares = call.emit(relax.op.multiply(data, data))
    return call.emit(relax.op.mean(squares, axis=list(axes), keepdims=True))


def standardized(
    call: Call, data: Expression, axes: Sequence[int], epsilon: float
) -> tuple[Expression, Expression, Expression]:
    """``data`` with mean 0 and variance 1 over ``axes``; the mean; the inverse deviation."""
    deviations, mean = centered(call, data, axes)
    inverse = inverse_deviation(call, deviations, axes, epsilon)
    return call.emit(relax.op.multiply(deviations, inverse)), mean, inverse


def _affine(call: Call, data: Expression, scale: Value, bias: Value | None) -> Expression:
    result = call.emit(relax.op.multiply(data, call.materialize(scale)))
    if bias is None:
        return result
    return call.emit(relax.op.add(result, call.materialize(bias)))


def layer_normalization(call: Call) -> tuple[Expression, ...]:
    """Normalization over the axes from ``axis`` on; also the mean and inverse deviation."""
    dtype = call.dtype(0)
    axes = list(range(call.axis(-1), call.rank(0)))
    data = cast(call, call.tensor(0), _stash_type(call, dtype))
    epsilon = float(call.attribute("epsilon", 1e-5))
    result, mean, inverse = standardized(call, data, axes, epsilon)
    result = cast(call, result, dtype)
    bias = call.value(2) if call.has(2) else None
    return _affine(call, result, call.value(1), bias), mean, inverse


def _stash_type(call: Call, dtype: str) -> str:
    if call.attribute("stash_type", 1) != 1:
        raise Unsupported("a stash_type other than float32")
    return "float32" if dtype in HALF_TYPES else dtype


def rms_normalization(call: Call) -> Expression:
    """Division by the root of the mean square over the axes from ``axis`` on."""
    dtype = call.dtype(0)
    axes = list(range(call.axis(-1), call.rank(0)))
    data = cast(call, call.tensor(0), _stash_type(call, dtype))
    inverse = inverse_deviation(call, data, axes, float(call.attribute("epsilon", 1e-5)))
    result = cast(call, call.emit(relax.op.multiply(data, inverse)), dtype)
    return _affine(call, result, call.value(1), None)


def instance_normalization(call: Call) -> Expression:
    """Normalization over the spatial dimensions of each batch element and channel."""
    dtype, rank = call.dtype(0), call.rank(0)
    data = cast(call, call.tensor(0), _wide(dtype))
    axes = list(range(2, rank))
    result, _, _ = standardized(call, data, axes, float(call.attribute("epsilon", 1e-5)))
    scale, bias = (per_channel(call, call.value(i), rank) for i in (1, 2))
    return _affine(call, cast(call, result, dtype), scale, bias)


def group_normalization(call: Call) -> Expression:
    """Normalization over groups of channels; scale and bias are per channel (opset 21)."""
    result = _group_standardized(call)
    scale, bias = (per_channel(call, call.value(i), call.rank(0)) for i in (1, 2))
    return _affine(call, result, scale, bias)


def group_normalization_18(call: Call) -> Expression:
    """Normalization over groups of channels; scale and bias are per group (opset 18)."""
    groups = int(call.attribute("num_groups"))
    batch, channels, *spatial = call.shape(0)
    result = _group_standardized(call)
    grouped = reshape(call, result, (batch, groups, channels // groups, *spatial))
    scale, bias = (per_channel(call, call.value(i), call.rank(0) + 1) for i in (1, 2))
    return reshape(call, _affine(call, grouped, scale, bias), call.shape(0))


def _group_standardized(call: Call) -> Expression:
    dtype = call.dtype(0)
    groups = int(call.attribute("num_groups"))
    batch, channels, *spatial = call.shape(0)
    if not isinstance(channels, int) or channels % groups:
        raise Unsupported(f"{channels} channels in {groups} groups")
    data = cast(call, call.tensor(0), _stash_type(call, dtype))
    grouped = reshape(call, data, (batch, groups, channels // groups, *spatial))
    axes = list(range(2, call.rank(0) + 1))
    result, _, _ = standardized(call, grouped, axes, float(call.attribute("epsilon", 1e-5)))
    return cast(call, reshape(call, result, call.shape(0)), dtype)


def mean_variance_normalization(call: Call) -> Expression:
    """Normalization over given axes, with 1e-9 added to the deviation."""
    dtype = call.dtype(0)
    axes = normalize_axes(call.attribute("axes") or [0, 2, 3], call.rank(0))
    deviations, _ = centered(call, cast(call, call.tensor(0), _wide(dtype)), axes)
    variance = _mean_square(call, deviations, axes)

    def function(x: Any, v: Any) -> Any:
        return x / (tirx.sqrt(v) + number(1e-9, v))

    return map_elements(call, function, deviations, variance, dtype=dtype, name="mvn")


def lp_normalization(call: Call) -> Expression:
    """Division by the norm along an axis; zero where the norm is zero."""
    dtype = call.dtype(0)
    axis, order = call.axis(-1), int(call.attribute("p", 2))
    if order not in (1, 2):
        raise Unsupported(f"LpNormalization with p={order}")
    data = cast(call, call.tensor(0), _wide(dtype))
    size = relax.op.abs(data) if order == 1 else relax.op.multiply(data, data)
    total = call.emit(relax.op.sum(call.emit(size), axis=[axis], keepdims=True))

    def function(x: Any, norm: Any) -> Any:
        norm = tirx.sqrt(norm) if order == 2 else norm
        zero, one = number(0, norm), number(1, norm)
        return tirx.Select(norm == zero, zero, x / tirx.Select(norm == zero, one, norm))

    return map_elements(call, function, data, total, dtype=dtype, name="lp_norm")


def local_response_normalization(call: Call) -> Expression:
    """Division by a power of the sum of squares over a window of channels."""
    size = int(call.attribute("size"))
    alpha, beta = float(call.attribute("alpha", 1e-4)), float(call.attribute("beta", 0.75))
    bias = float(call.attribute("bias", 1.0))
    dtype = call.dtype(0)
    if call.rank(0) < 2:
        raise Unsupported("LRN needs a channel dimension")

    def kernel(data: te.Tensor) -> te.Tensor:
        total = _window_squares(data, size, _wide(dtype))

        def element(*index: Any) -> Any:
            x, base = data(*index).astype(element_type(total)), total(*index)
            base = number(bias, base) + number(alpha / size, base) * base
            return (x / _power(base, beta)).astype(dtype)

        return compute(data.shape, element, name="lrn")

    return call.emit_te(kernel, call.tensor(0), primfunc_name_hint="lrn")


def _window_squares(data: te.Tensor, size: int, dtype: str) -> te.Tensor:
    """Sum of squares over the channels around each one, ``(size - 1) // 2`` of them below."""
    offset = reduce_axis(size, name="window")
    below = (size - 1) // 2

    def element(batch: Any, channel: Any, *spatial: Any) -> Any:
        source = channel + offset - below
        x = data(batch, source, *spatial).astype(dtype)
        inside = tirx.all(source >= 0, source < data.shape[1])
        return te.sum(tirx.if_then_else(inside, x * x, tirx.const(0, dtype)), axis=offset)

    return compute(data.shape, element, name="window_squares")


def _power(base: Any, exponent: float) -> Any:
    # Two square roots are exact to the last digit or two, and many times faster than pow.
    if exponent == 0.75:
        root = tirx.sqrt(base)
        return root * tirx.sqrt(root)
    return tirx.power(base, number(exponent, base))


OPERATORS: tuple[Operator, ...] = (
    Operator("BatchNormalization", batch_normalization),
    Operator("BatchNormalization", batch_normalization_14, since=14),
    Operator("InstanceNormalization", instance_normalization),
    Operator("LayerNormalization", layer_normalization),
    Operator("GroupNormalization", group_normalization_18),
    Operator("GroupNormalization", group_normalization, since=21),
    Operator("LpNormalization", lp_normalization),
    Operator("LRN", local_response_normalization),
    Operator("MeanVarianceNormalization", mean_variance_normalization),
    Operator("RMSNormalization", rms_normalization),
)
