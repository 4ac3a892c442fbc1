"""Find the convolutions of a module that can be blocked, and what each layout would cost.

Costs are cycles of one core by the same counts with which the schedules choose their tiles, and
bytes that go through the second-level cache for what is copied.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import tvm
from hybridc.targets.fitting import Misfit
from hybridc.targets.llvm.cpu import Cpu
from hybridc.targets.llvm.schedules.blocked_tiles import (
    Geometry,
    choose_tiling,
    choose_vectors,
)
from hybridc.targets.llvm.schedules.blocks import (
    blocks_of,
    is_reduction,
    store_of,
)
from hybridc.targets.llvm.schedules.conv2d import Convolution, choose_chunk, find_convolution
from hybridc.targets.llvm.schedules.padding import check_indices, check_padding, padding_of
from hybridc.targets.llvm.schedules.registers import cycles_of
from hybridc.targets.llvm.schedules.winograd_tiles import choose_chunking, fastest
from hybridc.targets.llvm.sizes import buffers_of, has_open_sizes, with_typical_sizes
from tvm import tirx
from tvm.s_tir import Schedule

ITEM_BYTES = 4
BYTES_PER_CYCLE = 8
"""What one core copies from and to the second-level cache in a cycle."""

PLAIN_SPEED = 0.6
"""Share of their estimated speed that kernels on plain tensors reach: their rows begin anywhere, so
that every second vector of inputs straddles two cache lines, and filters are read scattered."""


@dataclass(frozen=True)
class PlainConvolution:
    """A convolution kernel on plain tensors.

    Sizes of images that are not known are typical ones.

    Attributes:
        found: The convolution; its source is the padded input.
        size: Height and width of the input without padding.
        before: Padding in front of rows and columns.
        is_open: Whether a size of the images is not known.
        has_open_batch: Whether their number is not known.
        shuffled: Parts of the channels of what is read, which a shuffle mixes first; see Geometry.
    """

    found: Convolution
    size: tuple[int, int]
    before: tuple[int, int]
    is_open: bool = False
    has_open_batch: bool = False
    shuffled: int = 1

    @property
    def is_depthwise(self) -> bool:
        """Whether every channel is convolved on its own."""
        found = self.found
        return found.groups > 1 and found.channels == 1 and found.filters == found.groups

    def geometry(self, lanes: int, source_lanes: int, vectors: int) -> Geometry:
        """The convolution with a blocked output."""
        found, depthwise = self.found, self.is_depthwise
        return Geometry(
            batch=found.batch,
            groups=found.groups,
            channels=found.channels,
            blocks=-(-found.filters // lanes),
            lanes=lanes,
            vectors=vectors,
            source_lanes=source_lanes,
            depthwise=int(depthwise),
            height=self.size[0],
            width=self.size[1],
            rows=found.output[0],
            columns=found.output[1],
            kernel_rows=found.kernel[0],
            kernel_columns=found.kernel[1],
            row_step=found.stride[0],
            column_step=found.stride[1],
            row_reach=max(found.dilation[0], 1),
            column_reach=max(found.dilation[1], 1),
            top=self.before[0],
            left=self.before[1],
            filters=found.filters,
            shuffled=self.shuffled,
        )


def find_plain_convolution(function: tirx.PrimFunc) -> PlainConvolution:
    """The float32 convolution that a kernel computes, padding included.

    Raises:
        Misfit: It computes something else.
    """
    plain = _find(with_typical_sizes(function))
    if min(plain.found.output) < 1:
        raise Misfit("typical images are smaller than the kernel")
    if has_open_sizes(function):
        _check_open(function, plain)
        batch, *image = function.params[0].shape
        return dataclasses.replace(
            plain,
            is_open=not all(isinstance(size, tirx.IntImm) for size in image),
            has_open_batch=not isinstance(batch, tirx.IntImm),
        )
    return plain


def _check_open(function: tirx.PrimFunc, plain: PlainConvolution) -> None:
    """Raise unless a kernel convolves images of all sizes as it does those of typical sizes."""
    data = buffers_of(function)[0]
    schedule = Schedule(tvm.IRModule({"main": function}))
    *padding, anchor = (schedule.get(block) for block in blocks_of(schedule))
    check_indices(anchor)
    for block in padding:
        check_padding(block, plain.before[-(len(data.shape) - 2) :])


def _find(function: tirx.PrimFunc) -> PlainConvolution:
    """The convolution of a kernel whose sizes are known."""
    if len(function.params) != 3:
        raise Misfit("not two operands")
    schedule = Schedule(tvm.IRModule({"main": function}))
    blocks = [schedule.get(block) for block in blocks_of(schedule)]
    if not blocks or not is_reduction(blocks[-1]) or len(blocks) > 2:
        raise Misfit("not one reduction, perhaps behind padding")
    found = find_convolution(blocks[-1])
    data, weight, result = function.params
    if not found.weight.same_as(weight) or not found.result.same_as(result):
        raise Misfit("operands in another order")
    if any(str(buffer.dtype) != "float32" for buffer in (data, weight, result)):
        raise Misfit("not float32")
    if not all(isinstance(dim, tirx.IntImm) for dim in data.shape):
        raise Misfit("a symbolic shape")
    height, width = ([1] if found.is_flat else []) + _sizes(data)[2:]
    size = (height, width)
    if len(blocks) == 1:
        if not found.source.same_as(data):
            raise Misfit("an operand from nowhere")
        return PlainConvolution(found, size, (0, 0))
    return PlainConvolution(found, size, _padding(blocks[0], data, found))


def _padding(block: Any, data: Any, found: Convolution) -> tuple[int, int]:
    """Padding in front of rows and columns, with zeros, as a block adds it."""
    store = store_of(block)
    if store is None or not store.buffer.same_as(found.source):
        raise Misfit("not padding")
    source, before, fill = padding_of(block, 1 if found.is_flat else 2)
    if not source.same_as(data) or fill not in (None, 0.0):
        raise Misfit("padding with something else than zero")
    return (0, before[0]) if found.is_flat else (before[0], before[1])


def _sizes(buffer: Any) -> list[int]:
    return [int(dim) for dim in buffer.shape]


def best_geometry(plain: PlainConvolution, lanes: int, source_lanes: int, cpu: Cpu) -> Geometry:
    """The convolution blocked, with the algorithm and the vectors in a panel that are fastest."""
    geometry = plain.geometry(lanes, source_lanes, 1)
    # Winograd's kernels are written for images of known size; their number may be unknown, since
    # they can take one at a time.
    if plain.is_open:
        return choose_vectors(geometry, cpu)
    if plain.has_open_batch:
        alone = _best(dataclasses.replace(geometry, batch=1), cpu)
        return alone if alone.winograd else choose_vectors(geometry, cpu)
    return _best(geometry, cpu)


@lru_cache(maxsize=4096)
def _best(geometry: Geometry, cpu: Cpu) -> Geometry:
    direct = choose_vectors(geometry, cpu)
    return direct if cpu.strict_math else fastest(direct, cpu)


@lru_cache(maxsize=4096)
def blocked_cycles(geometry: Geometry, cpu: Cpu) -> float:
    """Estimated cycles with a blocked output."""
    if geometry.winograd:
        return choose_chunking(geometry, cpu).cycles
    return geometry.batch * geometry.panels * choose_tiling(geometry, cpu, True).cycles


def plain_cycles(plain: PlainConvolution, cpu: Cpu) -> float:
    """Estimated cycles on plain tensors, copies of the input included."""
    found = plain.found
    steps = found.batch * found.groups * found.channels * found.kernel[0] * found.kernel[1]
    try:
        rows, tile = choose_chunk(found, cpu)
    except Misfit:
        # Scalar code.
        return 4.0 * steps * found.filters // found.groups * found.output[0] * found.output[1]
    chunks = found.output[0] // rows
    cycles = cycles_of(tile, found.filters // found.groups, found.columns(rows)) * chunks * steps
    copies = found.is_strided + (found.padded != plain.size) + (plain.shuffled > 1)
    source = found.batch * found.groups * found.channels * found.padded[0] * found.padded[1]
    return cycles / PLAIN_SPEED + copies * copy_cycles(source)


def copy_cycles(elements: int) -> float:
    """Estimated cycles to copy float32 elements."""
    return 2.0 * elements * ITEM_BYTES / BYTES_PER_CYCLE
