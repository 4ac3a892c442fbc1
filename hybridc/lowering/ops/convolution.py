"""Convolutions and transposed convolutions over one to three spatial dimensions.

A transposed convolution is computed output by output. With stride s and K taps, output y (counted
in front of the cut-off padding) meets the taps k = y mod s, y mod s + s, ..., and tap number j of
them meets input y div s - j. So each output reads ceil(K / s) taps and no zeros are inserted.
Where taps are dilated and strided at once, all K taps are tried and those between inputs skipped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from tvm import relax, te, tirx

from hybridc.lowering.call import Call, Invalid, Operator, Unsupported, as_expression
from hybridc.lowering.checks import require
from hybridc.lowering.ops.common import (
    HALF_TYPES,
    Own,
    at_least,
    cast,
    compute,
    emit_kernel,
    number,
    per_channel,
    reduce_axis,
    simplify,
)
from hybridc.lowering.ops.window import (
    Window,
    explicit_paddings,
    not_negative,
    pad_spatial,
    unpadded_window,
    window_of,
)
from hybridc.lowering.value import Dim, Expression

_CONVOLUTIONS = {1: relax.op.nn.conv1d, 2: relax.op.nn.conv2d, 3: relax.op.nn.conv3d}


def convolution(call: Call) -> Expression:
    """Convolution of ``(N, C, spatial...)`` with ``(M, C / groups, taps...)`` and optional bias."""
    _check_rank(call)
    window = window_of(call, call.shape(1)[2:])
    groups = int(call.attribute("group", 1))
    outputs, per_group = call.shape(1)[:2]
    _check_channels(call, per_group * groups, outputs, groups)
    _check_fit(call, window)
    dtype = call.dtype(0)
    data, window = _padded(call, window)
    result = call.emit(
        _CONVOLUTIONS[len(window.kernel)](
            data,
            call.tensor(1),
            strides=list(window.strides),
            padding=window.padding,
            dilation=list(window.dilations),
            groups=groups,
            out_dtype="float32" if dtype in HALF_TYPES else dtype,
        )
    )
    return _with_bias(call, cast(call, result, dtype))


def _padded(call: Call, window: Window) -> tuple[Expression, Window]:
    """The data, padded by a kernel of its own where Relax's operator cannot, as for ``2 * n``."""
    if all(isinstance(pad, int) for pad in window.padding):
        return call.tensor(0), window

    def kernel(own: Own, data: te.Tensor) -> te.Tensor:
        moved = window.translated(own)
        return pad_spatial(data, moved.before, moved.after, number(0, data))

    none = (0,) * len(window.kernel)
    data = emit_kernel(call, kernel, call.tensor(0), name="pad")
    return data, replace(window, before=none, after=none)


def _check_rank(call: Call) -> None:
    rank = call.rank(0) - 2
    if rank not in _CONVOLUTIONS or call.rank(1) != rank + 2:
        raise Unsupported(f"convolution over {rank} spatial dimensions")
    declared = call.attribute("kernel_shape")
    if declared is not None and tuple(declared) != call.shape(1)[2:]:
        raise Unsupported("kernel_shape differs from the weight's shape")


def _check_fit(call: Call, window: Window) -> None:
    """Check that the kernel is not larger than the padded input."""
    along = zip(call.shape(0)[2:], window.before, window.after, window.extents, strict=True)
    for size, before, after, extent in along:
        rest = simplify(size + before + after - extent)
        if isinstance(rest, int) and rest < 0:
            raise Invalid(f"a kernel over {extent} elements, and {rest + extent} of them")
        if not at_least(rest, 0):
            message = f"the kernel covers {extent} elements and the input has fewer"
            require(call, lambda rest: as_expression(rest) >= 0, (rest,), message)


def _check_channels(call: Call, channels: Dim, outputs: Dim, groups: int) -> None:
    given = call.shape(0)[1]
    if not all(isinstance(dim, int) for dim in (given, channels, outputs)):
        raise Unsupported("the number of channels must be known at compile time")
    if given != channels or channels % groups or outputs % groups:
        raise Unsupported(f"{given} channels in {groups} groups do not fit the weight")


def _with_bias(call: Call, result: Expression) -> Expression:
    if not call.has(2):
        return result
    bias = per_channel(call, call.value(2), call.rank(0))
    return call.emit(relax.op.add(result, bias))


def transposed_convolution(call: Call) -> Expression:
    """Transposed convolution with weights ``(C, M / groups, taps...)`` and optional bias."""
    _check_rank(call)
    groups = int(call.attribute("group", 1))
    channels, per_group = call.shape(1)[:2]
    _check_channels(call, channels, per_group * groups, groups)
    window, sizes = _transposed_geometry(call, unpadded_window(call, call.shape(1)[2:]))
    shape = (call.shape(0)[0], per_group * groups, *sizes)

    def kernel(own: Own, data: te.Tensor, weight: te.Tensor) -> te.Tensor:
        return _transposed_kernel(data, weight, [own(dim) for dim in shape], window)

    operands = (call.tensor(0), call.tensor(1))
    result = emit_kernel(call, kernel, *operands, name="conv_transpose")
    return _with_bias(call, cast(call, result, call.dtype(0)))


