"""NonMaxSuppression.

For each class of each picture: the boxes above the score threshold are candidates; the best of
them is kept and those that overlap it too much are dropped, until none is left or enough are kept.
Classes are independent, so they run in parallel; a second kernel lines up what they kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tvm import relax, tirx

from hybridc.lowering.call import Call
from hybridc.lowering.ops.common import Own, product, reshape, simplify
from hybridc.lowering.ops.loops import (
    Array,
    count,
    emit_program,
    equals,
    local,
    repeat_while,
    when,
)
from hybridc.lowering.value import Dim, Expression


def non_max_suppression(call: Call) -> Expression:
    """Rows of (picture, class, box), by descending score in each class; equal scores by index."""
    pictures, classes, boxes = call.shape(1)
    kept, counts = _kept_boxes(call, simplify(pictures * classes), boxes)
    return _rows(call, kept, counts, classes)


def _scalar(call: Call, index: int, default: float, dtype: str) -> Expression:
    if not call.has(index):
        return relax.const(np.array(default, dtype), dtype)
    return call.materialize(reshape(call, call.value(index), ()))


@dataclass(frozen=True)
class _Class:
    """One class of one picture inside the kernel: its boxes and its own row of the tables."""

    corners: Array
    scores: Array
    picture: Any
    label: Any
    candidates: Array
    task: Any

    def score(self, box: Any) -> Any:
        """Score of a box."""
        return self.scores[self.picture, self.label, box]


def _kept_boxes(call: Call, tasks: Dim, boxes: Dim) -> tuple[Expression, Expression]:
    """Boxes kept for each class of each picture: a table of indices, and how many are valid."""
    centered, thresholded = bool(call.attribute("center_point_box", 0)), call.has(4)

    def program(own: Own, corners: Array, scores: Array, *arrays: Array) -> None:
        limit, overlap, threshold, kept, counts, candidates = arrays
        classes = scores.shape[1]
        with count(own(tasks), parallel=True) as task:
            picture, label = tirx.floordiv(task, classes), tirx.floormod(task, classes)
            one = _Class(corners, scores, picture, label, candidates, task)
            left, found = local("int64", 0), local("int64", 0)
            with count(own(boxes)) as box:
                kept[task, box] = 0
                wanted = one.score(box) > threshold[()]
                with when(wanted if thresholded else tirx.const(True, "bool")):
                    candidates[task, left[0]] = box
                    left[0] = left[0] + 1
            with repeat_while(tirx.all(left[0] > 0, found[0] < limit[()])):
                best = _best(one, left)
                kept[task, found[0]] = best[0]
                found[0] = found[0] + 1
                _drop_overlapping(one, best, left, overlap[()], centered)
            counts[task] = found[0]

    scalars = [_scalar(call, 2, 0, "int64"), *(_scalar(call, i, 0, "float32") for i in (3, 4))]
    table = ((tasks, boxes), "int64")
    results = [table, ((tasks,), "int64"), table]
    operands = (call.tensor(0), call.tensor(1), *scalars)
    kept, counts, _ = emit_program(call, program, results, *operands, name="suppress")
    return kept, counts


def _best(one: _Class, left: Array) -> Array:
    """A variable with the candidate of the highest score, the first of several."""
    best = local("int64", one.candidates[one.task, 0])
    with count(left[0]) as i:
        box = one.candidates[one.task, i]
        best[0] = tirx.Select(one.score(box) > one.score(best[0]), box, best[0])
    return best


def _drop_overlapping(one: _Class, best: Array, left: Array, limit: Any, centered: bool) -> None:
    """Take a box, and those that overlap it too much, off the candidates."""
    remaining = local("int64", 0)
    with count(left[0]) as i:
        box = local("int64", one.candidates[one.task, i])
        first, second = (_sides(one.corners, one.picture, b[0], centered) for b in (best, box))
        dropped = tirx.any(equals(box[0], best[0]), _overlap_too_much(first, second, limit))
        with when(tirx.Not(dropped)):
            one.candidates[one.task, remaining[0]] = box[0]
            remaining[0] = remaining[0] + 1
    left[0] = remaining[0]


def _sides(boxes: Array, picture: Any, box: Any, centered: bool) -> list[tuple[Any, Any]]:
    """Lower and upper bound of a box along each of the two axes."""
    first, second, third, fourth = (boxes[picture, box, i] for i in range(4))
    if centered:
        half = tirx.const(0.5, boxes.dtype)
        spans = ((first, third * half), (second, fourth * half))
        return [(middle - radius, middle + radius) for middle, radius in spans]
    return [(tirx.min(a, b), tirx.max(a, b)) for a, b in ((first, third), (second, fourth))]


def _overlap_too_much(left: Sequence[Any], right: Sequence[Any], limit: Any) -> Any:
    """Whether the intersection over the union is above a limit; empty boxes overlap nothing."""
    zero = tirx.const(0, "float32")
    common: Any = tirx.const(1, "float32")
    for (low, high), (other_low, other_high) in zip(left, right, strict=True):
        extent = tirx.min(high, other_high) - tirx.max(low, other_low)
        common = common * tirx.max(extent, zero)
    areas = [(box[0][1] - box[0][0]) * (box[1][1] - box[1][0]) for box in (left, right)]
    union = areas[0] + areas[1] - common
    valid = tirx.all(common > zero, areas[0] > zero, areas[1] > zero, union > zero)
    return tirx.all(valid, common / tirx.Select(valid, union, tirx.const(1, "float32")) > limit)


def _rows(call: Call, kept: Expression, counts: Expression, classes: Dim) -> Expression:
    tasks = product(call.shape(1)[:2])

    def sum_counts(own: Own, counts: Array, total: Array) -> None:
        total[0] = 0
        with count(own(tasks)) as task:
            total[0] = total[0] + counts[task]

    (total,) = emit_program(call, sum_counts, [((1,), "int64")], counts, name="sum_counts")
    rows = call.dims_of(total, "the number of boxes")[0]

    def line_up(own: Own, kept: Array, counts: Array, result: Array) -> None:
        row = local("int64", 0)
        with count(own(tasks)) as task, count(counts[task]) as i:
            result[row[0], 0] = tirx.floordiv(task, own(classes))
            result[row[0], 1] = tirx.floormod(task, own(classes))
            result[row[0], 2] = kept[task, i]
            row[0] = row[0] + 1

    shape = ((rows, 3), "int64")
    return emit_program(call, line_up, [shape], kept, counts, name="line_up")[0]
