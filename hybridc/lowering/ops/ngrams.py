"""TfIdfVectorizer over integers: how often each n-gram of a pool occurs in a row.

The n-grams of one length are a table whose rows are sorted while compiling. A program goes over
the places of each row of the input and looks every n-gram up by bisection. The elements of an
n-gram stand next to each other, or up to a number of elements skipped apart; single elements are
counted once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from tvm import tirx

from hybridc.lowering.call import Call, Operator, Unsupported
from hybridc.lowering.ops.common import Own, derived_constant
from hybridc.lowering.ops.loops import Array, count, emit_program, local, when
from hybridc.lowering.value import Constant, Expression


@dataclass(frozen=True)
class _Pool:
    """The n-grams of one length.

    Attributes:
        grams: Sorted rows of int64, of shape (number, length).
        columns: The column of the result that each one is counted in.
    """

    grams: np.ndarray[Any, Any]
    columns: np.ndarray[Any, Any]


def tf_idf_vectorizer(call: Call) -> Expression:
    """Counts of n-grams per row, as they are, cut off at one, or weighted; float32."""
    if call.attribute("pool_strings"):
        raise Unsupported("TfIdfVectorizer of strings")
    mode, skips = str(call.attribute("mode")), int(call.attribute("max_skip_count"))
    if mode not in ("TF", "IDF", "TFIDF"):
        raise Unsupported(f"TfIdfVectorizer with mode {mode!r}")
    if not 1 <= call.rank(0) <= 2:
        raise Unsupported(f"TfIdfVectorizer of rank {call.rank(0)}")
    columns = [int(column) for column in call.attribute("ngram_indexes")]
    width = max(columns) + 1
    weights = _column_weights(call, mode, columns, width)
    pools = _pools(call, columns)
    constants = [weights, *(c for i, pool in enumerate(pools) for c in _tables(call, i, pool))]
    *rows, length = call.shape(0)
    lengths = [pool.grams.shape[1] for pool in pools]

    def program(own: Own, data: Array, weights: Array, *arrays: Array) -> None:
        *tables, result = arrays
        with count(own(rows[0]) if rows else 1, parallel=True) as row:
            place: tuple[Any, ...] = (row,) if rows else ()
            with count(width) as column:
                result[_at(place, column)] = 0.0
            for i, size in enumerate(lengths):
                for step in range(1, 2 + (skips if size > 1 else 0)):
                    last = own(length) - step * (size - 1)
                    with count(tirx.max(last, tirx.const(0, "int64"))) as start:
                        key = [data[_at(place, start + step * j)] for j in range(size)]
                        _look_up(tables[2 * i], tables[2 * i + 1], key, result, place)
            with count(width) as column:
                found = result[_at(place, column)]
                if mode == "IDF":
                    found = tirx.min(found, tirx.const(1.0, "float32"))
                result[_at(place, column)] = found * weights[column]

    operands = [call.tensor(0), *map(call.materialize, constants)]
    shape = (*rows, width)
    return emit_program(call, program, [(shape, "float32")], *operands, name="tf_idf")[0]


def _column_weights(call: Call, mode: str, columns: Sequence[int], width: int) -> Constant:
    """A factor for each column of the result.

    The standard gives weights to n-grams, its reference and ONNX Runtime give them to columns;
    where that is not the same, the node is refused.
    """
    given = call.attribute("weights")
    factors = np.ones(width, np.float32)
    if mode != "TF" and given:
        factors[columns] = np.array(given, np.float32)
        by_column = np.array(given[:width], np.float32)
        if len(given) != len(columns) or not np.array_equal(factors[: len(by_column)], by_column):
            raise Unsupported("TfIdfVectorizer with weights in another order than its columns")
    return derived_constant(call, "weights", factors)


def _pools(call: Call, columns: Sequence[int]) -> list[_Pool]:
    """The n-grams by length, those of lengths that are not asked for left out."""
    pool = np.array(call.attribute("pool_int64s"), np.int64)
    low, high = (int(call.attribute(f"{which}_gram_length")) for which in ("min", "max"))
    bounds = [*(int(start) for start in call.attribute("ngram_counts")), len(pool)]
    pools, number = [], 0
    for size, (start, end) in enumerate(pairwise(bounds), 1):
        several = max(end - start, 0) // size
        grams = pool[start : start + several * size].reshape(several, size)
        # Of equal n-grams the last one counts.
        found = {tuple(gram): columns[number + i] for i, gram in enumerate(grams.tolist())}
        number += several
        if low <= size <= high and found:
            items = sorted(found.items())
            pools.append(
                _Pool(np.array([g for g, _ in items]), np.array([column for _, column in items]))
            )
    return pools


def _tables(call: Call, number: int, pool: _Pool) -> list[Constant]:
    dtype = call.dtype(0)
    if dtype == "int32" and pool.grams.size and np.abs(pool.grams).max() > np.iinfo(dtype).max:
        raise Unsupported("TfIdfVectorizer of int32 with n-grams of larger numbers")
    return [
        derived_constant(call, f"grams{number}", pool.grams.astype(dtype)),
        derived_constant(call, f"columns{number}", pool.columns.astype(np.int64)),
    ]


def _look_up(
    grams: Array, columns: Array, key: Sequence[Any], result: Array, place: tuple[Any, ...]
) -> None:
    """Count an n-gram in its column if it is in the table."""
    size = int(grams.shape[0])
    low, high = local("int64", 0), local("int64", size)
    with count(size.bit_length()) as _:
        middle = tirx.min(tirx.floordiv(low[0] + high[0], 2), tirx.const(size - 1, "int64"))
        spot = local("int64", middle)
        less = _less(grams, spot[0], key)
        searching = low[0] < high[0]
        with when(tirx.all(searching, less)):
            low[0] = spot[0] + 1
        with when(tirx.all(searching, tirx.Not(less))):
            high[0] = spot[0]
    spot = local("int64", tirx.min(low[0], tirx.const(size - 1, "int64")))
    same = [tirx.EQ(grams[spot[0], j], item) for j, item in enumerate(key)]
    with when(tirx.all(low[0] < size, *same)):
        column = _at(place, columns[spot[0]])
        result[column] = result[column] + tirx.const(1.0, "float32")


def _at(place: tuple[Any, ...], last: Any) -> tuple[Any, ...]:
    """Index of an element of a row; a vector's only row has no index."""
    return (*place, last)


def _less(grams: Array, row: Any, key: Sequence[Any]) -> Any:
    """Whether a row of the table comes before the key."""
    result: Any = tirx.const(False, "bool")
    for j, item in reversed(list(enumerate(key))):
        found = grams[row, j]
        result = tirx.any(found < item, tirx.all(tirx.EQ(found, item), result))
    return result


OPERATORS: tuple[Operator, ...] = (Operator("TfIdfVectorizer", tf_idf_vectorizer, since=9),)
