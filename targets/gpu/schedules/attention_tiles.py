"""Attention in one kernel in float32 on any GPU, written out as statements.

    score[b, m, t] = finish(sum over k of query(b, m, k) * key(b, t, k))
    out[b, m, n]   = finish(sum over t of exp(score[b, m, t]) * value(b, t, n) / sum of exp(...))

As :mod:`.attention_kernel`, but multiplied by threads, and scores go through shared memory. A block
of 16 x 16 threads has some queries and goes over the keys tile by tile. What is known of a query,
the largest score so far, the sum of weights, and what the last tile scales its sums by, is in
shared memory, too:

    store the queries
    each tile:  barrier;  store its keys and values;  barrier
                multiply queries and keys;  store the finished scores;  barrier
                a thread for each query:  scores to weights, and what is known of it;  barrier
                scale the sums;  multiply weights and values, and add
    divide the sums by the sums of weights, and finish them

All threads come by each barrier. Rows of queries, keys and scores lie one element further apart
than they are long, so that threads that read a column each use another bank. Weights take the place
of the keys: were they stored over the scores, TVM would ask for a barrier in between.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hybridc.targets.fitting import Misfit
from hybridc.targets.gpu.limits import Limits
from hybridc.targets.gpu.schedules.attention_functions import LOWEST
from hybridc.targets.gpu.schedules.factors import Element, Product
from hybridc.targets.gpu.schedules.fragment_kernel import barrier
from hybridc.targets.gpu.schedules.programs import launch
from hybridc.targets.llvm.schedules.statements import bind, int64, sequence, serial_loop
from tvm import sym, tirx
from tvm.ir import Range

SIDE = 16
"""Threads of a block along the queries, and along keys and columns."""

THREADS = SIDE * SIDE

TYPES = ("float32", "float16", "bfloat16")


@dataclass(frozen=True)
class Tile:
    """How attention is cut: queries of a block and keys of a tile, multiples of 16."""

    rows: int
    keys: int


TILES = (Tile(64, 64), Tile(64, 32), Tile(32, 32), Tile(16, 32), Tile(16, 16))
"""From the one with most to compute for each element that is moved to the one that is smallest."""

MOST_SUMS = 64
"""Most scores and sums that a thread has in registers."""


def shared_elements(scores: Product, outputs: Product, tile: Tile) -> int:
    """Elements of shared memory that the kernel takes."""
    depth, columns = scores.shape[3], outputs.shape[2]
    factors = tile.rows * (depth + 1) + _keys_or_weights(tile, depth) + tile.keys * columns
    return factors + tile.rows * (tile.keys + 1) + 3 * tile.rows


def _keys_or_weights(tile: Tile, depth: int) -> int:
    """Elements of the memory that holds a tile's keys first and then its weights."""
    return max(tile.keys * (depth + 1), tile.rows * (tile.keys + 1))


