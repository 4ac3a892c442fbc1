"""Gradient-boosted regression trees, small enough to be stored as JSON and evaluated in numpy.

Every tree is complete and of the same depth, and lies in arrays as a heap does: below node ``i``
are ``2i + 1`` and ``2i + 2``. So all trees are walked at once, one step for each level. A node that
does not split sends everything to its first child.

Training adds one tree after the other. Each is fitted to what the trees before it leave over, cut
off at :data:`CUT`, so that a few wild values do not bend the whole. A node splits where that lowers
the sum of squares most, with at least :data:`LEAST` rows on either side; a leaf adds a tenth of the
mean of its rows. No chance is involved: the same rows give the same trees.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

COUNT = 100
DEPTH = 4
RATE = 0.1
LEAST = 8
CUT = 1.0
NEVER = 1e300
"""Threshold of a node that does not split."""

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Trees:
    """A sum of trees.

    Attributes:
        start: What is added to their sum.
        features: Feature by which each inner node splits, trees x inner nodes.
        thresholds: Rows with a feature above it go to the second child; of the same shape.
        leaves: Values, trees x leaves.
    """

    start: float
    features: Integers
    thresholds: Floats
    leaves: Floats

    def value(self, row: Floats) -> float:
        """The sum for one row of features."""
        trees, inner = self.features.shape
        every, node = np.arange(trees), np.zeros(trees, np.int64)
        while node.size and node[0] < inner:
            above = row[self.features[every, node]] > self.thresholds[every, node]
            node = 2 * node + 1 + above
        return self.start + float(self.leaves[every, node - inner].sum())


def fit_trees(rows: Floats, wanted: Floats, count: int = COUNT, depth: int = DEPTH) -> Trees:
    """Trees whose sum is near ``wanted``.

    Args:
        rows: Features, rows x features; at least one row.
        wanted: A value for each row.
        count: How many trees.
        depth: Splits on the way to a leaf.
    """
    inner = 2**depth - 1
    features = np.zeros((count, inner), np.int64)
    thresholds = np.full((count, inner), NEVER)
    leaves = np.zeros((count, inner + 1))
    start = float(np.median(wanted))
    left = wanted - start
    for tree in range(count):
        at = _grow(rows, np.clip(left, -CUT, CUT), features[tree], thresholds[tree])
        for leaf in np.unique(at):
            here = at == leaf
            leaves[tree, leaf] = RATE * np.clip(left[here], -CUT, CUT).mean()
        left = left - leaves[tree, at]
    return Trees(start, features, thresholds, leaves)


def _grow(rows: Floats, left: Floats, features: Integers, thresholds: Floats) -> Integers:
    """Fill the inner nodes of one tree; gives the leaf of each row."""
    inner = len(features)
    at = np.zeros(len(rows), np.int64)
    for node in range(inner):
        here = np.flatnonzero(at == node)
        split = _best_split(rows[here], left[here])
        if split is not None:
            features[node], thresholds[node] = split
        above = rows[here, features[node]] > thresholds[node]
        at[here] = 2 * node + 1 + above
    return at - inner


def _best_split(rows: Floats, left: Floats) -> tuple[Any, Any] | None:
    """Feature and threshold that lower the sum of squares most; ``None`` if none does."""
    count = len(rows)
    if count < 2 * LEAST:
        return None
    order = np.argsort(rows, axis=0, kind="stable")
    ordered = np.take_along_axis(rows, order, axis=0)
    sums = np.cumsum(left[order], axis=0)
    first = np.arange(1, count)[:, None]
    gain = sums[:-1] ** 2 / first + (sums[-1] - sums[:-1]) ** 2 / (count - first)
    gain -= sums[-1] ** 2 / count
    possible = (first >= LEAST) & (count - first >= LEAST) & (ordered[1:] > ordered[:-1])
    gain = np.where(possible, gain, 0.0)
    place, feature = np.unravel_index(np.argmax(gain), gain.shape)
    if gain[place, feature] <= 1e-9:
        return None
    threshold = (ordered[place, feature] + ordered[place + 1, feature]) / 2
    # Two neighbors may have no number between them: then the smaller one itself parts them.
    return feature, min(threshold, np.nextafter(ordered[place + 1, feature], -np.inf))
