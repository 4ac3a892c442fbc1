"""Geometry of a blocked convolution, and its cut into register tiles.

The output of one image and one panel of filters is a plane of pixels. A register tile holds some
pixels (a few rows times a few columns of the plane) times all vectors of the panel. Tiles of a
row have sizes that differ by at most one, so that no pixel is computed twice. At the border some
kernel positions fall outside of the input; tiles where the same ones do share their code, and the
multiplications with zero are left out. Pointwise convolutions walk the plane as one long row,
folded to whatever width tiles best.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass
from typing import Any

from hybridc.targets.llvm.cpu import Cpu
from hybridc.targets.llvm.schedules.registers import (
    LOADS_PER_CYCLE,
    MULTIPLIES_PER_CYCLE,
    MULTIPLY_LATENCY,
)
from hybridc.targets.tuning import Figures, Problem, figures, require
from tvm import tirx

BLOCKED = "hybridc.blocked_convolution"
"""Annotation of a block that computes a blocked convolution: the fields of its Geometry."""

FIRST_CACHE_BYTES = 32 * 1024
STREAM_BYTES = 32
"""Bytes per cycle that come from the second-level cache."""

TILE_CYCLES = 24
"""Cycles around each register tile that nothing hides: loop control and addresses."""

FINISH_CYCLES = 2
"""Cycles for one vector of results: bias, activation, store."""

MAX_VECTORS = 8
"""Vectors of a panel, at most."""

MAX_UNROLLED = 640
"""Multiply-adds of one loop body, at most."""


@dataclass(frozen=True)
class Geometry:
    """A convolution whose output is blocked; sizes are in elements.

    Attributes:
        batch: Number of images.
        groups: Number of channel groups; for a depthwise convolution the number of channels.
        channels: Input channels of one group.
        blocks: Blocks of output channels.
        lanes: Channels of one block.
        vectors: Blocks of one panel, all computed by one register tile.
        source_lanes: Channels of one block of the input; 1 if it is plain.
        depthwise: 1 if each channel is convolved on its own, else 0.
        height, width: Size of the input.
        rows, columns: Size of the output.
        kernel_rows, kernel_columns: Size of the kernel.
        row_step, column_step: Stride.
        row_reach, column_reach: Dilation.
        top, left: Padding in front.
        filters: Output channels; 0 stands for all lanes of all blocks.
        winograd: Rows and columns of the tiles of Winograd's algorithm; 0 without it.
        shuffled: Parts of the input's channels. If there are several, the convolution is of what
            a channel shuffle makes of it: the first channel of each part, the second, and so on.
    """

    batch: int
    groups: int
    channels: int
    blocks: int
    lanes: int
    vectors: int
    source_lanes: int
    depthwise: int
    height: int
    width: int
    rows: int
    columns: int
    kernel_rows: int
    kernel_columns: int
    row_step: int
    column_step: int
    row_reach: int
    column_reach: int
    top: int
    left: int
    filters: int = 0
    winograd: int = 0
    shuffled: int = 1

    def encode(self) -> list[int]:
        """The fields as an annotation."""
        return [int(value) for value in astuple(self)]

    @property
    def is_pointwise(self) -> bool:
        """Whether output pixel number q reads input pixel number q only."""
        kernel = (self.kernel_rows, self.kernel_columns, self.row_step, self.column_step)
        return kernel == (1, 1, 1, 1) and (self.height, self.width) == (self.rows, self.columns)

    @property
    def panels(self) -> int:
        """Number of panels; blocks may be missing in the last one."""
        return -(-self.blocks // self.vectors)

    @property
    def group_filters(self) -> int:
        """Output channels of one group."""
        return (self.filters or self.blocks * self.lanes) // self.groups

    @property
    def mixes_groups(self) -> bool:
        """Whether a block of channels may belong to several groups.

        A panel then reads the input channels of all its groups, with zeros as weights where a
        filter is of another group.
        """
        straddled = self.group_filters % self.lanes or self.channels % self.source_lanes
        mixed = bool(straddled) or self.shuffled > 1
        return self.groups > 1 and not self.depthwise and mixed

    def source_channel(self, channel: Any) -> Any:
        """Where an input channel is, behind a shuffle."""
        if self.shuffled == 1:
            return channel
        each = self.channels * self.groups // self.shuffled
        return tirx.floormod(channel, self.shuffled) * each + tirx.floordiv(channel, self.shuffled)

    def span(self, panel: int) -> tuple[int, int]:
        """First and last but one input channel that a panel reads."""
        width = self.vectors * self.lanes
        last = min((panel * width + width - 1) // self.group_filters, self.groups - 1)
        first = min(panel * width // self.group_filters, self.groups - 1)
        return first * self.channels, (last + 1) * self.channels

    @property
    def steps(self) -> int:
        """Steps of the reduction of one output, in the mean over all panels."""
        taps = self.kernel_rows * self.kernel_columns
        if not self.mixes_groups:
            return taps if self.depthwise else taps * self.channels
        spans = (self.span(panel) for panel in range(self.panels))
        return -(-taps * sum(high - low for low, high in spans) // self.panels)

    @property
    def vertical(self) -> Axis:
        """The axis of rows."""
        return Axis(
            self.rows, self.height, self.kernel_rows, self.row_step, self.row_reach, self.top
        )

    @property
    def horizontal(self) -> Axis:
        """The axis of columns."""
        return Axis(
            self.columns,
            self.width,
            self.kernel_columns,
            self.column_step,
            self.column_reach,
            self.left,
        )


@dataclass(frozen=True)
class Axis:
    """One spatial axis of a convolution."""

    outputs: int
    inputs: int
    taps: int
    step: int
    reach: int
    before: int

    def reads(self, output: int, tap: int) -> bool:
        """Whether an output meets an input, not padding, at a kernel position."""
        return 0 <= output * self.step + tap * self.reach - self.before < self.inputs

    @property
    def is_clipped(self) -> bool:
        """Whether some output reads padding."""
        last = self.taps - 1
        return not (self.reads(0, 0) and self.reads(self.outputs - 1, last))


Pattern = tuple[tuple[bool, ...], ...]
"""For each kernel position and each output of a tile, whether an input is read."""


@dataclass(frozen=True)
class Run:
    """Neighboring tiles of one axis with the same size and the same pattern.

    Where they are and how many may be known at run time only, and so may the pattern of tiles of
    one output, which is ``None`` then.
    """

    start: Any
    count: Any
    size: int
    pattern: Pattern | None


def runs(axis: Axis, largest: int) -> list[Run]:
    """Cut an axis into tiles of at most ``largest`` outputs, whose sizes differ by at most one."""
    count = -(-axis.outputs // largest)
    small, larger = divmod(axis.outputs, count)
    found: list[Run] = []
    start = 0
    for index in range(count):
        size = small + (index < larger)
        pattern = tuple(
            tuple(axis.reads(start + i, tap) for i in range(size)) for tap in range(axis.taps)
        )
        last = found[-1] if found else None
        if last and (last.size, last.pattern) == (size, pattern):
            found[-1] = Run(last.start, last.count + 1, size, pattern)
        else:
            found.append(Run(start, 1, size, pattern))
        start += size
    return found


@dataclass(frozen=True)
class Tiling:
    """How the plane of outputs is cut.

    Attributes:
        rows, columns: Size of the plane; a pointwise convolution's may be folded.
        tile_rows: Rows of a register tile.
        tile_columns: Columns of a register tile, at most.
        cycles: Estimate for one image and one panel.
    """

    rows: int
    columns: int
    tile_rows: int
    tile_columns: int
    cycles: float


def tasks_of(geometry: Geometry, tiling: Tiling) -> int:
    """Number of pieces that threads may share; tiles of several rows stay together."""
    rows = tiling.rows if tiling.tile_rows == 1 else 1
    return geometry.batch * geometry.panels * rows


def shared_cycles(geometry: Geometry, tiling: Tiling) -> float:
    """Estimated cycles of the whole convolution, the mean of one thread's and of twice a half's.

    What two threads cannot share evenly counts as much as work.
    """
    tasks = tasks_of(geometry, tiling)
    halves = 2 * -(-tasks // 2)
    return geometry.batch * geometry.panels * tiling.cycles * (1 + halves / tasks) / 2


def choose_tiling(geometry: Geometry, cpu: Cpu, may_fold: bool, is_fixed: bool = True) -> Tiling:
    """The tiling that was measured to be best, or else needs the fewest cycles by estimate.

    Args:
        geometry: The convolution.
        cpu: The processor.
        may_fold: Whether a pointwise convolution's plane may be.
        is_fixed: Whether the size of the plane is known; it is only a typical one otherwise.
    """
    if not is_fixed:
        return _rows_tiling(geometry, cpu, may_fold)
    tuned = _tuned(geometry, cpu)
    if tuned and ("vectors", geometry.vectors) in tuned:
        known = {choice_of(geometry, tiling): tiling for tiling in tilings(geometry, cpu, True)}
        tiling = require(problem_of(geometry), tuned, known)
        if may_fold or (tiling.rows, tiling.columns) == (geometry.rows, geometry.columns):
            return tiling
    # Of equal ones, the plane with most rows: rows are what threads share.
    candidates = tilings(geometry, cpu, may_fold)
    return min(candidates, key=lambda t: (shared_cycles(geometry, t), t.columns))


def _rows_tiling(geometry: Geometry, cpu: Cpu, may_fold: bool) -> Tiling:
    """The best tiling whose tiles have one row each, of the plane itself or of one long row."""
    pixels = geometry.rows * geometry.columns
    candidates = [
        tiling
        for tiling in tilings(geometry, cpu, may_fold)
        if tiling.tile_rows == 1 and tiling.columns in (geometry.columns, pixels)
    ]
    return min(candidates, key=lambda t: (shared_cycles(geometry, t), t.columns))


def choose_vectors(whole: Geometry, cpu: Cpu) -> Geometry:
    """The geometry with the number of vectors in a panel that was measured, or seems, fastest."""
    tuned, panels = _tuned(whole, cpu), panels_of(whole)
    if tuned:
        vectors = figures(vectors=dict(tuned).get("vectors", 0))
        return require(problem_of(whole), vectors, {figures(vectors=g.vectors): g for g in panels})
    return min(panels, key=lambda g: shared_cycles(g, choose_tiling(g, cpu, True)))


def _tuned(geometry: Geometry, cpu: Cpu) -> Figures | None:
    """What was measured to be best for a geometry, if that is a direct convolution."""
    tuned = cpu.tuning.choice(problem_of(geometry)) if cpu.tuning.choices else None
    return tuned if tuned and "winograd" not in dict(tuned) else None


def panels_of(whole: Geometry) -> list[Geometry]:
    """The geometry with each number of vectors that a panel can have."""
    if whole.depthwise:
        return [whole]
    is_split = whole.groups > 1 and not whole.mixes_groups
    per_group = whole.blocks // whole.groups if is_split else whole.blocks
    return [
        dataclasses.replace(whole, vectors=vectors)
        for vectors in range(1, min(per_group, MAX_VECTORS) + 1)
        if per_group % vectors == 0 or not is_split
    ]


def tilings(geometry: Geometry, cpu: Cpu, may_fold: bool) -> Iterator[Tiling]:
    """All tilings for a number of vectors in a panel."""
    planes = [(geometry.rows, geometry.columns)]
    if geometry.is_pointwise and may_fold:
        pixels = geometry.rows * geometry.columns
        planes += [(pixels // width, width) for width in range(1, pixels + 1) if not pixels % width]
    for rows, columns in planes:
        for height, width in _tiles(geometry, cpu, rows, columns):
            cycles = _cycles(geometry, cpu, rows, columns, height, width)
            yield Tiling(rows, columns, height, width, cycles)


def problem_of(geometry: Geometry) -> Problem:
    """What a tuning has a choice for: the geometry, however it is computed."""
    sizes = dataclasses.asdict(geometry)
    chosen = ("vectors", "winograd")
    return Problem("blocked", figures(**{k: v for k, v in sizes.items() if k not in chosen}))


def choice_of(geometry: Geometry, tiling: Tiling) -> Figures:
    """How a geometry is computed, in a tuning."""
    cut = dataclasses.asdict(tiling)
    del cut["cycles"]
    return figures(vectors=geometry.vectors, **cut)


def rank_choices(whole: Geometry, cpu: Cpu) -> dict[Figures, float]:
    """All choices for a geometry with their cycles, best first; none is cut like another."""
    found: dict[Any, tuple[float, int, int, Figures]] = {}
    for geometry in panels_of(whole):
        for tiling in tilings(geometry, cpu, True):
            plane, tile = (tiling.rows, tiling.columns), (tiling.tile_rows, tiling.tile_columns)
            cut = tuple(tuple(_sizes(size, most)) for size, most in zip(plane, tile, strict=True))
            cycles, choice = shared_cycles(geometry, tiling), choice_of(geometry, tiling)
            price = cycles, geometry.vectors, tiling.columns, choice
            key = geometry.vectors, plane, cut
            found[key] = min(found.get(key, price), price)
    return {choice: cycles for cycles, _, _, choice in sorted(found.values())}


def _tiles(geometry: Geometry, cpu: Cpu, rows: int, columns: int) -> Iterator[tuple[int, int]]:
    """Sizes of register tiles that fit; several rows only where a tile spans whole rows."""
    is_unrolled = geometry.depthwise or geometry.horizontal.is_clipped
    taps = geometry.kernel_columns if is_unrolled else 1
    limit = max(cpu.free_registers(geometry.vectors), 1)
    if geometry.depthwise:
        # Beside the outputs, the inputs that they share and one row of the kernel are kept.
        limit = max((cpu.vector_registers - geometry.kernel_columns) // 2, 1)
    for width in range(1, min(columns, limit) + 1):
        if width * geometry.vectors * taps <= MAX_UNROLLED or width == 1:
            yield 1, width
    if columns != geometry.columns:
        return
    for height in range(2, min(rows, limit // columns) + 1):
        if height * columns * geometry.vectors * taps * geometry.kernel_rows <= MAX_UNROLLED:
            yield height, columns


def _cycles(
    geometry: Geometry, cpu: Cpu, rows: int, columns: int, tile_rows: int, tile_columns: int
) -> float:
    """Cycles of one image and panel: multiplies or loads, whichever takes longer."""
    vectors = geometry.vectors
    panel = geometry.steps * vectors * cpu.vector_bytes
    streamed = panel > FIRST_CACHE_BYTES // 2 and not geometry.depthwise
    stream = vectors * cpu.vector_bytes / STREAM_BYTES if streamed else 0
    latency, around = MULTIPLY_LATENCY, TILE_CYCLES
    if geometry.depthwise:
        # A tile has so few steps that the next one begins before it ends.
        latency, around = 0, TILE_CYCLES // 2
    total = 0.0
    for height, down in _sizes(rows, tile_rows):
        for width, right in _sizes(columns, tile_columns):
            pixels = height * width
            multiplies = pixels * vectors / MULTIPLIES_PER_CYCLE
            loads = (_inputs(geometry, height, width) + vectors) / LOADS_PER_CYCLE
            step = max(multiplies, loads, latency, stream) + 0.1 * (loads + stream)
            finish = FINISH_CYCLES * pixels * vectors
            total += down * right * (geometry.steps * step + finish + around)
    return total


def _inputs(geometry: Geometry, height: int, width: int) -> float:
    """Inputs that a tile loads in one step; outputs of a depthwise convolution share them."""
    if not geometry.depthwise:
        return height * width
    taps = geometry.kernel_columns
    columns = (width - 1) * geometry.column_step + (taps - 1) * geometry.column_reach + 1
    return height * min(columns / taps, width)


def _sizes(outputs: int, largest: int) -> Sequence[tuple[int, int]]:
    """Sizes of the tiles of an axis, each with its number."""
    count = -(-outputs // largest)
    small, larger = divmod(outputs, count)
    return [(size, n) for size, n in ((small + 1, larger), (small, count - larger)) if n]
