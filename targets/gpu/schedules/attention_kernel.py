"""Attention in one kernel on tensor cores, written out as statements.

    score[b, m, t] = finish(sum over k of query(b, m, k) * key(b, t, k))
    out[b, m, n]   = finish(sum over t of exp(score[b, m, t]) * value(b, t, n) / sum of exp(...))

A block of threads has some queries, 16 for each warp, and goes over the keys tile by tile. Scores
never leave the registers. The largest score of a query is not known before the last tile; so a
weight is relative to the largest one so far, and where that grows, what was added up is scaled down
(Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018; Dao et al.,
"FlashAttention", 2022):

    begin to copy the queries, and the first keys and values
    each tile:  await it;  barrier;  begin to copy the next from here
                multiply queries and keys;  finish the scores
                scores to weights, sums to their scale
                multiply weights and values, and add to the sums
    divide the sums by the sums of weights, and finish them
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hybridc.targets.fitting import Misfit
from hybridc.targets.gpu.schedules.attention_functions import LOWEST, settle, soften, weigh
from hybridc.targets.gpu.schedules.factors import Element, Product
from hybridc.targets.gpu.schedules.fragment_copies import Copy, can_copy
from hybridc.targets.gpu.schedules.fragment_functions import (
    await_copies,
    end_copies,
    multiply_chunks,
)
from hybridc.targets.gpu.schedules.fragment_kernel import LANES, barrier, write_neighbors
from hybridc.targets.gpu.schedules.fragment_moves import Side
from hybridc.targets.gpu.schedules.programs import launch
from hybridc.targets.llvm.schedules.statements import int64, sequence, serial_loop
from tvm import sym, tirx
from tvm.ir import Range

WARP_ROWS = 16
"""Queries of a warp."""

DEPTH = 8
"""Words that an instruction multiplies."""


@dataclass(frozen=True)
class Cut:
    """How attention is cut.

    Attributes:
        warps: Warps of a block.
        keys: Keys of a tile, a multiple of 16.
    """

    warps: int
    keys: int

    @property
    def rows(self) -> int:
        """Queries of a block."""
        return self.warps * WARP_ROWS


def shared_words(scores: Product, outputs: Product, cut: Cut) -> int:
    """Words of shared memory that the kernel takes: queries, and two tiles of keys and values."""
    query, key, value = _sides(scores, outputs, cut)
    return query.rows * query.words + 2 * (key.rows * key.words + value.rows * value.words)


def write_attention(scores: Product, outputs: Product, cut: Cut) -> Any:
    """The kernel.

    Args:
        scores: Queries times keys, and what becomes of that.
        outputs: Weights times values, and what becomes of that. Its left factor is not read.
        cut: How it is cut.

    Raises:
        Misfit: Queries, keys or values are not chunks of 16 bytes in memory.
    """
    sides = _sides(scores, outputs, cut)
    if not all(map(can_copy, sides)):
        raise Misfit("factors that are no chunks in memory")
    return _Writer(scores, outputs, cut, sides).kernel()


def _sides(scores: Product, outputs: Product, cut: Cut) -> tuple[Side, Side, Side]:
    """Tiles of queries, keys and values, with whole rows."""
    value = outputs.right
    (b, n, t), (batch, size, keys) = value.axes, value.extents
    turned = Element((b, t, n), (batch, keys, size), value.value)

    def side(factor: Element, rows: int) -> Side:
        return Side(factor, rows, _row_words(factor), is_right=False)

    return side(scores.left, cut.rows), side(scores.right, cut.keys), side(turned, cut.keys)


def _row_words(factor: Element) -> int:
    packed = 1 if factor.dtype == "float32" else 2
    return -(-factor.extents[2] // (packed * DEPTH)) * DEPTH


class _Writer:
    """Writes the kernel; its arguments are those of :func:`write_attention` and the tiles."""

    def __init__(
        self, scores: Product, outputs: Product, cut: Cut, sides: tuple[Side, Side, Side]
    ) -> None:
        self.scores, self.outputs, self.cut = scores, outputs, cut
        query, key, value = sides
        self.fragments = cut.keys // 8
        self.columns = value.words * value.packed // 8
        self.block, self.thread = tirx.Var("block", "int64"), tirx.Var("thread", "int64")
        self.analyzer = sym.Analyzer()
        self.analyzer.bind(self.thread, Range(int64(0), int64(self.threads)))
        self.shared = _buffer(shared_words(scores, outputs, cut), "uint32", "tiles", "shared.dyn")
        self.tile_scores = _buffer(self.fragments * 4, "float32", "scores", "local")
        self.sums = _buffer(self.columns * 4, "float32", "sums", "local")
        self.state = _buffer(4, "float32", "state", "local")
        self.query, self.key, self.value = (self._copy(side) for side in sides)
        self.key_at = query.rows * query.words
        self.value_at = self.key_at + 2 * key.rows * key.words

    def _copy(self, side: Side) -> Copy:
        within = side.words * side.packed == side.factor.extents[2]
        return Copy(side, self.threads, self.thread, self.shared, self.analyzer, within)

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.cut.warps * LANES

    @property
    def tiles(self) -> int:
        """Tiles of keys."""
        return -(-self.scores.shape[2] // self.cut.keys)

    def kernel(self) -> Any:
        """The kernel."""
        batch, rows, _, _ = self.scores.shape
        blocks = int64(batch * -(-rows // self.cut.rows))
        self.analyzer.bind(self.block, Range(int64(0), blocks))
        body = [
            *map(tirx.AllocBuffer, (self.shared, self.tile_scores, self.sums, self.state)),
            *_filled(self.sums, [0.0] * (self.columns * 4)),
            *_filled(self.state, [LOWEST, LOWEST, 0.0, 0.0]),
            *self.query.begin(self._batch, self._row, int64(0), int64(0)),
            *self._begin(int64(0)),
            serial_loop(self.tiles, self._tile, "tile"),
            settle().run(self.state),
            *self._results(),
        ]
        return launch(sequence(body), blocks, self.threads, self.block, self.thread)

    @property
    def _batch(self) -> Any:
        return self.block // -(-self.scores.shape[1] // self.cut.rows)

    @property
    def _row(self) -> Any:
        """First query of the block."""
        return self.block % -(-self.scores.shape[1] // self.cut.rows) * self.cut.rows

    @property
    def _warp(self) -> Any:
        return self.thread // LANES

    @property
    def _lane(self) -> Any:
        return self.thread % LANES

    def _half(self, copy: Copy, start: int, tile: Any) -> Any:
        """Where a tile of keys or values lies."""
        return start + tile % 2 * (copy.side.rows * copy.side.words)

    def _begin(self, tile: Any) -> list[Any]:
        """Begin to copy a tile's keys and values."""
        first = tile * self.cut.keys
        copies = [
            part
            for copy, start in ((self.key, self.key_at), (self.value, self.value_at))
            for part in copy.begin(self._batch, first, int64(0), self._half(copy, start, tile))
        ]
        return [*copies, end_copies().run()]

    def _tile(self, tile: Any) -> Any:
        """What is done with a tile of keys and values."""
        dtype, side = self.scores.left.dtype, self.query.side
        own = self._warp * (WARP_ROWS * side.words)
        multiply = multiply_chunks(dtype, 1, self.fragments, side.words)
        values = self.value.side.words
        add = weigh(dtype, self.cut.keys, self.columns, values)
        scores, shared = self.tile_scores, self.shared
        body = [await_copies(0).run(), barrier()]
        if self.tiles > 1:
            more = self.analyzer.simplify(tile < self.tiles - 1)
            body.append(tirx.IfThenElse(more, sequence(self._begin(tile + 1)), None))
        at = (self._half(self.key, self.key_at, tile), self._half(self.value, self.value_at, tile))
        return sequence(
            [
                *body,
                *_filled(scores, [0.0] * (self.fragments * 4)),
                multiply.run(scores, shared, own, at[0], self._lane),
                *self._finished_scores(tile),
                soften(self.fragments, self.columns).run(self.sums, scores, self.state),
                add.run(self.sums, scores, shared, at[1], self._lane),
            ]
        )

    def _places(self, fragments: int) -> list[tuple[int, Any, Any]]:
        """Number, row in the block and column of what a lane has of some fragments."""
        row, column = self._warp * WARP_ROWS + self._lane // 4, self._lane % 4 * 2
        return [
            (fragment * 4 + part, row + part // 2 * 8, fragment * 8 + column + part % 2)
            for fragment in range(fragments)
            for part in range(4)
        ]

    def _finished_scores(self, tile: Any) -> list[Any]:
        """What becomes of the sums that are scores; those beyond the last key have no weight."""
        _, rows, keys, _ = self.scores.shape
        found = []
        for number, row, column in self._places(self.fragments):
            place = (self._batch, self._row + row, tile * self.cut.keys + column)
            total = tirx.BufferLoad(self.tile_scores, [int64(number)])
            score, _ = self.scores.result(place, total)
            conditions = [] if keys % self.cut.keys == 0 else [place[2] < keys]
            conditions += [] if rows % self.cut.rows == 0 else [place[1] < rows]
            score = score if str(score.ty.dtype) == "float32" else score.astype("float32")
            if conditions:
                none = tirx.const(float("-inf"), "float32")
                score = tirx.if_then_else(tirx.all(*conditions), score, none)
            found.append(
                tirx.BufferStore(self.tile_scores, self.analyzer.simplify(score), [int64(number)])
            )
        return found

    def _results(self) -> list[Any]:
        """What becomes of the sums, two neighbors at a time."""
        _, rows, size, _ = self.outputs.shape
        places = self._places(self.columns)
        width = 2 if self.outputs.width() >= 2 else 1
        found = []
        for first in range(0, len(places), width):
            group = places[first : first + width]
            part = write_neighbors(self.analyzer, [self._result(place) for place in group])
            conditions = [] if size % (8 * self.columns) == 0 else [group[0][2] < size]
            conditions += [] if rows % self.cut.rows == 0 else [self._row + group[0][1] < rows]
            found.append(tirx.IfThenElse(tirx.all(*conditions), part, None) if conditions else part)
        return found

    def _result(self, place: tuple[int, Any, Any]) -> tuple[Any, Any, list[Any]]:
        number, row, column = place
        inverse = tirx.BufferLoad(self.state, [int64(2 + number % 4 // 2)])
        total = tirx.BufferLoad(self.sums, [int64(number)]) * inverse
        value, indices = self.outputs.result((self._batch, self._row + row, column), total)
        return self.outputs.store.buffer, value, indices


def _filled(buffer: Any, values: Sequence[float]) -> list[Any]:
    return [
        tirx.BufferStore(buffer, tirx.const(value, "float32"), [int64(index)])
        for index, value in enumerate(values)
    ]


def _buffer(size: int, dtype: str, name: str, scope: str) -> Any:
    return tirx.decl_buffer((size,), dtype, name, scope=scope)
