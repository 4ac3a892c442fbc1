"""Choice of the register tile: how many rows and vectors of accumulators a kernel holds.

A kernel of ``rows`` x ``vectors`` does ``rows * vectors`` fused multiply-adds for every step of
the reduction and loads ``vectors`` vectors and ``rows`` broadcast scalars. A core issues two
multiply-adds and two loads per cycle, each multiply-add takes four cycles, and the last tile of
an axis is computed whole even if it overlaps its neighbor; the tile that needs the fewest cycles
by this count wins.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hybridc.targets.llvm.cpu import Cpu
from hybridc.targets.llvm.schedules.loops import power_of_two_below
from hybridc.targets.llvm.schedules.tiles import STACK_BYTES

MULTIPLIES_PER_CYCLE = 2
LOADS_PER_CYCLE = 2
MULTIPLY_LATENCY = 4

VECTOR_LOAD = 2
"""Loads that an unaligned vector counts as, since it touches two cache lines."""

LOAD_SHARE = 0.1
"""Share of the loads that is not hidden behind the multiply-adds."""


@dataclass(frozen=True)
class RegisterTile:
    """Accumulators of one kernel: ``rows`` x ``vectors`` vectors of ``lanes`` elements."""

    rows: int
    vectors: int
    lanes: int

    @property
    def columns(self) -> int:
        """Elements of one row of the tile."""
        return self.vectors * self.lanes


def tiles_of(rows: int, columns: int, itemsize: int, cpu: Cpu) -> Iterator[RegisterTile]:
    """The tiles that fit registers, for an output of elements of ``itemsize`` bytes.

    None is larger than the output; ``lanes`` is 1 if the output has one column.
    """
    lanes = min(cpu.vector_bytes // itemsize, power_of_two_below(columns))
    for height in range(1, min(rows, cpu.vector_registers) + 1):
        for vectors in range(1, min(columns // lanes, cpu.vector_registers) + 1):
            if _fits(height, vectors, cpu):
                yield RegisterTile(height, vectors, lanes)


def _fits(rows: int, vectors: int, cpu: Cpu) -> bool:
    accumulators = rows * vectors
    in_registers = accumulators + vectors + 1 <= cpu.vector_registers
    return in_registers and accumulators * cpu.vector_bytes < STACK_BYTES


def cycles_of(tile: RegisterTile, rows: int, columns: int) -> float:
    """Cycles per step of the reduction for an output of ``rows`` x ``columns``."""
    count = -(-rows // tile.rows) * -(-columns // tile.columns)
    multiplies = tile.rows * tile.vectors / MULTIPLIES_PER_CYCLE
    loads = (tile.rows + tile.vectors * VECTOR_LOAD) / LOADS_PER_CYCLE
    return count * (max(multiplies, loads, MULTIPLY_LATENCY) + LOAD_SHARE * loads)
