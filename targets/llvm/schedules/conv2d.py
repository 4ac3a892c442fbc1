"""Direct two-dimensional convolution on plain NCHW tensors.

For one output channel, kernel position and input channel, the products over a whole row of
outputs are ``weight * input[shifted row]``. If the padded rows are ``width`` wide and the outputs
are numbered ``q = y * width + x``, the shift is the same for every ``q``, so that rows can be run
together: a vector of outputs may span two rows, no row has a remainder, and the few outputs
computed at ``x`` beyond the row's end are dropped. This makes a convolution a matrix product of
the weights with a matrix that is never built: rows are output channels, columns are ``q``, and a
register tile holds some channels times a few vectors of ``q``.

A strided convolution first splits its input into ``stride x stride`` phases, inside each of which
neighbors in the output are neighbors in memory; then the above holds again. Pointwise
convolutions drop nothing, so that they are finished (bias, activation) inside the register tile;
others are finished row by row from a small buffer.

Rows of outputs are taken in chunks whose input fits into the second-level cache.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import tvm
from hybridc.targets.fitting import Misfit
from hybridc.targets.llvm.cpu import Cpu
from hybridc.targets.llvm.schedules.blocks import (
    axes_of,
    blocks_of,
    extents_of,
    is_reduction,
    is_spatial,
    loads_of,
    may_repeat,
    same_variables,
    starts_from,
    store_of,
)
from hybridc.targets.llvm.schedules.generic import schedule_spatial
from hybridc.targets.llvm.schedules.inlining import inline_spatial_blocks
from hybridc.targets.llvm.schedules.loops import (
    extent,
    finish_tile,
    fuse_parallel,
    tile_vectors,
)
from hybridc.targets.llvm.schedules.registers import RegisterTile, cycles_of, tiles_of
from hybridc.targets.llvm.schedules.splice import replace_block
from hybridc.targets.llvm.schedules.statements import int64
from hybridc.targets.llvm.schedules.tails import mark_tile
from hybridc.targets.llvm.schedules.tiles import (
    Initialization,
    initialize,
    move_into_tile,
)
from hybridc.targets.tuning import Figures, Problem, figures, require
from tvm import te, tirx
from tvm.s_tir import SBlock, Schedule

CACHE_BYTES = 512 * 1024
"""Input of one chunk of rows; half of a common second-level cache."""

UNROLLED_MULTIPLIES = 256
"""Kernel positions are unrolled as long as the loop body has at most this many multiply-adds."""

ANCHOR = "convolution"
RESULT = "result"
PHASES = "phases"


@dataclass(frozen=True)
class Convolution:
    """A convolution found in a function; sizes are in elements.

    One over a single axis counts as one of height 1.

    Attributes:
        source: Buffer of the input, padded if there is padding.
        weight: Buffer of the weights.
        result: Buffer that the convolution writes.
        batch: Number of images.
        groups: Number of channel groups.
        channels: Input channels of one group.
        filters: Output channels of all groups.
        kernel: Height and width of the kernel.
        stride: Steps between outputs.
        dilation: Steps between kernel elements.
        output: Height and width of the output.
        padded: Height and width of the padded input.
    """

    source: Any
    weight: Any
    result: Any
    batch: int
    groups: int
    channels: int
    filters: int
    kernel: tuple[int, int]
    stride: tuple[int, int]
    dilation: tuple[int, int]
    output: tuple[int, int]
    padded: tuple[int, int]

    @property
    def is_flat(self) -> bool:
        """Whether the tensors have one spatial axis only."""
        return len(self.result.shape) == 3

    @property
    def is_strided(self) -> bool:
        """Whether the input has to be split into phases."""
        return self.stride != (1, 1)

    @property
    def is_pointwise(self) -> bool:
        """Whether rows run together without dropped outputs."""
        return self.width == self.output[1]

    @property
    def width(self) -> int:
        """Length of a row of the (phase of the) padded input."""
        return self._extent(1) if self.is_strided else self.padded[1]

    @property
    def height(self) -> int:
        """Number of rows of the (phase of the) padded input."""
        return self._extent(0) if self.is_strided else self.padded[0]

    @property
    def problem(self) -> Problem:
        """What a tuning has a choice for."""
        counts = {"batch": self.batch, "groups": self.groups, "channels": self.channels}
        counts |= {"filters": self.filters, "item_bits": tvm.DataType(str(self.result.dtype)).bits}
        for name in ("kernel", "stride", "dilation", "output", "padded"):
            down, right = getattr(self, name)
            counts |= {f"{name}_rows": down, f"{name}_columns": right}
        return Problem("convolution", figures(**counts))

    def _extent(self, axis: int) -> int:
        reach = (self.kernel[axis] - 1) * self.dilation[axis] // self.stride[axis]
        return self.output[axis] + reach

    def columns(self, rows: int) -> int:
        """Outputs computed for a chunk of ``rows`` rows, dropped ones included."""
        return (rows - 1) * self.width + self.output[1]


def find_convolution(node: SBlock) -> Convolution:
    """The convolution that a block computes.

    Raises:
        Misfit: It computes something else.
    """
    store, extents = _check_axes(node)
    rank = (len(extents) - 3) // 2
    kept = 2 + rank
    axes = [axis.var for axis in node.iter_vars]
    source, weight = _factors(node, store)
    if [int(dim) for dim in store.buffer.shape] != extents[:kept]:
        raise Misfit("the output is larger than what is computed")
    if not same_variables(store.indices, axes[:kept]) or not same_variables(
        weight.indices, [axes[1], *axes[kept:]]
    ):
        raise Misfit("unexpected output or weight layout")
    steps = [steps_of(source.indices[2 + i], axes[2 + i], axes[3 + rank + i]) for i in range(rank)]
    down, right = steps if rank == 2 else ((1, 1), *steps)
    shape = [int(dim) for dim in source.source.shape]
    channels = extents[kept]
    found = Convolution(
        source.source,
        weight.source,
        store.buffer,
        extents[0],
        shape[1] // channels,
        channels,
        extents[1],
        _plane(extents[kept + 1 :]),
        (down[0], right[0]),
        (down[1], right[1]),
        _plane(extents[2:kept]),
        _plane(shape[2:]),
    )
    _check_channels(found, source.indices, axes, node)
    return found


def _factors(node: SBlock, store: Any) -> tuple[Any, Any]:
    """What a sum of products multiplies."""
    value = store.value
    if not isinstance(value, tirx.Add) or not isinstance(value.b, tirx.Mul):
        raise Misfit("not a sum of products")
    so_far, source, weight = value.a, value.b.a, value.b.b
    if not all(isinstance(load, tvm.ir.TensorLoad) for load in (so_far, source, weight)):
        raise Misfit("a factor is not a plain load")
    if not so_far.source.same_as(store.buffer) or not starts_from(node, 0):
        raise Misfit("not a sum that starts from zero")
    return source, weight


def _check_axes(node: SBlock) -> tuple[Any, list[int]]:
    """The store and the extents of a block with the axes of a convolution."""
    store, extents = store_of(node), extents_of(node)
    if store is None or extents is None or not is_reduction(node) or len(extents) not in (5, 7):
        raise Misfit("not five or seven static axes")
    rank = (len(extents) - 3) // 2
    kinds = [axis.iter_type == tirx.IterVar.CommReduce for axis in node.iter_vars]
    if kinds != [False] * (2 + rank) + [True] * (1 + rank):
        raise Misfit("not the axes of a convolution")
    return store, extents


def _plane(sizes: list[int]) -> tuple[int, int]:
    """Height and width."""
    return (sizes[0], sizes[1]) if len(sizes) == 2 else (1, sizes[0])


def steps_of(index: Any, position: tirx.Var, offset: tirx.Var) -> tuple[int, int]:
    """Stride and dilation of ``index = position * stride + offset * dilation``."""
    coefficients = tvm.sym.detect_linear_equation(index, [position, offset])
    if len(coefficients) != 3 or not all(isinstance(c, tirx.IntImm) for c in coefficients):
        raise Misfit("an input index is not affine")
    stride, dilation, base = map(int, coefficients)
    if base != 0 or stride < 1 or dilation < 0:
        raise Misfit("an input index has an offset")
    return stride, dilation


def _check_channels(found: Convolution, indices: Any, axes: list[tirx.Var], node: SBlock) -> None:
    """Raise unless the channel is read as a convolution with ``found.groups`` groups reads it."""
    analyzer = tvm.sym.Analyzer()
    for axis in node.iter_vars:
        analyzer.bind(axis.var, axis.dom)
    if found.filters % found.groups or not indices[0].same_as(axes[0]):
        raise Misfit("unexpected batch or groups")
    group = tirx.floordiv(axes[1], found.filters // found.groups)
    expected = group * found.channels + axes[len(found.result.shape)]
    if not analyzer.can_prove_equal(indices[1], expected):
        raise Misfit("unexpected input channel")


def schedule_convolution(schedule: Schedule, cpu: Cpu) -> Schedule:
    """Schedule a function around one convolution.

    Raises:
        Misfit: The function is not of this kind.
    """
    anchors = [block for block in blocks_of(schedule) if is_reduction(schedule.get(block))]
    if len(anchors) != 1:
        raise Misfit("not one reduction")
    node = schedule.get(anchors[0])
    found = find_convolution(node)
    if found.is_flat:
        raise Misfit("one spatial axis")
    rows, tile = choose_chunk(found, cpu)
    function = _rewrite(schedule.mod["main"], str(node.name_hint), found, rows)
    try:
        return _schedule_rewritten(function, found, rows, tile, cpu, keep=())
    except (Misfit, RuntimeError):
        # What follows cannot be finished inside a tile: convolve first, then do the rest.
        return _schedule_rewritten(function, found, rows, tile, cpu, keep=(RESULT,))


def _schedule_rewritten(
    function: tirx.PrimFunc,
    found: Convolution,
    rows: int,
    tile: RegisterTile,
    cpu: Cpu,
    keep: tuple[str, ...],
) -> Schedule:
    """Schedule the rewritten function, with the blocks named in ``keep`` not inlined."""
    schedule = Schedule(tvm.IRModule({"main": function}))
    inline_spatial_blocks(schedule, keep)
    others = [block for block in blocks_of(schedule) if is_spatial(schedule.get(block))]
    final = final_reader(schedule, found, rows)
    name = schedule.get(final).name_hint
    if found.is_pointwise:
        _tile_pointwise(schedule, final, found, tile)
    else:
        _tile_rows(schedule, final, found, rows, tile)
    for block in others:
        if schedule.get(block).name_hint != name:
            schedule_spatial(schedule, block, cpu)
    return schedule


def choose_chunk(found: Convolution, cpu: Cpu) -> tuple[int, RegisterTile]:
    """Rows of a chunk and the register tile that were measured, or seem, fastest together."""
    choices = rank_chunks(found, cpu)
    chosen = cpu.tuning.choice(found.problem) or next(iter(choices))
    require(found.problem, chosen, choices)
    numbers = dict(chosen)
    return numbers.pop("chunk_rows"), RegisterTile(**numbers)


def rank_chunks(found: Convolution, cpu: Cpu) -> dict[Figures, float]:
    """Chunks with register tiles and their cycles for one step of the reduction, best first.

    Raises:
        Misfit: There is none that fills a vector.
    """
    itemsize = tvm.DataType(str(found.result.dtype)).bits // 8
    filters = found.filters // found.groups
    prices = []
    for rows in _row_counts(found, itemsize):
        for tile in tiles_of(filters, found.columns(rows), itemsize, cpu):
            cycles = cycles_of(tile, filters, found.columns(rows)) * (found.output[0] // rows)
            if tile.lanes > 1:
                choice = figures(chunk_rows=rows, **dataclasses.asdict(tile))
                prices.append((cycles, -rows, -tile.rows * tile.vectors, choice))
    if not prices:
        raise Misfit("rows too short for a vector")
    return {choice: cycles for cycles, _, _, choice in sorted(prices)}


def _row_counts(found: Convolution, itemsize: int) -> list[int]:
    """Divisors of the output's height whose input fits into the cache; at least one.

    Pointwise convolutions are chunked by tiles instead, which need no divisor.
    """
    height = found.output[0]
    if found.is_pointwise:
        return [height]
    row = found.channels * found.width * found.stride[0] * found.stride[1] * itemsize
    divisors = [rows for rows in range(1, height + 1) if height % rows == 0]
    return [rows for rows in divisors if rows * row <= CACHE_BYTES] or divisors[:1]


def _rewrite(function: tirx.PrimFunc, name: str, found: Convolution, rows: int) -> tirx.PrimFunc:
    """The function with its convolution over running outputs ``q``, chunk by chunk."""
    dtype = str(found.result.dtype)
    source = te.placeholder(found.source.shape, str(found.source.dtype), "source")
    weight = te.placeholder(found.weight.shape, str(found.weight.dtype), "weight")
    read = _phase_reader(found, source)
    chunks, width = found.output[0] // rows, found.width
    axes = [
        te.reduce_axis((int64(0), int64(size)), axis)
        for size, axis in zip((found.channels, *found.kernel), ("c", "y", "x"), strict=True)
    ]
    filters = found.filters // found.groups

    def product(n: Any, o: Any, chunk: Any, q: Any) -> Any:
        c, y, x = axes
        channel = c if found.groups == 1 else tirx.floordiv(o, filters) * found.channels + c
        element = read(
            n, channel, y * found.dilation[0], x * found.dilation[1], chunk * rows * width + q
        )
        return te.sum(element.astype(dtype) * weight[o, c, y, x].astype(dtype), axis=axes)

    shape = (found.batch, found.filters, chunks, found.columns(rows))
    anchor = te.compute(tuple(map(int64, shape)), product, name=ANCHOR)
    result = te.compute(
        found.result.shape,
        lambda n, o, y, x: anchor[tuple(_running_place(n, o, y, x, found, rows))],
        name=RESULT,
    )
    tensors, buffers = [source, weight, result], [found.source, found.weight, found.result]
    return replace_block(function, name, tensors, buffers)


def _phase_reader(found: Convolution, source: te.Tensor) -> Any:
    """How to read the input at kernel offset ``(y, x)`` of running output ``q``."""
    width = found.width
    if not found.is_strided:

        def read(n: Any, c: Any, y: Any, x: Any, q: Any) -> Any:
            at = q + y * width + x
            return source[n, c, tirx.floordiv(at, width), tirx.floormod(at, width)]

        return read
    down, right = found.stride
    shape = (found.batch, found.groups * found.channels, down * right, found.height, width)

    def phase(n: Any, c: Any, p: Any, y: Any, x: Any) -> Any:
        row, column = y * down + tirx.floordiv(p, right), x * right + tirx.floormod(p, right)
        inside = tirx.all(row < found.padded[0], column < found.padded[1])
        zero = tirx.const(0, str(source.dtype))
        return tirx.if_then_else(inside, source[n, c, row, column], zero)

    phases = te.compute(tuple(map(int64, shape)), phase, name=PHASES)

    def read_phase(n: Any, c: Any, y: Any, x: Any, q: Any) -> Any:
        p = tirx.floormod(y, down) * right + tirx.floormod(x, right)
        at = q + tirx.floordiv(y, down) * width + tirx.floordiv(x, right)
        return phases[n, c, p, tirx.floordiv(at, width), tirx.floormod(at, width)]

    return read_phase


def final_reader(schedule: Schedule, found: Convolution, rows: int) -> Any:
    """The one spatial block that reads the convolution, each element for its own there."""
    anchor = schedule.get_sblock(ANCHOR)
    readers = list(schedule.get_consumers(anchor))
    store = store_of(schedule.get(anchor))
    if len(readers) != 1 or not is_spatial(schedule.get(readers[0])) or store is None:
        raise Misfit("the result is read by several blocks")
    if not _reads_straight(schedule.get(readers[0]), store.buffer, found, rows):
        raise Misfit("the result is padded, cut off, or moved")
    if not may_repeat(schedule, readers[0], [store.buffer]):
        raise Misfit("what finishes the result may share memory with what it reads")
    return readers[0]


def _reads_straight(reader: SBlock, running: Any, found: Convolution, rows: int) -> bool:
    """Whether a block has the elements of the convolution's result and reads each at its place."""
    if extents_of(reader) != list(map(int, found.result.shape)):
        return False
    n, o, y, x = axes_of(reader)
    straight = _running_place(n, o, y, x, found, rows)
    analyzer = tvm.sym.Analyzer()
    return all(
        analyzer.can_prove_equal(index, expected)
        for load in loads_of(reader)
        if load.source.same_as(running)
        for index, expected in zip(load.indices, straight, strict=True)
    )


