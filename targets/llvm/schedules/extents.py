"""Sizes of the loops of a written kernel: numbers, or expressions that are known when it runs.

An axis of unknown size is cut into as many whole tiles as it has room for, and what is left into
smaller ones of 4, 2 and 1 outputs, each of which is there or not. Where outputs at the ends read
padding, they are tiles of one output that find out at run time which kernel positions they read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tvm
from hybridc.targets.llvm.schedules.blocked_tiles import Axis, Geometry, Run
from hybridc.targets.llvm.schedules.blocks import same_size
from hybridc.targets.llvm.schedules.statements import index, int64
from tvm import tirx


@dataclass(frozen=True)
class Extents:
    """Sizes of a kernel's images.

    Attributes:
        batch: Number of images.
        height, width: Size of the input.
        rows, columns: Size of the output.
    """

    batch: Any
    height: Any
    width: Any
    rows: Any
    columns: Any

    @property
    def is_fixed(self) -> bool:
        """Whether the sizes of images are known; their number need not be."""
        plane = (self.height, self.width, self.rows, self.columns)
        return all(isinstance(size, int) for size in plane)

    @property
    def keeps_plane(self) -> bool:
        """Whether the output is known to be as large as the input."""
        pairs = ((self.height, self.rows), (self.width, self.columns))
        return all(same_size(index(first), index(second)) for first, second in pairs)


def fixed_extents(geometry: Geometry) -> Extents:
    """Those of a geometry as it is."""
    g = geometry
    return Extents(g.batch, g.height, g.width, g.rows, g.columns)


def blocked_extents(data: Sequence[Any], result: Sequence[Any]) -> Extents:
    """Those of blocked images.

    Args:
        data: Batch, and height and width or width alone, of the input.
        result: The same of the output.
    """
    batch, *source = map(number, data)
    _, *plane = map(number, result)
    source, plane = ([1] * (2 - len(sizes)) + sizes for sizes in (source, plane))
    return Extents(batch, *source, *plane)


def number(size: Any) -> Any:
    """An ``int`` if a size is known, else the expression."""
    return int(size) if isinstance(size, int | tirx.IntImm) else size


def cut(start: Any, outputs: Any, largest: int, taps: int) -> list[Run]:
    """Tiles of ``outputs`` outputs from ``start`` on, all of which read every kernel position."""
    end = start + outputs
    rest = tirx.floormod(outputs, int64(largest))
    found = [_run(start, tirx.floordiv(outputs, int64(largest)), largest, taps)]
    size = 1 << (largest - 1).bit_length()
    while size > 1:
        size //= 2
        if size < largest:
            behind = tirx.floormod(rest, int64(2 * size))
            there = tirx.floordiv(behind, int64(size))
            found.append(_run(end - behind, there, size, taps))
    return found


def _run(start: Any, count: Any, size: int, taps: int) -> Run:
    return Run(start, count, size, ((True,) * size,) * taps)


def runs_at_run_time(axis: Axis, outputs: Any, inputs: Any, largest: int) -> list[Run]:
    """Cut an axis whose size is not known into tiles.

    Args:
        axis: Its steps, reach and padding; sizes in it are typical ones.
        outputs: Number of outputs.
        inputs: Number of inputs.
        largest: Outputs of a tile, at most.
    """
    if not may_clip(axis, outputs, inputs):
        return cut(int64(0), outputs, largest, axis.taps)
    reach = (axis.taps - 1) * axis.reach
    first = tirx.min(int64(-(-axis.before // axis.step)), outputs)
    end = tirx.floordiv(inputs - 1 + axis.before - reach, int64(axis.step)) + 1
    last = tirx.min(tirx.max(end, first), outputs)
    ahead, behind = (
        Run(start, count, 1, None) for start, count in ((int64(0), first), (last, outputs - last))
    )
    return [ahead, *cut(first, last - first, largest, axis.taps), behind]


def may_clip(axis: Axis, outputs: Any, inputs: Any) -> bool:
    """Whether some output may read padding."""
    last = (outputs - 1) * axis.step + (axis.taps - 1) * axis.reach - axis.before
    if axis.before > 0:
        return True
    variables = tirx.analysis.undefined_vars(int64(0) + outputs + inputs)
    analyzer = tvm.sym.Analyzer()
    for variable in variables:
        analyzer.bind(variable, tvm.ir.Range(0, 1 << 40))
    return not analyzer.can_prove(last < inputs)
