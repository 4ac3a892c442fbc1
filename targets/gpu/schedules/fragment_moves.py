"""How the factors of a product on tensor cores get to shared memory: through registers.

Shared memory is counted in words of 32 bits: one float32 number, or two neighbors in depth of a
type of 16 bits; factors of 8 bits, four in a word, do not come this way. A factor whose neighbors
in memory lie along k is kept row by row, one whose neighbors lie along its own axis depth by depth;
both with a gap that spreads what a warp reads over all banks.

    row by row        word (row, depth) at row * (depths + 4) + depth
    depth by depth    word (row, depth) at depth * (rows + 8) + row

A warp has 32 columns, four fragments of 8. Of every fragment a lane gets two neighbors; columns are
dealt to the fragments so that all 8 of a lane are neighbors, and leave the registers together:

    column   8 lane + 2 fragment + i        place   8 fragment + 2 lane + i        i in 0, 1
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hybridc.targets.gpu.schedules.factors import Element
from hybridc.targets.gpu.schedules.fragment_choice import WARP_COLUMNS
from hybridc.targets.gpu.schedules.fragment_functions import (
    fetch_pair,
    fetch_words,
    pack_word,
    store_columns,
    store_row,
)
from hybridc.targets.llvm.schedules.statements import int64, sequence
from tvm import DataType, sym, tirx


@dataclass(frozen=True)
class Side:
    """One factor's tile.

    Attributes:
        factor: The factor.
        rows: Rows of a tile, which lie along the factor's own axis.
        words: Depth of a step.
        is_right: Whether its rows are columns of the product, which are dealt to fragments.
    """

    factor: Element
    rows: int
    words: int
    is_right: bool

    @property
    def packed(self) -> int:
        """Elements in a word."""
        return 32 // int(DataType(self.factor.dtype).bits)

    @property
    def along_depth(self) -> bool:
        """Whether it is kept row by row."""
        own, along = self.factor.width(1), self.factor.width(2)
        return along > 1 and along >= own

    @property
    def width(self) -> int:
        """Elements that are fetched at once."""
        return self.factor.width(2 if self.along_depth else 1)

    @property
    def strides(self) -> tuple[int, int]:
        """Words from one row to the next, and from one depth to the next."""
        return (self.words + 4, 1) if self.along_depth else (1, self.rows + 8)

    @property
    def size(self) -> int:
        """Words of shared memory."""
        return self.rows * (self.words + 4) if self.along_depth else self.words * (self.rows + 8)

    def place(self, row: Any) -> Any:
        """Where a row is kept."""
        if not self.is_right:
            return row
        inner = row % WARP_COLUMNS
        return row - inner + inner % 8 // 2 * 8 + inner // 8 * 2 + inner % 2


@dataclass(frozen=True)
class Move:
    """Writes the statements that move one factor's tiles.

    A unit is what a thread fetches at once: words that are neighbors in depth, or columns of one.

    Attributes:
        side: The tile.
        threads: Threads of a block.
        thread: This thread's number.
        registers: Where fetched words are, ``registers_for`` of them.
        shared: Shared memory.
        analyzer: Knows how far the variables go.
        within: Whether no step goes beyond the depth.
    """

    side: Side
    threads: int
    thread: Any
    registers: Any
    shared: Any
    analyzer: sym.Analyzer
    within: bool

    def fetch(self, batch: Any, row: Any, depth: Any) -> list[Any]:
        """Bring a tile into registers.

        Args:
            batch: Which product.
            row: Its first row.
            depth: Its first depth, in elements.
        """
        side, unit = self.side, _unit(self.side)

        def body(number: int, outer: Any, inner: Any) -> Any:
            to = number * unit
            if side.along_depth:
                place = (batch, row + outer, depth + inner * unit * side.packed)
                return self._word(to, *place) if side.width == 1 else self._words(to, unit, *place)
            place = (batch, row + inner * unit, depth + outer * side.packed)
            return self._word(to, *place) if side.width == 1 else self._columns(to, *place)

        return self._each_unit(body)

    def store(self, start: Any) -> list[Any]:
        """Move a tile from registers to shared memory at ``start``."""
        side, unit = self.side, _unit(self.side)
        across, down = side.strides

        def body(number: int, outer: Any, inner: Any) -> Any:
            if side.along_depth:
                place = start + side.place(outer) * across + inner * unit
            elif side.width > 1:
                return self._store_columns(number * unit, start + outer * down, inner)
            else:
                place = start + side.place(inner) + outer * down
            function = store_row(side.factor.dtype, unit)
            return function.run(
                self.shared, self._simple(place), self.registers, int64(number * unit)
            )

        return self._each_unit(body)

    def _each_unit(self, body: Callable[[int, Any, Any], Any]) -> list[Any]:
        """Statements for a thread's units; some threads have none in the last pass."""
        outer, inner = _units(self.side)
        found = []
        for number in range(_passes(self.side, self.threads)):
            unit = self.thread + number * self.threads
            statement = body(number, self._simple(unit // inner), self._simple(unit % inner))
            if (number + 1) * self.threads > outer * inner:
                statement = tirx.IfThenElse(unit < outer * inner, statement, None)
            found.append(statement)
        return found

    def _columns(self, to: int, batch: Any, row: Any, depth: Any) -> Any:
        """Neighbors along the factor's own axis, at each depth of a word."""
        words = self.side.width // self.side.packed
        parts = [
            self._words(to + index * words, words, batch, row, depth + index)
            for index in range(self.side.packed)
        ]
        return sequence(parts)

    def _words(self, to: int, words: int, batch: Any, row: Any, depth: Any) -> Any:
        """Neighbors in memory, all at once."""
        source, address, when = self._load(batch, row, depth)
        place = (self.registers, int64(to))
        return fetch_words(words).run(*place, start_of(source), address, when)

    def _load(self, batch: Any, row: Any, depth: Any) -> tuple[Any, Any, Any]:
        """Buffer, number and condition of an element that is loaded."""
        source, address, when = self.side.factor.address_at(batch, row, depth)
        when = self._simple(tirx.all(when, *inside(self.side, self.within, row, depth)))
        return source, self._simple(address), when

    def _word(self, to: int, batch: Any, row: Any, depth: Any) -> Any:
        """The elements of one word, one by one."""
        factor, packed = self.side.factor, self.side.packed
        if not factor.is_loaded:
            values = [self._value(batch, row, depth + index) for index in range(packed)]
            return tirx.BufferStore(self.registers, pack_word(factor.dtype)(*values), [int64(to)])
        if packed == 1:
            return self._words(to, 1, batch, row, depth)
        source, first, is_first = self._load(batch, row, depth)
        _, second, is_second = self._load(batch, row, depth + 1)
        place = (self.registers, int64(to), start_of(source))
        return fetch_pair().run(*place, first, is_first, second, is_second)

    def _value(self, batch: Any, row: Any, depth: Any) -> Any:
        """An element that is computed."""
        value = self._simple(self.side.factor.at(batch, row, depth))
        conditions = inside(self.side, self.within, row, depth)
        if not conditions:
            return value
        zero = tirx.const(0, self.side.factor.dtype)
        return tirx.if_then_else(self._simple(tirx.all(*conditions)), value, zero)

    def _store_columns(self, origin: int, start: Any, inner: Any) -> Any:
        """Two columns at a time, since so many keep together."""
        side = self.side
        function = store_columns(side.factor.dtype)
        parts = []
        for pair in range(side.width // 2):
            place = self._simple(start + side.place(inner * side.width + 2 * pair))
            first = origin + (pair if side.packed == 2 else 2 * pair)
            second = first + (side.width // 2 if side.packed == 2 else 1)
            sources = map(int64, (first, second))
            parts.append(function.run(self.shared, place, self.registers, *sources))
        return sequence(parts)

    def _simple(self, expression: Any) -> Any:
        return self.analyzer.simplify(expression)


def inside(side: Side, within: bool, row: Any, depth: Any) -> list[Any]:
    """Conditions under which an element of a factor exists.

    Args:
        side: The factor's tile.
        within: Whether no step goes beyond the depth.
        row: The element's row.
        depth: Its depth.
    """
    _, rows, depths = side.factor.extents
    conditions = [] if rows % side.rows == 0 else [row < rows]
    return conditions if within else [*conditions, depth < depths]


def registers_for(side: Side, threads: int) -> int:
    """Words that a thread fetches for a tile."""
    return _passes(side, threads) * _unit(side)


def start_of(buffer: Any) -> Any:
    """The address of a buffer."""
    return tirx.address_of(tirx.BufferLoad(buffer, [int64(0)] * len(buffer.shape)))


def _passes(side: Side, threads: int) -> int:
    outer, inner = _units(side)
    return -(-outer * inner // threads)


def _unit(side: Side) -> int:
    """Words of a unit."""
    return max(side.width // side.packed, 1) if side.along_depth else side.width


def _units(side: Side) -> tuple[int, int]:
    """Units of a tile: outer ones, and inner ones that lie side by side in memory."""
    if side.along_depth:
        return side.rows, side.words // _unit(side)
    return side.words, side.rows // _unit(side)
