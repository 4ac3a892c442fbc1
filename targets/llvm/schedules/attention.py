"""Attention in one kernel, with a softmax that needs no more than a block of scores at a time.

A task has one head's queries of one block. It takes the keys chunk by chunk, and what it keeps in
between stays in its core's cache:

    queries' [depth, query]     turned around once
    scores  [key, query]  =  keys of the chunk * queries'      scale, mask; largest score so far
    scores  =  exp(scores - largest)                           sum of weights so far
    sums    [query, column]  =  sums * exp(largest before - largest)  +  scores' * values
    result  =  sums / sum of weights

Queries lie side by side in the vectors of scores, so that maxima and sums of vectors are those of
their queries, and keys and values are read as they lie. Both products are those of pointwise
convolutions and are written by the emitter of these. With a single chunk, nothing is summed twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import tvm
import tvm_ffi
from hybridc.targets.fitting import Misfit
from hybridc.targets.llvm.cpu import Cpu
from hybridc.targets.llvm.schedules.attention_blocks import (
    ATTENTION,
    BLOCKS,
    MASKED,
    SCORES,
    Plan,
    Sizes,
    plan_attention,
    sizes_and_order,
)
from hybridc.targets.llvm.schedules.blocks import axes_of, blocks_of, store_of
from hybridc.targets.llvm.schedules.emitter import Emitter
from hybridc.targets.llvm.schedules.finishing import Finish, finish_of
from hybridc.targets.llvm.schedules.loops import PARALLEL_WORK
from hybridc.targets.llvm.schedules.statements import bind, int64, sequence, serial_loop
from hybridc.targets.llvm.schedules.tails import substitute
from hybridc.targets.llvm.schedules.vector_math import exp_of_nonpositive
from hybridc.targets.llvm.schedules.written import annotated_anchor, schedule_around
from tvm import tirx
from tvm.s_tir import Schedule

DTYPE = "float32"

At = Callable[[Sequence[Any]], list[Any]]
"""From the place among a product's axes to the indices of one of its factors."""


def schedule_attention(schedule: Schedule, cpu: Cpu) -> Schedule:
    """Schedule a function around attention.

    Raises:
        Misfit: The function is not of this kind.
    """
    anchor, numbers = annotated_anchor(schedule, ATTENTION)
    sizes, order = sizes_and_order(numbers)
    blocks = {str(block.name_hint): block for block in map(schedule.get, blocks_of(schedule))}
    if not {*BLOCKS} <= set(blocks):
        raise Misfit("parts of attention are missing")
    keys, queries = _factors(blocks[SCORES])
    values, _ = _factors(anchor)

    def at_value(place: Sequence[Any]) -> list[Any]:
        batch, head, column, key = place
        own = [batch, head, int64(0), column]
        return values.at([*(own[axis] for axis in order), key])

    plan = plan_attention(sizes, cpu)

    def nest(final: Any | None) -> Any:
        def place(indices: Sequence[Any], lane: Any) -> Sequence[Any]:
            *front, column = indices
            at = [*front, column + lane]
            return [at[axis] for axis in order]

        finish = finish_of(store_of(anchor), final, place)
        return _Writer(
            sizes, plan, queries, keys, _Factor(values.buffer, at_value), blocks, finish
        ).nest()

    return schedule_around(schedule, cpu, anchor, nest, BLOCKS)


@dataclass(frozen=True)
class _Factor:
    """One factor of a product: what it reads, and where for a place among the product's axes."""

    buffer: Any
    at: At


def _factors(block: Any) -> tuple[_Factor, _Factor]:
    """The second and the first factor of the product that a block sums."""
    store: Any = store_of(block)
    product = store.value.b
    axes = axes_of(block)

    def factor(load: Any) -> _Factor:
        def at(place: Sequence[Any]) -> list[Any]:
            mapping = dict(zip(axes, place, strict=True))
            return [substitute(index, mapping) for index in load.indices]

        return _Factor(load.source, at)

    return factor(product.b), factor(product.a)


@dataclass(frozen=True)
class _Product(Emitter):
    """Multiplies scalars that lie anywhere by vectors that lie anywhere."""

    scalar: At
    vector: At

    def place(self, first: Any, second: Any, row: Any, column: Any, *rest: Any) -> list[Any]:
        """Indices of the scalar of row ``column`` and step ``second``."""
        return self.scalar([column, second])

    def factor(self, at: Sequence[Any], vector: int) -> Any:
        """The vector of a step: number ``vector`` of the panel."""
        g, (panel, *_, step) = self.geometry, at
        start = (panel * g.vectors + vector) * g.lanes
        return tirx.BufferLoad(self.weight, self.vector([step, self._lanes(start)]))


