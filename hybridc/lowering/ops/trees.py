"""Ensembles of decision trees as one kernel over flat arrays.

Every node of every tree has a number. An inner node compares one feature with a threshold and
names its two successors; a leaf is its own successor, so that all walks take as many steps as the
deepest tree. A leaf owns a range of contributions, each a weight for one target.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from tvm import te, tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from hybridc.lowering.call import Unsupported, as_dim, as_expression

MODES = ("BRANCH_LEQ", "BRANCH_LT", "BRANCH_GTE", "BRANCH_GT", "BRANCH_EQ", "BRANCH_NEQ")
MEMBER = 6
LEAF = 7

AGGREGATES = ("AVERAGE", "SUM", "MIN", "MAX")


@dataclass
class Forest:
    """Flat arrays of all nodes; see the module's text.

    Attributes:
        roots: First node of each tree.
        depth: Steps of the longest walk.
    """

    features: list[int] = field(default_factory=list)
    thresholds: list[float] = field(default_factory=list)
    modes: list[int] = field(default_factory=list)
    missing: list[bool] = field(default_factory=list)
    successors: list[list[int]] = field(default_factory=list)
    ranges: list[tuple[int, int]] = field(default_factory=list)
    targets: list[int] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    roots: list[int] = field(default_factory=list)
    depth: int = 0

    def add_leaf(self, contributions: Iterable[tuple[int, float]]) -> int:
        """Append a leaf; returns its number."""
        start = len(self.targets)
        for target, weight in contributions:
            self.targets.append(target)
            self.weights.append(weight)
        number = self._append(0, 0.0, LEAF, False, (start, len(self.targets)))
        self.successors[number] = [number, number]
        return number

    def add_branch(self, feature: int, threshold: float, mode: int, missing: bool) -> int:
        """Append an inner node, whose successors are set later; returns its number."""
        return self._append(feature, threshold, mode, missing, (0, 0))

    def _append(
        self, feature: int, threshold: float, mode: int, missing: bool, owned: tuple[int, int]
    ) -> int:
        self.features.append(feature)
        self.thresholds.append(threshold)
        self.modes.append(mode)
        self.missing.append(missing)
        self.ranges.append(owned)
        self.successors.append([-1, -1])
        return len(self.features) - 1

    def measure(self) -> None:
        """Set the depth; refuses graphs of nodes that are not trees."""
        seen: set[int] = set()
        # A cycle leaves its nodes out of reach of every root.
        level, depth = list(self.roots), 0
        while level:
            if seen.intersection(level) or len(set(level)) != len(level) or min(level) < 0:
                raise Unsupported("the nodes do not form trees")
            seen.update(level)
            inner = [node for node in level if self.modes[node] != LEAF]
            level = [next_node for node in inner for next_node in self.successors[node]]
            depth += bool(level)
        if len(seen) != len(self.features):
            raise Unsupported("the nodes do not form trees")
        self.depth = depth

    def arrays(self, dtype: str) -> dict[str, np.ndarray[Any, Any]]:
        """The arrays that the kernel reads, by name; thresholds and weights in ``dtype``."""
        successors = np.array(self.successors, np.int32)
        return {
            "roots": np.array(self.roots, np.int32),
            "features": np.array(self.features, np.int32),
            "thresholds": np.array(self.thresholds, dtype),
            "modes": np.array(self.modes, np.int8),
            "missing": np.array(self.missing, np.int8),
            "when_true": np.ascontiguousarray(successors[:, 0]),
            "when_false": np.ascontiguousarray(successors[:, 1]),
            "starts": np.array([start for start, _ in self.ranges], np.int32),
            "ends": np.array([end for _, end in self.ranges], np.int32),
            "targets": np.array(self.targets or [0], np.int32),
            "weights": np.array(self.weights or [0], dtype),
        }


def forest_of(attributes: Mapping[str, Any], prefix: str) -> Forest:
    """The forest of TreeEnsembleRegressor (``target``) or TreeEnsembleClassifier (``class``)."""
    forest, numbers = Forest(), {}
    names = list(zip(attributes["nodes_treeids"], attributes["nodes_nodeids"], strict=True))
    owned: dict[tuple[int, int], list[tuple[int, float]]] = {}
    rows = (attributes[f"{prefix}_{key}"] for key in ("treeids", "nodeids", "ids", "weights"))
    for tree, node, target, weight in zip(*rows, strict=True):
        owned.setdefault((tree, node), []).append((target, weight))
    missing = attributes.get("nodes_missing_value_tracks_true") or [0] * len(names)
    columns = (attributes[f"nodes_{key}"] for key in ("featureids", "values", "modes"))
    for name, feature, value, mode, track in zip(names, *columns, missing, strict=True):
        if mode == "LEAF":
            numbers[name] = forest.add_leaf(owned.get(name, ()))
            continue
        if mode not in MODES:
            raise Unsupported(f"tree nodes of mode {mode}")
        numbers[name] = forest.add_branch(feature, value, MODES.index(mode), bool(track))
    successors = (attributes[f"nodes_{key}nodeids"] for key in ("true", "false"))
    pointed = set()
    for (tree, node), true, false in zip(names, *successors, strict=True):
        number = numbers[tree, node]
        if forest.modes[number] != LEAF:
            forest.successors[number] = [numbers.get((tree, n), -1) for n in (true, false)]
            pointed.update(forest.successors[number])
    forest.roots = [number for number in numbers.values() if number not in pointed]
    forest.measure()
    return forest


def forest_of_ensemble(attributes: Mapping[str, Any]) -> Forest:
    """The forest of TreeEnsemble; a test of membership becomes a chain of comparisons."""
    forest = Forest()
    weights, targets = attributes["leaf_weights"], attributes["leaf_targetids"]
    leaves = [
        forest.add_leaf([(target, weight)]) for target, weight in zip(targets, weights, strict=True)
    ]
    sets = _member_sets(attributes.get("membership_values", ()))
    missing = attributes.get("nodes_missing_value_tracks_true") or [0] * len(
        attributes["nodes_featureids"]
    )
    columns = (attributes[f"nodes_{key}"] for key in ("featureids", "splits", "modes"))
    chains = []
    for feature, value, mode, track in zip(*columns, missing, strict=True):
        values = next(sets) if mode == MEMBER else [value]
        kind = MODES.index("BRANCH_EQ") if mode == MEMBER else int(mode)
        if kind >= len(MODES):
            raise Unsupported(f"tree nodes of mode {mode}")
        chains.append([forest.add_branch(feature, v, kind, bool(track)) for v in values])
    sides = [
        list(zip(attributes[f"nodes_{key}nodeids"], attributes[f"nodes_{key}leafs"], strict=True))
        for key in ("true", "false")
    ]
    for index, chain in enumerate(chains):
        true, false = (
            leaves[node] if leaf else chains[node][0]
            for node, leaf in (side[index] for side in sides)
        )
        for node, following in zip(chain, [*chain[1:], false], strict=True):
            forest.successors[node] = [true, following]
    forest.roots = [chains[root][0] for root in attributes["tree_roots"]]
    _check_shared_leaves(forest)
    return forest


def _member_sets(values: Sequence[float]) -> Any:
    """The sets of all tests of membership, which NaN separates."""
    current: list[float] = []
    for value in values:
        if np.isnan(value):
            yield current
            current = []
        else:
            current.append(float(value))
    if current:
        yield current


def _check_shared_leaves(forest: Forest) -> None:
    """Set the depth; a chain reaches one node several times, which :meth:`measure` refuses."""
    depths: dict[int, int] = {}

    def depth_of(root: int) -> int:
        stack = [(root, False)]
        while stack:
            node, ready = stack.pop()
            children = [c for c in forest.successors[node] if c != node]
            if not children:
                depths[node] = 0
            elif ready:
                depths[node] = 1 + max(depths[child] for child in children)
            elif node not in depths:
                if len(stack) > 2 * len(forest.features):
                    raise Unsupported("the nodes do not form trees")
                stack.append((node, True))
                stack.extend((child, False) for child in children)
        return depths[root]

    forest.depth = max(map(depth_of, forest.roots), default=0)


def evaluate(
    depth: int,
    modes: Sequence[int],
    aggregate: str,
    targets: int,
    names: Sequence[str],
    data: te.Tensor,
    *tensors: te.Tensor,
) -> te.Tensor:
    """The tensor-expression function of the kernel: raw scores ``(rows, targets)``.

    Args:
        depth: Steps of a walk.
        modes: The modes of inner nodes that occur.
        aggregate: How the trees' weights are combined.
        targets: Number of scores.
        names: Names of :meth:`Forest.arrays`.
        data: ``(rows, features)``.
        tensors: Those arrays.
    """
    rows, columns = data.shape
    dtype = str(tensors[names.index("weights")].dtype)

    def generate(inputs: Sequence[Any], outputs: Sequence[Any]) -> Any:
        with IRBuilder() as builder:
            source, *arrays = map(T.buffer_proxy, inputs)
            walk = _Walk(dict(zip(names, arrays, strict=True)), modes, source, columns)
            trees = tensors[names.index("roots")].shape[0]
            _emit(walk, depth, aggregate, targets, (rows, trees), T.buffer_proxy(outputs[0]), dtype)
            return builder.get()

    return te.extern([(rows, targets)], [data, *tensors], generate, dtype=[dtype], name="trees")


@dataclass(frozen=True)
class _Walk:
    """Emission of one step of a walk."""

    arrays: Mapping[str, Any]
    modes: Sequence[int]
    source: Any
    columns: Any

    def following(self, row: Any, node: Any) -> Any:
        """The node behind ``node``."""
        threshold = self.arrays["thresholds"][node]
        place = row * self.columns + self.arrays["features"][node].astype("int64")
        value = self.source[place].astype(str(threshold.ty.dtype))
        taken = tirx.const(False, "bool")
        for mode in self.modes:
            holds = _COMPARISONS[mode](value, threshold)
            is_mode = self.arrays["modes"][node] == tirx.const(mode, "int8")
            taken = tirx.any(taken, tirx.all(is_mode, holds))
        lost = self.arrays["missing"][node] != tirx.const(0, "int8")
        if str(value.ty.dtype).startswith("float"):
            taken = tirx.any(taken, tirx.all(lost, tirx.isnan(value)))
        return tirx.Select(taken, self.arrays["when_true"][node], self.arrays["when_false"][node])


_COMPARISONS: tuple[Callable[[Any, Any], Any], ...] = (
    lambda x, y: x <= y,
    lambda x, y: x < y,
    lambda x, y: x >= y,
    lambda x, y: x > y,
    lambda x, y: tirx.EQ(x, y),
    # NaN differs from everything, but TVM's comparison is false for it.
    lambda x, y: tirx.any(x < y, x > y, tirx.isnan(x)),
)


def _emit(
    walk: _Walk,
    depth: int,
    aggregate: str,
    targets: int,
    sizes: tuple[Any, Any],
    result: Any,
    dtype: str,
) -> None:
    rows, trees = (as_expression(as_dim(size)) for size in sizes)
    zero, all_targets = tirx.const(0, "int64"), tirx.const(targets, "int64")
    with T.parallel(zero, rows) as row:
        node = T.buffer_proxy(T.decl_buffer([1], "int32", scope="local"))
        scores = _Scores(aggregate, result, row * targets, None)
        if aggregate in ("MIN", "MAX"):
            scores = replace(scores, met=T.buffer_proxy(T.decl_buffer([targets], "bool")))
        with T.serial(zero, all_targets) as target:
            scores.clear(target, dtype)
        with T.serial(zero, trees) as tree:
            node[0] = walk.arrays["roots"][tree]
            with T.serial(zero, tirx.const(depth, "int64")):
                node[0] = walk.following(row, node[0])
            start, end = (walk.arrays[name][node[0]].astype("int64") for name in ("starts", "ends"))
            with T.serial(zero, end - start) as index:
                target = walk.arrays["targets"][start + index].astype("int64")
                scores.add(target, walk.arrays["weights"][start + index])
        if aggregate == "AVERAGE":
            with T.serial(zero, all_targets) as target:
                scores.divide(target, trees.astype(dtype))


@dataclass(frozen=True)
class _Scores:
    """Emission of updates of one row's scores; ``met`` tells which have a value already."""

    aggregate: str
    result: Any
    base: Any
    met: Any

    def clear(self, target: Any, dtype: str) -> None:
        self.result[self.base + target] = tirx.const(0, dtype)
        if self.met is not None:
            self.met[target] = tirx.const(False, "bool")

    def add(self, target: Any, weight: Any) -> None:
        score = self.result[self.base + target]
        if self.met is None:
            self.result[self.base + target] = score + weight
            return
        combine = tirx.min if self.aggregate == "MIN" else tirx.max
        self.result[self.base + target] = tirx.Select(
            self.met[target], combine(score, weight), weight
        )
        self.met[target] = tirx.const(True, "bool")

    def divide(self, target: Any, count: Any) -> None:
        self.result[self.base + target] = self.result[self.base + target] / count
