"""Windows that slide over spatial dimensions: the attributes of convolutions and pools."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from tvm import te, tirx

from hybridc.lowering.call import Call, Unsupported, as_dim
from hybridc.lowering.ops.common import (
    Own,
    at_least,
    ceil_divide,
    compute,
    floor_divide,
    simplify,
)
from hybridc.lowering.value import Dim


@dataclass(frozen=True)
class Window:
    """How a window slides, one entry for each spatial dimension.

    Attributes:
        kernel: Taps.
        strides: Input elements from one window to the next.
        dilations: Input elements from one tap to the next.
        before: Padding in front.
        after: Padding behind.
        same: Whether the padding is such that ``ceil(size / stride)`` windows fit.
    """

    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    before: tuple[Dim, ...]
    after: tuple[Dim, ...]
    same: bool = False

    @property
    def extents(self) -> tuple[int, ...]:
        """Input elements from a window's first tap to its last one, both counted."""
        pairs = zip(self.kernel, self.dilations, strict=True)
        return tuple((taps - 1) * dilation + 1 for taps, dilation in pairs)

    @property
    def padding(self) -> list[Dim]:
        """Paddings in the order of ONNX's ``pads``."""
        return [*self.before, *self.after]

    def translated(self, own: Own) -> Window:
        """The same with dimensions translated into those of a kernel."""
        return replace(self, before=tuple(map(own, self.before)), after=tuple(map(own, self.after)))

    def output(self, sizes: Sequence[Dim]) -> tuple[Dim, ...]:
        """Number of windows along each spatial dimension, rounded down."""
        if self.same:
            pairs = zip(sizes, self.strides, strict=True)
            return tuple(ceil_divide(size, stride) for size, stride in pairs)
        return tuple(
            simplify(floor_divide(simplify(size + before + after - extent), stride) + 1)
            for size, before, after, extent, stride in zip(
                sizes, self.before, self.after, self.extents, self.strides, strict=True
            )
        )


def window_of(call: Call, kernel: Sequence[Dim]) -> Window:
    """The window that a node's attributes describe over its first input.

    Args:
        call: A node with the attributes ``strides``, ``dilations``, ``pads`` and ``auto_pad``.
        kernel: Taps along each spatial dimension.
    """
    plain = unpadded_window(call, kernel)
    before, after = _paddings(call, plain)
    same = call.attribute("auto_pad", "NOTSET").startswith("SAME")
    return replace(plain, before=before, after=after, same=same)


def unpadded_window(call: Call, kernel: Sequence[Dim]) -> Window:
    """The same window without regard to ``pads`` and ``auto_pad``."""
    if not all(isinstance(taps, int) for taps in kernel):
        raise Unsupported("the kernel's shape must be known at compile time")
    rank = len(kernel)
    strides = tuple(call.attribute("strides") or [1] * rank)
    dilations = tuple(call.attribute("dilations") or [1] * rank)
    if not rank == len(strides) == len(dilations) == call.rank(0) - 2:
        raise Unsupported("window attributes do not match the rank of the input")
    return Window(tuple(kernel), strides, dilations, (0,) * rank, (0,) * rank)


def _paddings(call: Call, window: Window) -> tuple[tuple[Dim, ...], tuple[Dim, ...]]:
    mode = call.attribute("auto_pad", "NOTSET")
    rank = len(window.kernel)
    if mode == "VALID":
        return (0,) * rank, (0,) * rank
    if mode == "NOTSET":
        return explicit_paddings(call, rank)
    if mode not in ("SAME_UPPER", "SAME_LOWER"):
        raise Unsupported(f"auto_pad {mode!r}")
    totals = [
        _same_padding(size, extent, stride)
        for size, extent, stride in zip(
            call.shape(0)[2:], window.extents, window.strides, strict=True
        )
    ]
    small = tuple(floor_divide(total, 2) for total in totals)
    large = tuple(simplify(total - half) for total, half in zip(totals, small, strict=True))
    return (small, large) if mode == "SAME_UPPER" else (large, small)


def explicit_paddings(call: Call, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Paddings in front and behind from the attribute ``pads``."""
    pads = call.attribute("pads") or [0] * (2 * rank)
    if len(pads) != 2 * rank or min(pads) < 0:
        raise Unsupported(f"pads {pads}")
    return tuple(pads[:rank]), tuple(pads[rank:])


def _same_padding(size: Dim, extent: int, stride: int) -> Dim:
    """Padding that makes ``ceil(size / stride)`` windows."""
    if stride == 1:
        return extent - 1
    return not_negative(simplify((ceil_divide(size, stride) - 1) * stride + extent - size))


def not_negative(dim: Dim) -> Dim:
    """A dimension, or zero where it would be less."""
    if isinstance(dim, int):
        return max(dim, 0)
    return dim if at_least(dim, 0) else simplify(tirx.max(dim, 0))


def pad_spatial(
    data: te.Tensor, before: Sequence[Dim], after: Sequence[Dim], fill: Any
) -> te.Tensor:
    """``(N, C, spatial...)`` with ``fill`` around the spatial dimensions; itself if no padding."""
    if all(isinstance(pad, int) and pad == 0 for pad in (*before, *after)):
        return data
    sizes = data.shape[2:]
    shape = [*data.shape[:2]]
    rows = zip(before, sizes, after, strict=True)
    shape += [simplify(low + as_dim(size) + high) for low, size, high in rows]

    def element(*index: Any) -> Any:
        source = [i - low for i, low in zip(index[2:], before, strict=True)]
        inside = [
            condition
            for i, size, low, high in zip(source, sizes, before, after, strict=True)
            for condition in _inside(i, size, low, high)
        ]
        return tirx.if_then_else(tirx.all(*inside), data(*index[:2], *source), fill)

    return compute(shape, element, name="pad_temp")


def _inside(index: Any, size: Dim, before: Dim, after: Dim) -> list[Any]:
    conditions = []
    if not (isinstance(before, int) and before == 0):
        conditions.append(index >= 0)
    if not (isinstance(after, int) and after == 0):
        conditions.append(index < size)
    return conditions