@dataclass(frozen=True)
class _Chunk:
    """Keys ``start`` to ``start + count``."""

    start: Any
    count: int


@dataclass(frozen=True)
class _Task:
    """The queries of one block."""

    batch: Any
    head: Any
    first: Any


@dataclass(frozen=True)
class _Writer:
    """Writes the statements of attention."""

    sizes: Sizes
    plan: Plan
    queries: _Factor
    keys: _Factor
    values: _Factor
    blocks: dict[str, Any]
    finish: Finish

    @cached_property
    def turned(self) -> Any:
        """The block's queries, turned around."""
        return self._buffer("queries", self.sizes.depth, self.plan.rows)

    @cached_property
    def scores(self) -> Any:
        """The scores of a chunk, then their exponentials."""
        return self._buffer("scores", self.plan.keys, self.plan.rows)

    @cached_property
    def largest(self) -> Any:
        """The largest score of each query so far."""
        return self._buffer("largest", self.plan.rows)

    @cached_property
    def before(self) -> Any:
        """The same before the chunk; then the factor by which sums shrink."""
        return self._buffer("before", self.plan.rows)

    @cached_property
    def totals(self) -> Any:
        """The sum of each query's weights, at last its reciprocal."""
        return self._buffer("totals", self.plan.rows)

    @cached_property
    def sums(self) -> Any:
        """The sums of weighted values, if there are several chunks."""
        return self._buffer("sums", self.plan.rows, self.sizes.columns)

    def nest(self) -> Any:
        """The loop over tasks."""
        s = self.sizes
        blocks = -(-s.queries // self.plan.rows)
        number = tirx.Var("task", "int64")
        statements: list[Any] = []
        head = bind(tirx.floordiv(number, int64(blocks)), statements)
        first = bind(tirx.floormod(number, int64(blocks)) * self.plan.rows, statements)
        batch = bind(tirx.floordiv(head, int64(s.heads)), statements)
        head = bind(tirx.floormod(head, int64(s.heads)), statements)
        statements.append(self._task(_Task(batch, head, first)))
        kind = tirx.ForKind.PARALLEL if s.work >= PARALLEL_WORK else tirx.ForKind.SERIAL
        count = int64(s.batch * s.heads * blocks)
        return tirx.For(number, int64(0), count, kind, sequence(statements))

    def _task(self, task: _Task) -> Any:
        """All queries of one block."""
        kept = [self.turned, self.scores, self.largest, self.totals]
        kept += [] if self.plan.is_single else [self.before, self.sums]
        whole, rest = divmod(self.sizes.keys, self.plan.keys)
        statements = [*map(tirx.AllocBuffer, kept), self._turn(task), self._begin()]
        if whole:
            count = self.plan.keys
            statements.append(
                serial_loop(whole, lambda i: self._chunk(task, _Chunk(i * count, count)), "chunk")
            )
        if rest:
            statements.append(self._chunk(task, _Chunk(int64(whole * self.plan.keys), rest)))
        if not self.plan.is_single:
            statements += [self._groups(self._invert), self._divide(task)]
        return sequence(statements)

    def _turn(self, task: _Task) -> Any:
        """Turn the block's queries around; those behind the last one repeat it."""

        def step(depth: Any, start: Any, lane: Any) -> Any:
            query = self._query(task, start + lane)
            source = self.queries.at([task.batch, task.head, query, int64(0), depth])
            load = tirx.BufferLoad(self.queries.buffer, source)
            return tirx.BufferStore(self.turned, load, [depth, start + lane])

        def group(start: Any) -> Any:
            return serial_loop(
                self.sizes.depth,
                lambda depth: self._vector(lambda lane: step(depth, start, lane)),
                "depth",
            )

        return self._groups(group)

    def _query(self, task: _Task, row: Any) -> Any:
        """Number of the query in a row of the block."""
        query = task.first + row
        if self.sizes.queries % self.plan.rows:
            return tirx.min(query, int64(self.sizes.queries - 1))
        return query

    def _begin(self) -> Any:
        """No score so far."""

        def group(start: Any) -> Any:
            lowest, zero = tirx.min_value(DTYPE), tirx.const(0, DTYPE)
            return sequence(
                [
                    self._put(self.largest, [start], tirx.Broadcast(lowest, self.plan.lanes)),
                    self._put(self.totals, [start], tirx.Broadcast(zero, self.plan.lanes)),
                ]
            )

        return sequence([self._groups(group), *[self._clear()] * (not self.plan.is_single)])

    def _clear(self) -> Any:
        """No sums so far."""
        zero = tirx.Broadcast(tirx.const(0, DTYPE), self.plan.value_lanes)

        def clear(row: Any, column: Any) -> Any:
            return tirx.BufferStore(self.sums, zero, [row, self._columns(column)])

        return self._rows(clear)

    def _rows(self, body: Callable[[Any, Any], Any]) -> Any:
        """A loop over the rows of the sums and the vectors of each."""
        lanes = self.plan.value_lanes

        def row(number: Any) -> Any:
            vectors = self.sizes.columns // lanes
            return serial_loop(vectors, lambda v: body(number, v * lanes), "vector")

        return serial_loop(self.plan.rows, row, "row")

    def _chunk(self, task: _Task, chunk: _Chunk) -> Any:
        """Scores, weights and weighted values of one chunk."""
        statements: list[Any] = []
        if not self.plan.is_single:

            def keep(start: Any) -> Any:
                return self._put(self.before, [start], self._load(self.largest, [start]))

            statements.append(self._groups(keep))
        statements.append(self._multiply_keys(task, chunk))
        statements.append(self._groups(lambda start: self._soften(chunk, start)))
        if self.plan.is_single:
            statements.append(self._groups(self._invert))
        statements.append(self._multiply_values(task, chunk))
        return sequence(statements)

    def _multiply_keys(self, task: _Task, chunk: _Chunk) -> Any:
        """The chunk's scores, and the largest of each query."""
        product = self.plan.score_product(chunk.count)
        scores: Any = store_of(self.blocks[SCORES])

        def score(key: Any, query: Any, accumulator: Any) -> Any:
            place = [task.batch, task.head, query, chunk.start + key]
            return _evaluated(self.blocks[MASKED], place, scores.buffer, accumulator)

        def store(indices: Sequence[Any], accumulator: Any, lanes: int) -> Any:
            start, key = indices[1] * lanes, indices[-1]

            def element(lane: Any) -> Any:
                value = tirx.BufferLoad(accumulator, [lane])
                value = score(key, self._query(task, start + lane), value)
                return tirx.BufferStore(self.scores, value, [key, start + lane])

            most = tirx.max(
                self._load(self.largest, [start]), self._load(self.scores, [key, start])
            )
            return sequence([self._vector(element), self._put(self.largest, [start], most)])

        def scalar(place: Sequence[Any]) -> list[Any]:
            key, depth = place
            return self.keys.at([task.batch, task.head, int64(0), chunk.start + key, depth])

        emitter = _Product(
            *product, self.keys.buffer, self.turned, store, DTYPE, scalar=scalar, vector=list
        )
        return self._panels(emitter)

    def _panels(self, emitter: _Product) -> Any:
        def panel(number: Any) -> Any:
            return emitter.task(int64(0), number, int64(0))

        return serial_loop(emitter.geometry.panels, panel, "panel")

    def _soften(self, chunk: _Chunk, start: Any) -> Any:
        """The exponentials of a vector of queries' scores in place of these, and their sum."""
        total = tirx.decl_buffer((self.plan.lanes,), DTYPE, "total")

        def weight(key: Any, lane: Any) -> Any:
            score = tirx.BufferLoad(self.scores, [key, start + lane])
            most = tirx.BufferLoad(self.largest, [start + lane])
            return tirx.BufferStore(
                self.scores, exp_of_nonpositive(score - most), [key, start + lane]
            )

        def step(key: Any) -> Any:
            added = self._load(total, [int64(0)]) + self._load(self.scores, [key, start])
            body = self._vector(lambda lane: weight(key, lane))
            return sequence([body, self._put(total, [int64(0)], added)])

        statements = [tirx.AllocBuffer(total)]
        if self.plan.is_single:
            zero = tirx.Broadcast(tirx.const(0, DTYPE), self.plan.lanes)
            statements.append(self._put(total, [int64(0)], zero))
        else:
            statements += [
                self._vector(lambda lane: self._shrink(start + lane)),
                self._put(
                    total,
                    [int64(0)],
                    self._load(self.totals, [start]) * self._load(self.before, [start]),
                ),
            ]
        statements.append(serial_loop(chunk.count, step, "key"))
        statements.append(self._put(self.totals, [start], self._load(total, [int64(0)])))
        return sequence(statements)

    def _shrink(self, row: Any) -> Any:
        """The factor by which a query's sums shrink since its largest score grew."""
        before, most = (tirx.BufferLoad(buffer, [row]) for buffer in (self.before, self.largest))
        return tirx.BufferStore(self.before, exp_of_nonpositive(before - most), [row])

    def _invert(self, start: Any) -> Any:
        one = tirx.Broadcast(tirx.const(1, DTYPE), self.plan.lanes)
        return self._put(self.totals, [start], one / self._load(self.totals, [start]))

    def _multiply_values(self, task: _Task, chunk: _Chunk) -> Any:
        """The chunk's weighted values: results, or a part of the sums."""
        product = self.plan.value_product(chunk.count)

        def store(indices: Sequence[Any], accumulator: Any, lanes: int) -> Any:
            row, column = indices[-1], indices[1] * lanes
            if self.plan.is_single:
                return self._finish(task, row, column, accumulator)
            at = [row, self._columns(column)]
            factor = tirx.Broadcast(tirx.BufferLoad(self.before, [row]), lanes)
            added = tirx.BufferLoad(accumulator, [self._columns(int64(0))])
            value = tirx.BufferLoad(self.sums, at) * factor + added
            return tirx.BufferStore(self.sums, value, at)

        def vector(place: Sequence[Any]) -> list[Any]:
            key, columns = place
            return self.values.at([task.batch, task.head, columns, chunk.start + key])

        emitter = _Product(
            *product,
            self.scores,
            self.values.buffer,
            store,
            DTYPE,
            scalar=lambda place: [place[1], place[0]],
            vector=vector,
        )
        return self._panels(emitter)

    def _divide(self, task: _Task) -> Any:
        """Results from the sums over all chunks."""

        def vector(row: Any, column: Any) -> Any:
            lanes = self.plan.value_lanes
            sums = tirx.decl_buffer((lanes,), DTYPE, "sum")
            load = tirx.BufferLoad(self.sums, [row, self._columns(column)])
            copy = tirx.BufferStore(sums, load, [self._columns(int64(0))])
            return sequence([tirx.AllocBuffer(sums), copy, self._finish(task, row, column, sums)])

        return self._rows(vector)

    def _finish(self, task: _Task, row: Any, column: Any, sums: Any) -> Any:
        """Divide a vector of sums and store it, if its query exists."""
        lanes = self.plan.value_lanes
        whole = [self._columns(int64(0))]
        factor = tirx.Broadcast(tirx.BufferLoad(self.totals, [row]), lanes)
        divided = tirx.BufferStore(sums, tirx.BufferLoad(sums, whole) * factor, whole)
        query = task.first + row
        place = [task.batch, task.head, query, column]
        body = sequence([divided, self.finish(place, sums, lanes)])
        if self.sizes.queries % self.plan.rows:
            return tirx.IfThenElse(query < self.sizes.queries, body, None)
        return body

    def _groups(self, body: Callable[[Any], Any]) -> Any:
        """A loop over the vectors of a block's queries, by the first one's row."""
        lanes = self.plan.lanes
        return serial_loop(self.plan.rows // lanes, lambda group: body(group * lanes), "group")

    def _vector(self, body: Callable[[Any], Any]) -> Any:
        lane = tirx.Var("lane", "int64")
        count = int64(self.plan.lanes)
        return tirx.For(lane, int64(0), count, tirx.ForKind.VECTORIZED, body(lane))

    def _load(self, buffer: Any, place: Sequence[Any]) -> Any:
        """A vector of queries from a place on."""
        return tirx.BufferLoad(buffer, _along(place, self.plan.lanes))

    def _put(self, buffer: Any, place: Sequence[Any], value: Any) -> Any:
        return tirx.BufferStore(buffer, value, _along(place, self.plan.lanes))

    def _columns(self, start: Any) -> Any:
        return tirx.Ramp(start, int64(1), self.plan.value_lanes)

    def _buffer(self, name: str, *shape: int) -> Any:
        return tirx.decl_buffer(tuple(map(int64, shape)), DTYPE, name)


def _evaluated(block: Any, place: Sequence[Any], buffer: Any, accumulator: Any) -> Any:
    """What a block stores at a place, with a value for what it reads of one buffer there."""

    def replace(load: Any) -> Any:
        return accumulator if load.source.same_as(buffer) else load

    store: Any = store_of(block)
    value = tvm_ffi.structural_map(store.value, [(tvm.ir.TensorLoad, replace)])
    return substitute(value, dict(zip(axes_of(block), place, strict=True)))


def _along(place: Sequence[Any], lanes: int) -> list[Any]:
    return [*place[:-1], tirx.Ramp(place[-1], int64(1), lanes)]
