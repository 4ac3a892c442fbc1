"""Train trees from machines' files, and say how good they are on files that they have not seen.

The files come from ``hybridc calibrate run``, one for each model, or for each machine. What all of
them measured are the micro-kernels, which only give each file its roofline; all else is to be
learned, as the logarithm of measured over roofline. To judge, every file is left out once: trees
that see neither it nor any group that it has predict its groups.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from hybridc.cost_models.calibrate import FEWEST, fit_roofline
from hybridc.cost_models.cost import LEARNED
from hybridc.cost_models.device import DeviceProfile, load_json, parse_profile, read_profile_text
from hybridc.cost_models.features import FEATURES, features
from hybridc.cost_models.learned import SCHEMA, HeldOut, LearnedFile, Tree, to_json
from hybridc.cost_models.load import DEVICES, read_entries
from hybridc.cost_models.measured import Measurement, parse_measurements
from hybridc.cost_models.trees import LEAST, Floats, Trees, fit_trees

from hybridc.errors import UsageError

FEWEST_SOURCES = 3
"""So many files are needed, so that one can be left out and the others still differ."""

LARGEST_SPREAD = 0.5
"""Times that are less certain than this teach nothing."""


@dataclass(frozen=True)
class Source:
    """What one file knows of one device: its profile and what was measured."""

    name: str
    profile: DeviceProfile
    measurements: tuple[Measurement, ...]


@dataclass(frozen=True)
class _Row:
    """A group to learn from."""

    signature: str
    features: Floats
    roofline: float
    seconds: float
    work: Any


def read_sources(paths: Sequence[Path], kind: str) -> list[Source]:
    """The devices of a kind of target in machines' files.

    Raises:
        UsageError: A file cannot be read or has no such device.
    """
    found = []
    for path in paths:
        text, where = read_profile_text(str(path))
        data = load_json(text, where)
        entries = read_entries(data, where) if DEVICES in data else {}
        own = [name for name, entry in entries.items() if entry.kind == kind]
        if not own:
            raise UsageError(f"{where} has no device of kind {kind} that was measured")
        found += [_source(data[DEVICES][name], f"{where}, {name}") for name in own]
    return found


def _source(entry: Mapping[str, Any], where: str) -> Source:
    profile = parse_profile(entry["profile"], where)
    rows = parse_measurements(entry["measurements"], where)
    kept = (one for one in rows if one.work.is_known and not one.work.is_view)
    return Source(where, profile, tuple(one for one in kept if one.spread <= LARGEST_SPREAD))


def train(sources: Sequence[Source], kind: str, provenance: str) -> LearnedFile:
    """Trees for a kind of target.

    Args:
        sources: What to learn from.
        kind: The kind.
        provenance: Where it comes from, in words.

    Raises:
        UsageError: There is too little to learn from.
    """
    if len(sources) < FEWEST_SOURCES:
        raise UsageError(
            f"{len(sources)} devices of kind {kind} are too few: trees are judged on files that "
            f"they have not seen, so it takes {FEWEST_SOURCES}, of different models or machines"
        )
    anchors = set.intersection(*({m.work.signature for m in s.measurements} for s in sources))
    if len(anchors) < FEWEST:
        raise UsageError(
            f"the files have {len(anchors)} groups in common, and it takes {FEWEST}: all of them "
            "have to be of the same version of hybridc calibrate"
        )
    rows = [_rows(source, anchors) for source in sources]
    kinds, dtypes = _seen([row for own in rows for row in own])
    if not kinds:
        raise UsageError("the files hold nothing but micro-kernels: calibrate with --model")
    rows = [[row for row in own if _is_within(row, kinds, dtypes)] for own in rows]
    trees = _fit([row for own in rows for row in own])
    stored = [
        Tree(*(tuple(column[index].tolist()) for column in _columns(trees)))
        for index in range(len(trees.leaves))
    ]
    return LearnedFile(
        SCHEMA,
        kind,
        provenance,
        tuple(sorted(anchors)),
        FEATURES,
        tuple(sorted(kinds)),
        tuple(sorted(dtypes)),
        hold_out(rows),
        trees.start,
        tuple(stored),
    )


def _columns(trees: Trees) -> tuple[Any, Floats, Floats]:
    return trees.features, trees.thresholds, trees.leaves


def _rows(source: Source, anchors: set[str]) -> list[_Row]:
    """What a file teaches: groups that its roofline knows."""
    fitted = [one for one in source.measurements if one.work.signature in anchors]
    roofline = fit_roofline(fitted, source.profile)
    rows = []
    for one in source.measurements:
        cost = roofline.estimate(one.work, source.profile)
        if cost is not None and one.work.signature not in anchors:
            seen = features(one.work, source.profile, cost.seconds)
            rows.append(_Row(one.work.signature, seen, cost.seconds, one.seconds, one.work))
    return rows


def _seen(rows: Sequence[_Row]) -> tuple[set[str], set[str]]:
    """Classes of operators and element types that enough groups have."""
    kinds: dict[str, int] = {}
    dtypes: dict[str, int] = {}
    for row in rows:
        for kind in {node.kind for node in row.work.nodes}:
            kinds[kind] = kinds.get(kind, 0) + 1
        for dtype in {node.dtype for node in row.work.nodes}:
            dtypes[dtype] = dtypes.get(dtype, 0) + 1
    return (
        {kind for kind, count in kinds.items() if count >= LEAST},
        {dtype for dtype, count in dtypes.items() if count >= LEAST},
    )


def _is_within(row: _Row, kinds: set[str], dtypes: set[str]) -> bool:
    return all(node.kind in kinds and node.dtype in dtypes for node in row.work.nodes)


def _fit(rows: Sequence[_Row]) -> Trees:
    """Trees over rows; a group that several files have counts once."""
    once = list({row.signature: row for row in rows}.values())
    wanted = np.array([math.log(row.seconds / row.roofline) for row in once])
    return fit_trees(np.array([row.features for row in once]), wanted)


def hold_out(sources: Sequence[Sequence[_Row]]) -> HeldOut:
    """The error on every source, by trees that have seen nothing that is in it."""
    errors: list[float] = []
    plain: list[float] = []
    sums: list[float] = []
    plain_sums: list[float] = []
    for index, held in enumerate(sources):
        others = unseen(sources, index)
        if not held or not others:
            continue
        trees = _fit(others)
        learned = [row.roofline * math.exp(trees.value(row.features)) for row in held]
        seconds = [row.seconds for row in held]
        roofline = [row.roofline for row in held]
        errors += [abs(p / s - 1) for p, s in zip(learned, seconds, strict=True)]
        plain += [abs(p / s - 1) for p, s in zip(roofline, seconds, strict=True)]
        sums.append(abs(sum(learned) / sum(seconds) - 1))
        plain_sums.append(abs(sum(roofline) / sum(seconds) - 1))
    if not errors:
        raise UsageError("no file has groups that the others lack: give files of different models")
    medians = (round(statistics.median(found), 4) for found in (errors, plain, sums, plain_sums))
    return HeldOut(len(sums), len(errors), *medians)


def unseen(sources: Sequence[Sequence[_Row]], index: int) -> list[_Row]:
    """Rows of all sources but one, without groups that this one has too."""
    own = {row.signature for row in sources[index]}
    others = (row for number, rows in enumerate(sources) if number != index for row in rows)
    return [row for row in others if row.signature not in own]


def store_in_machine(file: LearnedFile, path: Path) -> str:
    """The text of a machine's file with the trees in its devices of that kind.

    Raises:
        UsageError: It cannot be read or has no such device.
    """
    text, where = read_profile_text(str(path))
    data = load_json(text, where)
    entries = read_entries(data, where) if DEVICES in data else {}
    own = [name for name, entry in entries.items() if entry.kind == file.kind]
    if not own:
        raise UsageError(f"{where} has no device of kind {file.kind} that was measured")
    for name in own:
        data[DEVICES][name][LEARNED] = json.loads(to_json(file))
    return json.dumps(data, indent=1, ensure_ascii=False) + "\n"
