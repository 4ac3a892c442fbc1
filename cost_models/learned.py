"""Learned costs: trees that correct a roofline by what groups of other models took elsewhere.

    seconds = roofline x exp(sum of the trees)

The roofline is fitted to the *anchors* alone: the micro-kernels, which every calibration measures.
So it is the same thing for the trees here as it was where they were trained, whatever else was
measured on either machine. Trees are for one kind of target; ``learned/KIND.json`` are those that
come with hybridc, and a device in a machine's file may have its own. :mod:`train` makes them.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import numpy as np
from hybridc.cost_models.calibrate import FEWEST, fit_roofline
from hybridc.cost_models.cost import LEARNED, Cost
from hybridc.cost_models.device import DeviceProfile, load_json
from hybridc.cost_models.features import FEATURES, features
from hybridc.cost_models.group_work import GroupWork
from hybridc.cost_models.measured import Measurement
from hybridc.cost_models.roofline import CalibratedRoofline
from hybridc.cost_models.trees import Trees

from hybridc.bundle.manifest import build_record
from hybridc.errors import UsageError

SCHEMA = "2.0"
"""Trees of 1.x correct another roofline, one that was fitted by relative errors."""


@dataclass(frozen=True)
class HeldOut:
    """How far costs were off on machines' files that were left out, one after the other.

    Errors are medians of \\|predicted / measured - 1\\|.

    Attributes:
        sources: Files that were left out.
        groups: Groups that were judged, all of them by trees that had not seen them.
        error: Of the groups, with the trees.
        roofline_error: Of the same groups, with the roofline alone.
        sum_error: Of the sum over the groups of a file, with the trees.
        roofline_sum_error: Of the same sums, with the roofline alone.
    """

    sources: int
    groups: int
    error: float
    roofline_error: float
    sum_error: float
    roofline_sum_error: float


@dataclass(frozen=True)
class Tree:
    """One tree as it is stored; see :class:`hybridc.cost_models.trees.Trees`."""

    features: tuple[int, ...]
    thresholds: tuple[float, ...]
    leaves: tuple[float, ...]


@dataclass(frozen=True)
class LearnedFile:
    """Trees for one kind of target, with what they are good for.

    Attributes:
        schema: ``major.minor`` of this description.
        kind: Kind of the target.
        provenance: What they were trained on.
        anchors: Signatures of the groups that the roofline is fitted to.
        features: Names of what the trees see.
        kinds: Classes of operators that they have seen.
        dtypes: Element types that they have seen.
        held_out: Their error.
        start: What is added to their sum.
        trees: The trees.
    """

    schema: str
    kind: str
    provenance: str
    anchors: tuple[str, ...]
    features: tuple[str, ...]
    kinds: tuple[str, ...]
    dtypes: tuple[str, ...]
    held_out: HeldOut
    start: float
    trees: tuple[Tree, ...]

    def to_trees(self) -> Trees:
        """The trees as arrays."""
        return Trees(
            self.start,
            np.array([tree.features for tree in self.trees], np.int64),
            np.array([tree.thresholds for tree in self.trees]),
            np.array([tree.leaves for tree in self.trees]),
        )


class Learned:
    """The cost model: trees of a file, on the roofline of one device."""

    def __init__(self, file: LearnedFile, roofline: CalibratedRoofline) -> None:
        self._roofline, self._trees = roofline, file.to_trees()
        self._kinds, self._dtypes = set(file.kinds), set(file.dtypes)
        self._confidence = max(0.0, 1 - file.held_out.error)

    def estimate(self, group: GroupWork, device: DeviceProfile) -> Cost | None:
        """Cost of a group; ``None`` if it has a class or a type that the trees have not seen."""
        if not all(n.kind in self._kinds and n.dtype in self._dtypes for n in group.nodes):
            return None
        cost = self._roofline.estimate(group, device)
        if cost is None:
            return None
        change = math.exp(self._trees.value(features(group, device, cost.seconds)))
        return Cost(cost.seconds * change, group.bytes, LEARNED, self._confidence)


def learned_for(
    file: LearnedFile, measurements: Sequence[Measurement], device: DeviceProfile
) -> Learned | None:
    """The model for a device; ``None`` if too few of the anchors were measured on it."""
    anchors = set(file.anchors)
    found = [one for one in measurements if one.work.signature in anchors and not one.is_lost]
    if len(found) < FEWEST:
        return None
    return Learned(file, fit_roofline(found, device))


def shipped_learned(kind: str) -> LearnedFile | None:
    """The trees that come with hybridc for a kind of target, if there are some."""
    resource = files("hybridc.cost_models") / "learned" / f"{kind}.json"
    if not resource.is_file():
        return None
    where = f"learned/{kind}.json"
    return parse_learned(load_json(resource.read_text("utf-8"), where), where)


def parse_learned(data: Mapping[str, Any], where: str) -> LearnedFile:
    """Trees out of JSON.

    Raises:
        UsageError: Something in it is missing, of the wrong type or of another version.
    """
    try:
        if str(data.get("schema", "")).partition(".")[0] != SCHEMA.partition(".")[0]:
            found_schema = data.get("schema")
            raise ValueError(f"its schema is {found_schema!r}, not {SCHEMA}: train anew")
        found: LearnedFile = build_record(LearnedFile, data, "it")
        _check(found)
    except (ValueError, TypeError) as error:
        raise UsageError(f"{where} holds no learned costs: {error}") from error
    return found


def _check(file: LearnedFile) -> None:
    """Whether the trees can be evaluated.

    Raises:
        ValueError: They cannot.
    """
    if file.features != FEATURES:
        raise ValueError("its trees were trained on other features; train them anew")
    if not file.trees:
        raise ValueError("it has no trees")
    inner = len(file.trees[0].features)
    if inner + 1 not in (1 << depth for depth in range(1, 17)):
        raise ValueError(f"a complete tree has no {inner} inner nodes")
    for index, tree in enumerate(file.trees):
        if (len(tree.features), len(tree.thresholds), len(tree.leaves)) != (
            inner,
            inner,
            inner + 1,
        ):
            raise ValueError(f"tree {index} is not as large as the first")
        if not all(0 <= feature < len(FEATURES) for feature in tree.features):
            raise ValueError(f"tree {index} names a feature that does not exist")
        if not all(map(math.isfinite, (*tree.thresholds, *tree.leaves))):
            raise ValueError(f"tree {index} has a number that is not finite")
    errors = dataclasses.astuple(file.held_out)
    if not all(0 <= error < math.inf for error in errors) or not math.isfinite(file.start):
        raise ValueError("an error or its start is no number that makes sense")


def to_json(file: LearnedFile) -> str:
    """The file's text, a tree in each line."""
    data = dataclasses.asdict(file)
    trees = ",\n".join("  " + json.dumps(tree, separators=(",", ":")) for tree in data.pop("trees"))
    head = json.dumps(data, indent=1, ensure_ascii=False)
    return f'{head[: -len(chr(10) + "}")]},\n "trees": [\n{trees}\n ]\n}}\n'
