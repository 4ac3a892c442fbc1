"""A sweep: the same plan for several sizes of a dynamic dimension, and where it changes."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from hybridc.cli.output import price, table
from hybridc.errors import UsageError

if TYPE_CHECKING:
    from hybridc.placement.plan_file import PlanFile

MOST = 64
"""Values in a sweep."""

_ITEM = re.compile(r"([1-9]\d*)(?:\.\.([1-9]\d*))?")


def parse_sweep(text: str) -> tuple[str, list[int]]:
    """A dimension and its values, out of ``batch=1,2,4..64``; ``a..b`` doubles from a to b.

    Raises:
        UsageError: It is not of that form, or has too many values.
    """
    name, separator, values = text.partition("=")
    matches = [_ITEM.fullmatch(item) for item in values.split(",")]
    found: list[int] = []
    for match in matches:
        if not separator or not name or match is None:
            raise UsageError(f"--sweep {text!r} is not of the form NAME=VALUES, as in n=1,2,4..64")
        value, last = int(match[1]), int(match[2] or match[1])
        while value <= last and len(found) <= MOST:
            found.append(value)
            value *= 2
    if not 1 < len(found) <= MOST or found != sorted(set(found)):
        raise UsageError(f"--sweep {text!r} needs 2 to {MOST} values that rise")
    return name, found


def run_sweep(text: str, shapes: Sequence[str], plan: Callable[[list[str]], PlanFile]) -> Any:
    """Plans at each value, as JSON.

    Args:
        text: The ``--sweep`` option.
        shapes: The ``--shape`` options; one for the same dimension is replaced.
        plan: Makes a plan with given ``--shape`` options.
    """
    name, values = parse_sweep(text)
    others = [shape for shape in shapes if shape.rpartition("=")[0] != name]
    plans = [plan([*others, f"{name}={value}"]) for value in values]
    points = []
    for value, found in zip(values, plans, strict=True):
        assert found.prediction is not None
        counts = Counter(group.device for group in found.groups)
        prediction = dataclasses.asdict(found.prediction)
        points.append({"value": value, "groups": dict(counts), "prediction": prediction})
    return {"dimension": name, "points": points, "crossovers": _crossovers(values, plans)}


def _crossovers(values: Sequence[int], plans: Sequence[PlanFile]) -> list[dict[str, Any]]:
    """Groups that are on another device than at the value before."""
    found = []
    for value, before, after in zip(values[1:], plans, plans[1:], strict=False):
        old = before.device_of_nodes()
        for group in after.groups:
            source = old.get(group.name, group.device)
            if source != group.device:
                row = {"group": group.name, "from": source, "to": group.device, "at": value}
                found.append(row)
    return found


def sweep_lines(data: Any) -> list[str]:
    """A sweep as a table, and what moves where."""
    name = data["dimension"]
    labels = list(dict.fromkeys(n for p in data["points"] for n in p["prediction"]["alternatives"]))
    rows = [[name, "groups", data["points"][0]["prediction"]["objective"], *labels]]
    for point in data["points"]:
        prediction = point["prediction"]
        groups = ", ".join(f"{device} {count}" for device, count in point["groups"].items())
        figures = [prediction["value"], *map(prediction["alternatives"].get, labels)]
        texts = ["-" if f is None else price(prediction["objective"], f) for f in figures]
        rows.append([str(point["value"]), groups, *texts])
    lines = table(rows, indent=0)
    for row in data["crossovers"]:
        lines.append(f"from {name}={row['at']} on: {row['group']} {row['from']} -> {row['to']}")
    return lines if data["crossovers"] else [*lines, "no group moves"]
