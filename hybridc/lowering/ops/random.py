"""Random numbers: a counter-based generator, so that every element is computed on its own.

The number at position ``i`` of a stream is SplitMix64's (Steele, Lea and Flood 2014): a hash of the
stream's key plus ``i`` steps. The key comes from the node's seed or, without one, from the name of
its output, and from where the node stands in the compiled function. So a compiled model gives the
same numbers whenever it runs, on every machine, and two nodes, or two iterations of an unrolled
loop, give different ones.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tvm import te, tirx, topi

from hybridc.lowering.call import Call, Converter, Operator, Unsupported
from hybridc.lowering.ops.common import (
    Own,
    cast,
    compute,
    dtype_name,
    emit_kernel,
    is_float,
    map_elements,
    reshape,
)
from hybridc.lowering.ops.elementwise import dropout_attribute
from hybridc.lowering.value import Constant, Dim, Expression, Value

_STEP = 0x9E3779B97F4A7C15
_ROUNDS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
"""Shift and multiplier of each round."""


@dataclass(frozen=True)
class Stream:
    """A sequence of random numbers.

    Attributes:
        key: 63 bits.
    """

    key: int

    def bits(self, position: Any, count: int) -> Any:
        """``count`` random bits, as uint64, at an int64 position."""
        number = _times((position + 1).astype("uint64"), _STEP) + _whole(self.key)
        for shift, multiplier in _ROUNDS:
            number = _times(_folded(number, shift), multiplier)
        return tirx.shift_right(_folded(number, 31), _whole(64 - count))

    def uniform(self, position: Any, dtype: str) -> Any:
        """A number from 0 to 1, 1 not included: float64 for float64, float32 for all others."""
        work, count = ("float64", 53) if dtype == "float64" else ("float32", 24)
        return self.bits(position, count).astype(work) * tirx.const(2.0**-count, work)

    def normal(self, position: Any, dtype: str) -> Any:
        """A number of the standard normal distribution, by the method of Box and Muller."""
        work = "float64" if dtype == "float64" else "float32"
        radius, angle = (self.uniform(position * 2 + i, work) for i in (0, 1))
        logarithm = tirx.log(tirx.const(1, work) - radius)
        turn = tirx.cos(angle * tirx.const(2 * math.pi, work))
        return tirx.sqrt(logarithm * tirx.const(-2, work)) * turn


def _whole(number: int) -> Any:
    return tirx.const(number, "uint64")


def _times(number: Any, factor: int) -> Any:
    # TVM takes an unsigned constant that an int64 cannot hold for infinity and then folds products
    # with it to a constant; so the highest bit of a factor becomes a shift.
    product = number * _whole(factor & (2**63 - 1))
    return product + tirx.shift_left(number, _whole(63)) if factor >> 63 else product


def _folded(number: Any, shift: int) -> Any:
    return tirx.bitwise_xor(number, tirx.shift_right(number, _whole(shift)))


def stream_of(call: Call) -> Stream:
    """The stream of a node where it stands."""
    seed = call.attribute("seed")
    name = str(call.node.outputs[0].name) if seed is None else repr(float(seed))
    place = call.builder.get_unique_name("random")
    digest = hashlib.sha256(f"{name}/{place}".encode()).digest()
    return Stream(int.from_bytes(digest[:8], "little") >> 1)


Draw = Callable[[Call, Stream, Any, str], Any]
"""``(call, stream, position, dtype)`` to an element."""


def _uniform(call: Call, stream: Stream, position: Any, dtype: str) -> Any:
    low, high = float(call.attribute("low", 0.0)), float(call.attribute("high", 1.0))
    number = stream.uniform(position, dtype)
    work = str(number.ty.dtype)
    return number * tirx.const(high - low, work) + tirx.const(low, work)


def _normal(call: Call, stream: Stream, position: Any, dtype: str) -> Any:
    mean, scale = float(call.attribute("mean", 0.0)), float(call.attribute("scale", 1.0))
    number = stream.normal(position, dtype)
    work = str(number.ty.dtype)
    return number * tirx.const(scale, work) + tirx.const(mean, work)


def of_shape(draw: Draw) -> Converter:
    """Converter for random numbers of the shape and type that attributes give."""

    def convert(call: Call) -> Expression:
        dtype = dtype_name(call.attribute("dtype", 1))
        return _drawn(call, draw, [int(dim) for dim in call.attribute("shape")], dtype)

    return convert


def like(draw: Draw) -> Converter:
    """Converter for random numbers of the shape, and unless told the type, of an input."""

    def convert(call: Call) -> Expression:
        given = call.attribute("dtype")
        dtype = call.dtype(0) if given is None else dtype_name(given)
        return _drawn(call, draw, call.shape(0), dtype)

    return convert


def _drawn(call: Call, draw: Draw, shape: Sequence[Dim], dtype: str) -> Expression:
    if not is_float(dtype):
        raise Unsupported(f"random numbers of type {dtype}")
    stream = stream_of(call)

    def kernel(own: Own) -> te.Tensor:
        def element(*index: Any) -> Any:
            return draw(call, stream, _position(index, list(map(own, shape))), dtype).astype(dtype)

        return compute(map(own, shape), element, "random")

    return emit_kernel(call, kernel, name="random")


def _position(index: Sequence[Any], shape: Sequence[Dim]) -> Any:
    """Number of an element in the order of memory."""
    position: Any = tirx.const(0, "int64")
    for i, dim in zip(index, shape, strict=True):
        position = position * dim + i
    return position


def bernoulli(call: Call) -> Expression:
    """One with the probability that the input gives, zero otherwise."""
    given = call.attribute("dtype")
    dtype = call.dtype(0) if given is None else dtype_name(given)
    stream, work = stream_of(call), call.dtype(0)

    def kernel(chances: te.Tensor) -> te.Tensor:
        def element(*index: Any) -> Any:
            number = stream.uniform(_position(index, chances.shape), work)
            return (number < chances(*index).astype(str(number.ty.dtype))).astype(dtype)

        return compute(chances.shape, element, "bernoulli")

    return call.emit_te(kernel, call.tensor(0), primfunc_name_hint="bernoulli")


def dropout(call: Call) -> tuple[Value, ...]:
    """Without training the input and a mask of ones; else some elements are zero (opset 12).

    In training an element stays with a probability of ``1 - ratio``, divided by that.
    """
    if not call.has(2) or not _may_train(call):
        return dropout_attribute(call)
    dtype = call.dtype(0)
    ratio = call.value(1) if call.has(1) else Constant("ratio", np.array(0.5, np.float32))
    work = "float64" if dtype == "float64" else "float32"

    def product(share: Any, trains: Any) -> Any:
        return share.astype(work) * trains.astype("uint8").astype(work)

    # What is not trained loses nothing.
    rate = map_elements(call, product, ratio, call.value(2), name="dropout_rate")
    rate = call.materialize(reshape(call, rate, (1,)))

    chances = _drawn(call, lambda _, s, i, d: s.uniform(i, d), call.shape(0), work)

    def function(x: Any, chance: Any, share: Any) -> Any:
        scaled = x.astype(work) / (tirx.const(1, work) - share)
        return tirx.Select(chance < share, tirx.const(0, work), scaled)

    result = map_elements(call, function, call.value(0), chances, rate, dtype=dtype, name="dropout")
    mask = map_elements(call, lambda c, share: share <= c, chances, rate, name="mask")
    return result, mask


def _may_train(call: Call) -> bool:
    if not call.is_known(2):
        return True
    if call.has(1) and call.is_known(1) and float(call.constant(1, "the ratio").item()) == 0:
        return False
    return bool(call.constant(2, "training_mode").item())


def multinomial(call: Call) -> Expression:
    """Classes drawn with the unnormalized log-probabilities that the input gives.

    The largest of log-probabilities with noise of the Gumbel distribution added falls on each
    class with its probability.
    """
    samples = int(call.attribute("sample_size", 1))
    dtype = dtype_name(call.attribute("dtype", 6))
    stream = stream_of(call)
    batch, classes = call.shape(0)

    def noisy(own: Own, chances: te.Tensor) -> te.Tensor:
        def element(*index: Any) -> Any:
            row, _, which = index
            place = _position(index, (own(batch), samples, own(classes)))
            one = tirx.const(1, "float64")
            noise = -tirx.log(-tirx.log(one - stream.uniform(place, "float64")))
            return chances(row, which).astype("float64") + noise

        return compute((own(batch), samples, own(classes)), element, "noisy")

    scores = emit_kernel(call, noisy, call.tensor(0), name="noisy")
    winners = call.emit_te(lambda x: topi.argmax(x, axis=2), scores)
    return cast(call, winners, dtype)


OPERATORS: tuple[Operator, ...] = (
    Operator("RandomNormal", of_shape(_normal)),
    Operator("RandomUniform", of_shape(_uniform)),
    Operator("RandomNormalLike", like(_normal)),
    Operator("RandomUniformLike", like(_uniform)),
    Operator("Bernoulli", bernoulli, since=15),
    Operator("Dropout", dropout, since=12),
    Operator("Multinomial", multinomial),
)
