"""How the factors of a product on tensor cores get to shared memory by themselves.

``cp.async`` copies 16 bytes of memory to shared memory while the threads go on, so that several
steps can be on their way at once. Both factors are kept row by row, and a row's chunks of 16 bytes
are swapped so that eight rows of a fragment, which are read at once, lie in different banks:

    word (row, depth)    at row * depths + (depth xor turn(row))
    turn(row)            4 * (row / (32 / depths) mod (depths / 4)), for 8, 16 or 32 depths
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hybridc.targets.gpu.schedules.fragment_functions import copy_chunk, turns_of
from hybridc.targets.gpu.schedules.fragment_moves import Side, inside, start_of
from tvm import sym, tirx

CHUNK = 4
"""Words of a chunk."""


def can_copy(side: Side) -> bool:
    """Whether a factor is chunks in memory whose elements are neighbors in depth."""
    loaded = side.factor.is_loaded and side.along_depth
    return loaded and side.width == CHUNK * side.packed


@dataclass(frozen=True)
class Copy:
    """Writes the statements that copy one factor's tiles.

    Attributes:
        side: The tile.
        threads: Threads of a block.
        thread: This thread's number.
        shared: Shared memory.
        analyzer: Knows how far the variables go.
        within: Whether no step goes beyond the depth.
    """

    side: Side
    threads: int
    thread: Any
    shared: Any
    analyzer: sym.Analyzer
    within: bool

    def begin(self, batch: Any, row: Any, depth: Any, start: Any) -> list[Any]:
        """Begin to copy a tile to shared memory.

        Args:
            batch: Which product.
            row: Its first row.
            depth: Its first depth, in elements.
            start: Where it begins in shared memory.
        """
        side, chunks = self.side, self.side.words // CHUNK
        found = []
        for number in range(-(-side.rows * chunks // self.threads)):
            unit = self.thread + number * self.threads
            own, chunk = self._simple(unit // chunks), self._simple(unit % chunks)
            place = self._simple(side.place(own))
            to = self._simple(start + place * side.words)
            source, address, when = self._load(
                batch, row + own, depth + chunk * CHUNK * side.packed
            )
            statement = copy_chunk().run(
                self.shared, to, chunk, self._turn(place), source, address, when
            )
            if (number + 1) * self.threads > side.rows * chunks:
                statement = tirx.IfThenElse(unit < side.rows * chunks, statement, None)
            found.append(statement)
        return found

    def _turn(self, place: Any) -> Any:
        """What a row's chunks are swapped by."""
        divisor, turns = turns_of(self.side.words)
        return self._simple(place // divisor % turns)

    def _load(self, batch: Any, row: Any, depth: Any) -> tuple[Any, Any, Any]:
        source, address, when = self.side.factor.address_at(batch, row, depth)
        when = self._simple(tirx.all(when, *inside(self.side, self.within, row, depth)))
        return start_of(source), self._simple(address), when

    def _simple(self, expression: Any) -> Any:
        return self.analyzer.simplify(expression)
