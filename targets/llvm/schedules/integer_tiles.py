"""The form of integer kernels: instructions, packed weights and register tiles.

A kernel computes int32 sums of products of integers, exactly. The channels of a weight are put
side by side in groups that one instruction multiplies and adds at once:

    pairs   int16 data x int8 or int16 weights, two at a time: vpmaddwd, or vpdpwssd
    quads   uint8 or int8 data x int8 weights, four at a time: vpdpbusd, usdot, sdot
    single  one channel on its own, as in a depthwise convolution; with AVX2 two taps at a time,
            see integer_depthwise.py

None of these saturates: a pair is at most 2 * 255 * 255. (vpmaddubsw would, and is not used.)

The output, whose last axis holds the filters, is cut into panels of some vectors. The last panel
is moved back to end at the last filter, so no filter is made up; the weights are packed to match.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from hybridc.targets.llvm.cpu import Cpu

from hybridc.bundle.tensors import Array

INTEGER = "hybridc.integer"
"""Attribute of a block that holds a :class:`Geometry`."""

SINGLE, PAIRS, QUADS = 1, 2, 4
"""Channels that one instruction takes from each lane."""

MAX_TILE = 8
"""Pixels of a register tile at most, each of which has an address in a register."""


@dataclass(frozen=True)
class Geometry:
    """One integer kernel over data of ``(batch, height, width, channels)``, padded already.

    Attributes:
        group: Channels side by side: SINGLE, PAIRS or QUADS.
        batch: Images.
        rows: Rows of the output.
        columns: Columns of the output.
        channels: Channels of the data, a multiple of ``group``; 1 if SINGLE.
        filters: Channels of the output.
        kernel_rows: Rows of the kernel.
        kernel_columns: Columns of the kernel.
        row_step: Stride of rows.
        column_step: Stride of columns.
        row_reach: Dilation of rows.
        column_reach: Dilation of columns.
        lanes: Filters of one vector.
        vectors: Vectors of one panel.
        winograd: Outputs of a tile of Winograd's algorithm in each axis; 0 without it.
    """

    group: int
    batch: int
    rows: int
    columns: int
    channels: int
    filters: int
    kernel_rows: int
    kernel_columns: int
    row_step: int
    column_step: int
    row_reach: int
    column_reach: int
    lanes: int
    vectors: int
    winograd: int = 0

    def encode(self) -> list[int]:
        """The numbers, as a block's attribute."""
        return list(dataclasses.astuple(self))

    @property
    def is_convolution(self) -> bool:
        """Whether the data has images; if not, the leading axes are a matrix's rows."""
        return self.row_reach > 0

    @property
    def pixels(self) -> int:
        """Elements of one channel of the output."""
        return self.batch * self.rows * self.columns

    @property
    def panel(self) -> int:
        """Filters of one panel."""
        return self.lanes * self.vectors

    @property
    def panels(self) -> int:
        """Number of panels."""
        return -(-self.filters // self.panel)

    @property
    def starts(self) -> list[int]:
        """The first filter of each panel."""
        last = self.filters - self.panel
        return [min(panel * self.panel, last) for panel in range(self.panels)]

    @property
    def steps(self) -> int:
        """Groups of channels that are summed for one output."""
        return self.kernel_rows * self.kernel_columns * self.channels // self.group


def vector_lanes(cpu: Cpu) -> int:
    """int32 elements of a vector that integer kernels use; 0 if the CPU has no instruction."""
    if cpu.architecture == "aarch64":
        return 4 if "dotprod" in cpu.llvm_features else 0
    if "avx512bw" in cpu.llvm_features:
        return 16
    return 8 if "avx2" in cpu.llvm_features else 0


def quads_type(cpu: Cpu, lanes: int) -> str | None:
    """Type of the data that the CPU multiplies with int8 by fours; ``None`` if it does not."""
    features = cpu.llvm_features
    if cpu.architecture == "aarch64":
        known = {"uint8": "i8mm", "int8": "dotprod"}
        return next((kind for kind, feature in known.items() if feature in features), None)
    has_half = "avxvnni" in features or {"avx512vnni", "avx512vl"} <= features
    has_lanes = has_half if lanes == 8 else "avx512vnni" in features
    return "uint8" if has_lanes else None


def has_pairs(cpu: Cpu) -> bool:
    """Whether the CPU multiplies int16 by pairs."""
    return cpu.architecture == "x86_64"


def choose_panel(filters: int, group: int, cpu: Cpu) -> tuple[int, int] | None:
    """Lanes and vectors of a panel; ``None`` if there are too few filters for a vector."""
    full = vector_lanes(cpu)
    lanes = full // 2 if full == 16 and filters < full else full
    if not 0 < lanes <= filters:
        return None
    most = 1 if group == SINGLE else 2
    if cpu.vector_registers >= 32 and lanes == full and filters >= 4 * lanes and group != SINGLE:
        most = 4 if filters % (4 * lanes) == 0 else 2
    return lanes, min(most, filters // lanes)


def tile_rows(geometry: Geometry, cpu: Cpu) -> int:
    """Pixels of a register tile."""
    free = cpu.vector_registers - geometry.vectors - 2
    most = min(max(free // geometry.vectors, 1), MAX_TILE, geometry.pixels)
    count = -(-geometry.pixels // most)
    return -(-geometry.pixels // count)


def pack(weight: Array, geometry: Geometry) -> Array:
    """Weights of ``(filters, rows, columns, channels)`` in the order in which they are used.

    Returns:
        ``(panels, rows, columns, channels / group, filters of a panel * group)``.
    """
    g = geometry
    missing = g.channels - weight.shape[3]
    whole = np.pad(weight, [(0, 0), (0, 0), (0, 0), (0, missing)])
    panels = np.stack([whole[start : start + g.panel] for start in g.starts])
    split = panels.reshape(
        (g.panels, g.panel, g.kernel_rows, g.kernel_columns, g.channels // g.group, g.group)
    )
    moved = split.transpose(0, 2, 3, 4, 1, 5)
    return np.ascontiguousarray(moved.reshape(*moved.shape[:4], g.panel * g.group))


def packed_shape(geometry: Geometry) -> Sequence[int]:
    """Shape of what :func:`pack` returns."""
    g = geometry
    return (
        g.panels, g.kernel_rows, g.kernel_columns, g.channels // g.group, g.panel * g.group
    )  # fmt: skip