def choose_tile(scores: Product, outputs: Product, limits: Limits, blocks: int) -> Tile:
    """The first tile with room in shared memory and registers, that makes enough blocks.

    Args:
        scores: Queries times keys.
        outputs: Weights times values.
        limits: What a block of threads may use.
        blocks: Below so many blocks, those with fewer queries take less time.

    Raises:
        Misfit: Rows are too long, or blocks of threads too small.
    """
    batch, rows, _, _ = scores.shape
    fits = [
        tile
        for tile in TILES
        if 4 * shared_elements(scores, outputs, tile) <= limits.shared_bytes
        and _sums(tile, tile.keys) + _sums(tile, outputs.shape[2]) <= MOST_SUMS
    ]
    if not fits or limits.threads < THREADS:
        raise Misfit("heads that are too large")
    many = [tile for tile in fits if batch * -(-rows // tile.rows) >= blocks]
    return many[0] if many else min(fits, key=lambda tile: tile.rows)


def _sums(tile: Tile, columns: int) -> int:
    return tile.rows // SIDE * -(-columns // SIDE)


def write_attention_tiles(scores: Product, outputs: Product, tile: Tile) -> Any:
    """The kernel.

    Args:
        scores: Queries times keys, and what becomes of that.
        outputs: Weights times values, and what becomes of that. Its left factor is not read.
        tile: How it is cut.

    Raises:
        Misfit: Factors of another type.
    """
    if not {scores.left.dtype, scores.right.dtype, outputs.right.dtype} <= set(TYPES):
        raise Misfit("other types")
    return _Writer(scores, outputs, tile).kernel()


class _Writer:
    """Writes the kernel; its arguments are those of :func:`write_attention_tiles`."""

    def __init__(self, scores: Product, outputs: Product, tile: Tile) -> None:
        self.scores, self.outputs, self.tile = scores, outputs, tile
        self.depth, self.columns = scores.shape[3], outputs.shape[2]
        self.block, self.thread = tirx.Var("block", "int64"), tirx.Var("thread", "int64")
        self.analyzer = sym.Analyzer()
        self.analyzer.bind(self.thread, Range(int64(0), int64(THREADS)))
        self.down, self.along = tile.rows // SIDE, tile.keys // SIDE
        self.wide = -(-self.columns // SIDE)
        self.query = _buffer(tile.rows * (self.depth + 1), "queries", "shared")
        self.key = _buffer(_keys_or_weights(tile, self.depth), "keys", "shared")
        self.value = _buffer(tile.keys * self.columns, "values", "shared")
        self.score = _buffer(tile.rows * (tile.keys + 1), "scores", "shared")
        self.most, self.total, self.scale = (
            _buffer(tile.rows, name, "shared") for name in ("most", "total", "scale")
        )
        self.products = _buffer(self.down * self.along, "products", "local")
        self.sums = _buffer(self.down * self.wide, "sums", "local")

    @property
    def _groups(self) -> int:
        """Blocks of a batch."""
        return -(-self.scores.shape[1] // self.tile.rows)

    @property
    def _batch(self) -> Any:
        return self.block // self._groups

    @property
    def _first(self) -> Any:
        """First query of the block."""
        return self.block % self._groups * self.tile.rows

    def kernel(self) -> Any:
        """The kernel."""
        blocks = int64(self.scores.shape[0] * self._groups)
        self.analyzer.bind(self.block, Range(int64(0), blocks))
        tiles = -(-self.scores.shape[2] // self.tile.keys)
        buffers = (self.query, self.key, self.value, self.score)
        state = (self.most, self.total, self.scale, self.products, self.sums)
        body = [
            *map(tirx.AllocBuffer, (*buffers, *state)),
            *(_store(self.sums, index, _zero()) for index in range(self.down * self.wide)),
            *self._copy(self.query, self.scores.left, self.tile.rows, self._first, self.depth + 1),
            self._begin_state(),
            serial_loop(tiles, self._tile, "tile"),
            *self._results(),
        ]
        return launch(sequence(body), blocks, THREADS, self.block, self.thread)

    def _begin_state(self) -> Any:
        """Nothing is known of a query, one thread each."""
        stores = [
            _store(self.most, self.thread, tirx.const(LOWEST, "float32")),
            _store(self.total, self.thread, _zero()),
        ]
        return self._if_query(sequence(stores))

    def _if_query(self, body: Any) -> Any:
        return tirx.IfThenElse(self.thread < self.tile.rows, body, None)

    def _copy(self, target: Any, factor: Element, rows: int, first: Any, stride: int) -> list[Any]:
        """Store some rows of a factor, in float32; those that do not exist are 0.

        Neighboring threads load neighbors in memory.
        """
        _, extent, length = factor.extents
        down = factor.width(1) > factor.width(2)

        def step(number: Any) -> Any:
            place = number * THREADS + self.thread
            row, column = (
                (place % rows, place // rows) if down else (place // length, place % length)
            )
            value = factor.at(self._batch, first + row, column).astype("float32")
            value = tirx.if_then_else(first + row < extent, value, _zero())
            value, at = map(self.analyzer.simplify, (value, row * stride + column))
            store = _store(target, at, value)
            whole = rows * length % THREADS == 0
            return store if whole else tirx.IfThenElse(place < rows * length, store, None)

        return [serial_loop(-(-rows * length // THREADS), step, "step")]

    def _tile(self, tile: Any) -> Any:
        """What is done with a tile of keys and values."""
        first, right = tile * self.tile.keys, self.outputs.right
        (b, n, t), (batch, size, keys) = right.axes, right.extents
        values = Element((b, t, n), (batch, keys, size), right.value)
        return sequence(
            [
                barrier(),
                *self._copy(self.key, self.scores.right, self.tile.keys, first, self.depth + 1),
                *self._copy(self.value, values, self.tile.keys, first, self.columns),
                barrier(),
                *self._multiply_queries(),
                *self._finished_scores(first),
                barrier(),
                self._if_query(sequence(self._soften())),
                barrier(),
                *self._add_values(),
            ]
        )

    def _rows(self) -> list[Any]:
        """The thread's queries, in the block."""
        return [self.thread // SIDE + SIDE * i for i in range(self.down)]

    def _across(self, count: int) -> list[Any]:
        """The thread's keys or columns."""
        return [self.thread % SIDE + SIDE * j for j in range(count)]

    def _multiply_queries(self) -> list[Any]:
        count = self.down * self.along
        left = [(self.query, row * (self.depth + 1), 1) for row in self._rows()]
        right = [(self.key, key * (self.depth + 1), 1) for key in self._across(self.along)]
        clear = [_store(self.products, index, _zero()) for index in range(count)]
        return [*clear, _add_products(self.products, left, right, self.depth)]

    def _add_values(self) -> list[Any]:
        """Scale the sums, and add the tile's."""
        scales: list[Any] = []
        factors = [bind(_load(self.scale, row), scales) for row in self._rows()]
        scaled = [
            _store(self.sums, index, _load(self.sums, index) * factors[index // self.wide])
            for index in range(self.down * self.wide)
        ]
        left = [(self.key, row * (self.tile.keys + 1), 1) for row in self._rows()]
        last = self.columns - 1  # a column that does not exist reads the last one
        right = [
            (self.value, tirx.min(column, int64(last)), self.columns)
            for column in self._across(self.wide)
        ]
        return [*scales, *scaled, _add_products(self.sums, left, right, self.tile.keys)]

    def _finished_scores(self, first: Any) -> list[Any]:
        """Store what becomes of the products; keys that do not exist have no weight."""
        keys, found = self.scores.shape[2], []
        for index in range(self.down * self.along):
            row = self._rows()[index // self.along]
            key = self._across(self.along)[index % self.along]
            place = (self._batch, self._first + row, first + key)
            score, _ = self.scores.result(place, _load(self.products, index))
            score = score if str(score.ty.dtype) == "float32" else score.astype("float32")
            conditions = [place[2] < keys] if keys % self.tile.keys else []
            conditions += [place[1] < self.scores.shape[1]] if self._is_ragged() else []
            if conditions:
                none = tirx.const(float("-inf"), "float32")
                score = tirx.if_then_else(tirx.all(*conditions), score, none)
            at = row * (self.tile.keys + 1) + key
            found.append(_store(self.score, at, self.analyzer.simplify(score)))
        return found

    def _is_ragged(self) -> bool:
        """Whether the last block has queries that do not exist."""
        return bool(self.scores.shape[1] % self.tile.rows)

    def _soften(self) -> list[Any]:
        """Scores of a query to weights, relative to the largest one so far."""
        names = ("before", "weight", "tile_total")
        before, weight, total = (_buffer(1, name, "local") for name in names)
        row = self.thread * (self.tile.keys + 1)

        def widen(key: Any) -> Any:
            score = _load(self.score, row + key)
            return _store(self.most, self.thread, tirx.max(_load(self.most, self.thread), score))

        def weigh(key: Any) -> Any:
            difference = _load(self.score, row + key) - _load(self.most, self.thread)
            return sequence(
                [
                    _store(weight, 0, tirx.exp(difference)),
                    _store(self.key, row + key, _load(weight, 0)),
                    _store(total, 0, _load(total, 0) + _load(weight, 0)),
                ]
            )

        grown = _load(before, 0) - _load(self.most, self.thread)
        scale = _load(self.scale, self.thread)
        return [
            *map(tirx.AllocBuffer, (before, weight, total)),
            _store(before, 0, _load(self.most, self.thread)),
            serial_loop(self.tile.keys, widen, "key"),
            _store(total, 0, _zero()),
            serial_loop(self.tile.keys, weigh, "key"),
            _store(self.scale, self.thread, tirx.exp(grown)),
            _store(
                self.total, self.thread, _load(self.total, self.thread) * scale + _load(total, 0)
            ),
        ]

    def _results(self) -> list[Any]:
        """What becomes of the sums."""
        _, rows, size, _ = self.outputs.shape
        found = []
        for index in range(self.down * self.wide):
            row = self._rows()[index // self.wide]
            column = self._across(self.wide)[index % self.wide]
            sums = _load(self.sums, index) / _load(self.total, row)
            place = (self._batch, self._first + row, column)
            value, indices = self.outputs.result(place, sums)
            buffer = self.outputs.store.buffer
            store = tirx.BufferStore(buffer, value, list(map(self.analyzer.simplify, indices)))
            conditions = [column < size] if size % SIDE else []
            conditions += [place[1] < rows] if self._is_ragged() else []
            found.append(
                tirx.IfThenElse(tirx.all(*conditions), store, None) if conditions else store
            )
        return found


_Line = tuple[Any, Any, int]
"""A buffer, where a line of it begins, and how far its elements are apart."""


def _add_products(sums: Any, left: Sequence[_Line], right: Sequence[_Line], count: int) -> Any:
    """Add to sums[i, j] the products of left[i] and right[j], element by element."""

    def step(number: Any) -> Any:
        statements: list[Any] = []
        loads = [
            [
                bind(_load(buffer, start + number * stride), statements)
                for buffer, start, stride in lines
            ]
            for lines in (left, right)
        ]
        for i, one in enumerate(loads[0]):
            for j, other in enumerate(loads[1]):
                index = i * len(right) + j
                statements.append(_store(sums, index, _load(sums, index) + one * other))
        return sequence(statements)

    return serial_loop(count, step, "summand")


def _buffer(size: int, name: str, scope: str) -> Any:
    return tirx.decl_buffer((size,), "float32", name, scope=scope)


def _load(buffer: Any, index: Any) -> Any:
    return tirx.BufferLoad(buffer, [int64(index) if isinstance(index, int) else index])


def _store(buffer: Any, index: Any, value: Any) -> Any:
    return tirx.BufferStore(buffer, value, [int64(index) if isinstance(index, int) else index])


def _zero() -> Any:
    return tirx.const(0.0, "float32")