def _running_place(n: Any, o: Any, y: Any, x: Any, found: Convolution, rows: int) -> list[Any]:
    """Where an element of the result is among the running outputs."""
    return [n, o, tirx.floordiv(y, rows), tirx.floormod(y, rows) * found.width + x]


def _tile_pointwise(schedule: Schedule, final: Any, found: Convolution, tile: RegisterTile) -> None:
    """Finish inside the register tile: no output is dropped."""
    height, width = found.output
    schedule.transform_block_layout(
        final, lambda n, o, y, x: (n, o, y // height, (y % height) * width + x)
    )
    n, o, whole, q = schedule.get_loops(final)
    filters, in_filters = schedule.split(o, [None, tile.rows])
    itemsize = tvm.DataType(str(found.result.dtype)).bits // 8
    count = -(-height * width // tile.columns)
    limit = max(CACHE_BYTES // (found.channels * tile.columns * itemsize), 1)
    chunk, q = schedule.split(q, [None, -(-count // -(-count // limit)) * tile.columns])
    schedule.reorder(n, whole, chunk, filters, in_filters, q)
    step = _tile_columns(schedule, final, in_filters, q, tile)
    fuse_parallel(schedule, [n, whole, chunk, filters], _operations(found))
    initialize(schedule, step)


def _tile_rows(
    schedule: Schedule, final: Any, found: Convolution, rows: int, tile: RegisterTile
) -> None:
    """Collect a chunk of some filters in a buffer, then finish it row by row."""
    collected = schedule.cache_write(schedule.get_sblock(ANCHOR), 0, "global")
    n, o, y, x = schedule.get_loops(final)
    filters, in_filters = schedule.split(o, [None, tile.rows])
    chunk, in_chunk = schedule.split(y, [None, rows])
    schedule.reorder(n, chunk, filters, in_filters, in_chunk, x)
    mark_tile(schedule, in_filters)
    # The collected rows are not computed anew for every vector, unlike a register tile.
    tile_vectors(schedule, x, tile.lanes, may_be_cut=may_repeat(schedule, final))
    by_axis = move_into_tile(schedule, collected, filters)
    step = _tile_columns(schedule, collected, by_axis.get(1), by_axis[3], tile)
    fuse_parallel(schedule, [n, chunk, filters], _operations(found))
    initialize(schedule, step)


def _tile_columns(
    schedule: Schedule, target: Any, in_filters: Any, q: Any, tile: RegisterTile
) -> Initialization:
    """Tile the columns of ``target`` and compute the convolution inside the register tile."""
    columns, *lanes = schedule.split(q, [None, tile.vectors, tile.lanes])
    rows = [] if in_filters is None else [in_filters]
    schedule.reorder(columns, *rows, *lanes)
    finish_tile(schedule, [*rows, *lanes])
    anchor = schedule.get_sblock(ANCHOR)
    by_axis = move_into_tile(schedule, anchor, columns)
    inner = schedule.split(by_axis[3], [tile.vectors, tile.lanes])
    rows = [by_axis[1]] if 1 in by_axis else []
    reduction = [by_axis[axis] for axis in (4, 5, 6) if axis in by_axis]
    schedule.reorder(*reduction, *rows, *inner)
    finish_tile(schedule, [*rows, *inner])
    body = tile.rows * tile.vectors
    for loop in reversed(reduction[1:]):
        body *= extent(schedule, loop)
        if body <= UNROLLED_MULTIPLIES:
            schedule.unroll(loop)
    return Initialization(anchor, reduction[0], len(rows) + 2)


def _operations(found: Convolution) -> int:
    window = found.channels * found.kernel[0] * found.kernel[1]
    return found.batch * found.filters * found.output[0] * found.output[1] * window
