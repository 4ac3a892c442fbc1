"""Kernels for products on tensor cores, written out as statements.

    sum[b, m, n] = sum over k of left(b, m, k) * right(b, n, k)

A block of threads computes one tile of the sums, step by step along k. A step's factors lie in
shared memory, which has room for some steps: while one is multiplied, others are on their way.
Where the factors are copied through registers, there is room for two:

    fetch step 0;  store it in half 0;  barrier
    each step:     fetch the next;  multiply this one;  store the next in the other half;  barrier

Where they get there by themselves, as :mod:`.fragment_copies` tells, there is room for more:

    begin to copy steps 0 to s - 2
    each step:     await it;  barrier;  begin to copy step s - 1 from here;  multiply this one

Where there are few tiles and k is long, k is cut into slices; a second kernel adds up the slices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hybridc.targets.gpu.schedules.factors import Product
from hybridc.targets.gpu.schedules.fragment_choice import WARP_COLUMNS, Cut
from hybridc.targets.gpu.schedules.fragment_copies import Copy
from hybridc.targets.gpu.schedules.fragment_functions import (
    await_copies,
    end_copies,
    multiply,
    multiply_chunks,
    write_words,
)
from hybridc.targets.gpu.schedules.fragment_moves import (
    Move,
    Side,
    registers_for,
)
from hybridc.targets.gpu.schedules.programs import launch
from hybridc.targets.llvm.schedules.statements import int64, sequence, serial_loop
from tvm import DataType, sym, tirx
from tvm.ir import Range

LANES = 32

INTEGERS = ("int8", "uint8")
"""Types of factors whose sums are int32."""

TOTAL_THREADS = 128
"""Threads of a block that adds up slices."""

NEIGHBORS = 8
"""Results of a row that a lane has side by side."""

Finish = Callable[[Sequence[Any], Any], tuple[Any, Any, list[Any]]]
"""From the place of a sum and the sum to a buffer, a value and its indices."""


def write_kernels(product: Product, cut: Cut) -> tuple[list[Any], list[Any]]:
    """The kernels of a product, and the buffers between them.

    Args:
        product: What is computed.
        cut: How it is cut.
    """

    def finish(place: Sequence[Any], total: Any) -> tuple[Any, Any, list[Any]]:
        value, indices = product.result(place, total)
        return product.store.buffer, value, indices

    writer = _Writer.of(product, cut)
    batch, rows, columns, _ = product.shape
    if cut.slices == 1:
        return [writer.kernel(finish, product.width())], []
    dtype = str(product.sums.dtype)
    partial = tirx.decl_buffer((cut.slices, batch, rows, columns), dtype, "slices")

    def keep(place: Sequence[Any], total: Any) -> tuple[Any, Any, list[Any]]:
        return partial, total, [writer.slice, *place]

    width = min(columns & -columns, 4)
    return [writer.kernel(keep, width), _total(product, cut.slices, partial, finish)], [partial]


@dataclass(frozen=True)
class _Writer:
    """Writes the kernel that multiplies.

    Attributes:
        product: What is computed.
        cut: How it is cut.
        steps: Steps of a slice.
        sides: The tiles of both factors.
        moves: How they get to shared memory through registers, if they do.
        copies: How they get there by themselves, if they do.
        shared: That memory, room for some steps.
        sums: A thread's sums: by fragment of rows, fragment of columns, and as the instruction
            has them.
        analyzer: Knows how far the variables go.
        block: Number of the block.
        thread: Number of the thread in it.
    """

    product: Product
    cut: Cut
    steps: int
    sides: tuple[Side, Side]
    moves: tuple[Move, ...]
    copies: tuple[Copy, ...]
    shared: Any
    sums: Any
    analyzer: sym.Analyzer
    block: Any
    thread: Any

    @classmethod
    def of(cls, product: Product, cut: Cut) -> _Writer:
        """A writer with all buffers declared."""
        sides = (
            Side(product.left, cut.rows, cut.words, is_right=False),
            Side(product.right, cut.columns, cut.words, is_right=True),
        )
        depth = product.shape[3]
        step = cut.words * sides[0].packed
        steps = -(-depth // (step * cut.slices))
        words = cut.stages * sum(_size(side, cut) for side in sides)
        shared = _buffer(words, "uint32", "tiles", "shared.dyn" if cut.copied else "shared")
        block, thread = tirx.Var("block", "int64"), tirx.Var("thread", "int64")
        analyzer = sym.Analyzer()
        analyzer.bind(thread, Range(int64(0), int64(cut.threads)))
        within = steps * step * cut.slices == depth

        def move(side: Side) -> Move:
            registers = _buffer(registers_for(side, cut.threads), "uint32", "next", "local")
            return Move(side, cut.threads, thread, registers, shared, analyzer, within)

        def copy(side: Side) -> Copy:
            return Copy(side, cut.threads, thread, shared, analyzer, within)

        moves = () if cut.copied else tuple(map(move, sides))
        copies = tuple(map(copy, sides)) if cut.copied else ()
        count = cut.warp_rows * cut.warp_columns // LANES
        sums = _buffer(count, str(product.sums.dtype), "sums", "local")
        return cls(product, cut, steps, sides, moves, copies, shared, sums, analyzer, block, thread)

    @property
    def _tiles(self) -> tuple[int, int]:
        _, rows, columns, _ = self.product.shape
        return -(-rows // self.cut.rows), -(-columns // self.cut.columns)

    @property
    def slice(self) -> Any:
        """Number of the block's slice."""
        down, across = self._tiles
        return self.block // (across * down * self.product.shape[0])

    @property
    def _batch(self) -> Any:
        down, across = self._tiles
        return self.block // (across * down) % self.product.shape[0]

    @property
    def _corner(self) -> tuple[Any, Any]:
        """First row and column of the block's tile."""
        down, across = self._tiles
        return self.block // across % down * self.cut.rows, self.block % across * self.cut.columns

    @property
    def _sizes(self) -> tuple[int, int]:
        """Words of shared memory that a step's factors take."""
        left, right = self.sides
        return _size(left, self.cut), _size(right, self.cut)

    def kernel(self, finish: Finish, width: int) -> Any:
        """The kernel.

        Args:
            finish: What is done with a sum.
            width: How many results of a row are written at once.
        """
        down, across = self._tiles
        blocks = self.cut.slices * self.product.shape[0] * down * across
        self.analyzer.bind(self.block, Range(int64(0), int64(blocks)))
        zero, count = tirx.const(0, str(self.sums.dtype)), int(self.sums.shape[0])
        registers = [move.registers for move in self.moves]
        body = [tirx.AllocBuffer(buffer) for buffer in (self.shared, self.sums, *registers)]
        body += [tirx.BufferStore(self.sums, zero, [int64(i)]) for i in range(count)]
        body += self._copied_steps() if self.cut.copied else self._moved_steps()
        body += self._results(finish, width)
        return launch(sequence(body), int64(blocks), self.cut.threads, self.block, self.thread)

    def _moved_steps(self) -> list[Any]:
        """All steps, where factors are copied through registers."""
        first = [*self._fetch(int64(0)), *self._store(int64(0)), barrier()]
        return [*first, serial_loop(self.steps, self._moved_step, "step")]

    def _moved_step(self, step: Any) -> Any:
        multiplied = self._multiply(step % 2)
        if self.steps == 1:
            return multiplied
        more = step < self.steps - 1
        fetch = tirx.IfThenElse(more, sequence(self._fetch(step + 1)), None)
        store = tirx.IfThenElse(more, sequence(self._store((step + 1) % 2)), None)
        return sequence([fetch, multiplied, store, barrier()])

    def _copied_steps(self) -> list[Any]:
        """All steps, where factors get to shared memory by themselves."""
        ahead = self.cut.stages - 1
        first = [part for step in range(ahead) for part in self._begin(int64(step))]
        return [*first, serial_loop(self.steps, self._copied_step, "step")]

    def _copied_step(self, step: Any) -> Any:
        """A step; at the barrier all threads are through with the step before it."""
        ahead = self.cut.stages - 1
        begun = self._begin(self.analyzer.simplify(step + ahead))
        awaited = [await_copies(ahead - 1).run(), barrier()]
        return sequence([*awaited, *begun, self._multiply(step % self.cut.stages)])

    def _begin(self, step: Any) -> list[Any]:
        """Begin to copy a step's factors, if there is such a step."""
        depth = (self.slice * self.steps + step) * (self.cut.words * self.sides[0].packed)
        start = step % self.cut.stages * sum(self._sizes)
        starts = (start, start + self._sizes[0])
        copies = [
            part
            for copy, row, place in zip(self.copies, self._corner, starts, strict=True)
            for part in copy.begin(self._batch, row, depth, place)
        ]
        when = self.analyzer.simplify(step < self.steps)
        return [tirx.IfThenElse(when, sequence(copies), None), end_copies().run()]

    def _fetch(self, step: Any) -> list[Any]:
        """Bring a step's factors into registers."""
        depth = (self.slice * self.steps + step) * (self.cut.words * self.sides[0].packed)
        origins = zip(self.moves, self._corner, strict=True)
        return [part for move, row in origins for part in move.fetch(self._batch, row, depth)]

    def _store(self, half: Any) -> list[Any]:
        """Move what was fetched to shared memory."""
        left, right = self.moves
        start = half * sum(self._sizes)
        return [*left.store(start), *right.store(start + left.side.size)]

    @property
    def _warp(self) -> tuple[Any, Any]:
        """First row and column of the warp in its tile."""
        warp, across = self.thread // LANES, self.cut.columns // self.cut.warp_columns
        return warp // across * self.cut.warp_rows, warp % across * self.cut.warp_columns

    def _multiply(self, slot: Any) -> Any:
        cut = self.cut
        strides = [(cut.words, 1) if cut.copied else side.strides for side in self.sides]
        starts = (slot * sum(self._sizes), slot * sum(self._sizes) + self._sizes[0])
        places = [
            self.analyzer.simplify(start + place * stride[0])
            for start, place, stride in zip(starts, self._warp, strides, strict=True)
        ]
        dtype, rows = self.product.left.dtype, cut.warp_rows // 16
        if cut.copied:
            dtype += f"_{self.product.right.dtype}" if dtype in INTEGERS else ""
            function = multiply_chunks(dtype, rows, cut.warp_columns // 8, cut.words)
        else:
            function = multiply(dtype, rows, cut.words, *strides)
        return function.run(self.sums, self.shared, *places, self.thread % LANES)

    def _results(self, finish: Finish, width: int) -> list[Any]:
        """What is done with a thread's sums, row by row."""
        lane = self.thread % LANES
        (row, column), (down, across) = self._corner, self._warp
        row, column = row + down + lane // 4, column + across + lane % 4 * NEIGHBORS
        return [
            self._row(
                finish,
                width,
                (fragment, part, group),
                row + fragment * 16 + part * 8,
                column + group * WARP_COLUMNS,
            )
            for fragment in range(self.cut.warp_rows // 16)
            for part in range(2)
            for group in range(self.cut.warp_columns // WARP_COLUMNS)
        ]

    def _row(
        self, finish: Finish, width: int, place: tuple[int, int, int], row: Any, column: Any
    ) -> Any:
        """Results of one row.

        Args:
            finish: What is done with a sum.
            width: How many are written at once.
            place: Their fragment, which half of that, and which 32 columns of the warp.
            row: Their row.
            column: The first one's column.
        """
        _, rows, columns, _ = self.product.shape
        parts = []
        for start in range(0, NEIGHBORS, width):
            stores = [
                finish((self._batch, row, column + index), self._sum(place, index))
                for index in range(start, start + width)
            ]
            part = write_neighbors(self.analyzer, stores)
            if columns % self.cut.columns:
                part = tirx.IfThenElse(column + start < columns, part, None)
            parts.append(part)
        body = sequence(parts)
        return tirx.IfThenElse(row < rows, body, None) if rows % self.cut.rows else body

    def _sum(self, place: tuple[int, int, int], index: int) -> Any:
        fragment, part, group = place
        first = fragment * self.cut.warp_columns // 8 + group * 4
        number = (first + index // 2) * 4 + part * 2 + index % 2
        return tirx.BufferLoad(self.sums, [int64(number)])


def write_neighbors(analyzer: sym.Analyzer, stores: Sequence[tuple[Any, Any, list[Any]]]) -> Any:
    """Write results that are neighbors in memory, all at once if they fill words.

    Args:
        analyzer: Knows how far the variables go.
        stores: Buffer, value and indices of each, as a ``Finish`` gives them.
    """
    buffer = stores[0][0]
    places = [list(map(analyzer.simplify, indices)) for _, _, indices in stores]
    words, rest = divmod(len(stores) * int(DataType(str(buffer.dtype)).bits), 32)
    if len(stores) == 1 or rest:
        pairs = zip(stores, places, strict=True)
        return sequence([tirx.BufferStore(buffer, store[1], place) for store, place in pairs])
    local = _buffer(len(stores), str(buffer.dtype), "results", "local")
    values = [
        tirx.BufferStore(local, value, [int64(index)]) for index, (_, value, _) in enumerate(stores)
    ]
    target = tirx.address_of(tirx.BufferLoad(buffer, places[0]))
    return sequence([tirx.AllocBuffer(local), *values, write_words(words).run(target, local)])


def _total(product: Product, slices: int, partial: Any, finish: Finish) -> Any:
    """The kernel that adds up slices, and does what follows the product."""
    batch, rows, columns, _ = product.shape
    count = batch * rows * columns
    block, thread = tirx.Var("block", "int64"), tirx.Var("thread", "int64")
    number = block * TOTAL_THREADS + thread
    place = [number // (rows * columns), number // columns % rows, number % columns]
    dtype = str(product.sums.dtype)
    total, at = _buffer(1, dtype, "total", "local"), [int64(0)]
    before = tirx.BufferLoad(total, at)

    def add(piece: Any) -> Any:
        return tirx.BufferStore(total, before + tirx.BufferLoad(partial, [piece, *place]), at)

    buffer, value, indices = finish(place, before)
    body = [
        tirx.AllocBuffer(total),
        tirx.BufferStore(total, tirx.const(0, dtype), at),
        serial_loop(slices, add, "slice"),
        tirx.BufferStore(buffer, value, indices),
    ]
    inside = sequence(body)
    if count % TOTAL_THREADS:
        inside = tirx.IfThenElse(number < count, inside, None)
    return launch(inside, int64(-(-count // TOTAL_THREADS)), TOTAL_THREADS, block, thread)


def _size(side: Side, cut: Cut) -> int:
    """Words of shared memory that a factor takes in a step."""
    return side.rows * cut.words if cut.copied else side.size


def _buffer(size: int, dtype: str, name: str, scope: str) -> Any:
    return tirx.decl_buffer((size,), dtype, name, scope=scope)


def barrier() -> Any:
    """A barrier of the threads of a block."""
    return tirx.Evaluate(tirx.op.call_intrin("int32", "tirx.tvm_storage_sync", "shared"))