def _transposed_geometry(call: Call, window: Window) -> tuple[Window, tuple[Dim, ...]]:
    """The window with what is cut off in front, and the sizes of the output."""
    rank = len(window.kernel)
    extra = call.attribute("output_padding") or [0] * rank
    full = [
        simplify((size - 1) * stride + extent + more)
        for size, stride, extent, more in zip(
            call.shape(0)[2:], window.strides, window.extents, extra, strict=True
        )
    ]
    mode = call.attribute("auto_pad", "NOTSET")
    wanted = call.attribute("output_shape")
    if wanted is None and mode in ("NOTSET", "VALID"):
        before, after = explicit_paddings(call, rank) if mode == "NOTSET" else ((0,) * rank,) * 2
        cut = zip(full, before, after, strict=True)
        return replace(window, before=before), tuple(simplify(f - b - a) for f, b, a in cut)
    if wanted is None:
        sizes = call.shape(0)[2:]
        wanted = [simplify(d * s) for d, s in zip(sizes, window.strides, strict=True)]
    totals = [simplify(f - w) for f, w in zip(full, wanted[-rank:], strict=True)]
    if not all(isinstance(total, int) for total in totals):
        raise Unsupported("output_shape needs a static input shape")
    if any(total <= -stride for total, stride in zip(totals, window.strides, strict=True)):
        raise Unsupported(f"output_shape {wanted} is larger than this convolution's output")
    upper = mode == "SAME_UPPER"
    halves = [max(total, 0) // 2 for total in totals]
    before = tuple(h if upper else max(t, 0) - h for h, t in zip(halves, totals, strict=True))
    return replace(window, before=before), tuple(wanted[-rank:])


@dataclass(frozen=True)
class _Axis:
    """One spatial dimension of a transposed convolution: which taps an output meets, and where."""

    kernel: int
    stride: int
    dilation: int
    before: int

    @property
    def phased(self) -> bool:
        return self.dilation == 1

    @property
    def taps(self) -> int:
        return -(-self.kernel // self.stride) if self.phased else self.kernel

    @property
    def reach(self) -> int:
        """How far in front of input 0 the first output reads."""
        last = (self.taps - 1) * (self.stride if self.phased else self.dilation)
        return max(0, -((self.before - last) // self.stride))

    def overrun(self, outputs: Dim, inputs: Dim) -> Dim:
        """How far behind the last input the last output reads."""
        last = tirx.floordiv(outputs - 1 + self.before, self.stride)
        return not_negative(simplify(last - (inputs - 1)))

    def meet(self, output: Any, tap: Any) -> tuple[Any, Any, Any | None]:
        """Input position, kernel position, and the condition under which they count."""
        position = output + self.before
        if not self.phased:
            offset = position - tap * self.dilation
            between = None if self.stride == 1 else tirx.floormod(offset, self.stride) == 0
            return tirx.floordiv(offset, self.stride), tap, between
        kernel = tirx.floormod(position, self.stride) + tap * self.stride
        exists = None if self.kernel % self.stride == 0 else kernel < self.kernel
        return tirx.floordiv(position, self.stride) - tap, kernel, exists


def _transposed_kernel(
    data: te.Tensor, weight: te.Tensor, shape: Sequence[Dim], window: Window
) -> te.Tensor:
    """The transposed convolution of ``data``, of the given output shape."""
    axes = [
        _Axis(*parameters)
        for parameters in zip(
            window.kernel, window.strides, window.dilations, window.before, strict=True
        )
    ]
    reach = [axis.reach for axis in axes]
    overrun = [
        axis.overrun(size, inputs)
        for axis, size, inputs in zip(axes, shape[2:], data.shape[2:], strict=True)
    ]
    padded = pad_spatial(data, reach, overrun, number(0, data))
    per_group = weight.shape[1]
    channels = simplify(weight.shape[0] * per_group // shape[1])
    dtype = "float32" if str(data.dtype) in HALF_TYPES else data.dtype
    channel = reduce_axis(channels, name="rc")
    taps = [reduce_axis(axis.taps, name=f"k{i}") for i, axis in enumerate(axes)]

    def element(batch: Any, output: Any, *spatial: Any) -> Any:
        met = [axis.meet(y, tap) for axis, y, tap in zip(axes, spatial, taps, strict=True)]
        inputs = [position + low for (position, _, _), low in zip(met, reach, strict=True)]
        source = tirx.floordiv(output, per_group) * channels + channel
        read = padded(batch, source, *inputs).astype(dtype)
        factor = weight(source, tirx.floormod(output, per_group), *(tap for _, tap, _ in met))
        conditions = [condition for _, _, condition in met if condition is not None]
        term = read * factor.astype(dtype)
        if conditions:
            term = tirx.if_then_else(tirx.all(*conditions), term, tirx.const(0, dtype))
        return te.sum(term, axis=[channel, *taps])

    return compute(shape, element, name="conv_transpose")


OPERATORS: tuple[Operator, ...] = (
    Operator("Conv", convolution),
    Operator("ConvTranspose", transposed_convolution),
)
