"""A sweep: the same plan for several sizes, or figures of links, and where it changes."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hybridc.cli.output import price, table
from hybridc.errors import UsageError

if TYPE_CHECKING:
    from hybridc.placement.plan_file import PlanFile

MOST = 64
"""Values in a sweep."""

BANDWIDTH, LATENCY = "link.bandwidth", "link.latency"
"""What may be swept beside dimensions: figures of all links."""

_SIZE = re.compile(r"(?P<number>[1-9]\d*)(?P<unit>)")
_AMOUNT = re.compile(r"(?P<number>\d+(?:\.\d+)?)(?P<unit>[A-Za-z]+)")


@dataclass(frozen=True)
class Sweep:
    """What is swept.

    Attributes:
        name: A dimension, ``link.bandwidth`` or ``link.latency``.
        labels: The values as they were given.
        values: Sizes; bytes per second; or seconds.
    """

    name: str
    labels: tuple[str, ...]
    values: tuple[float, ...]


def parse_sweep(text: str) -> Sweep:
    """What is swept, out of ``batch=1,2,4..64`` or ``link.bandwidth=1gbit..64gbit``.

    ``a..b`` doubles from a to b.

    Raises:
        UsageError: It is not of that form, or has too many values.
    """
    name, separator, values = text.partition("=")
    form = _SIZE if name not in (BANDWIDTH, LATENCY) else _AMOUNT
    labels: list[str] = []
    for item in values.split(","):
        first, dots, last = item.partition("..")
        ends = form.fullmatch(first), form.fullmatch(last or first)
        if not separator or not name or None in ends or (dots and not last):
            example = {BANDWIDTH: "1gbit,2gbit..64gbit", LATENCY: "1us..1ms"}.get(name, "1,2,4..64")
            wanted = f"NAME=VALUES, as in {name or 'n'}={example}"
            raise UsageError(f"--sweep {text!r} is not of the form {wanted}")
        labels += _doubled(name, ends)
    found = tuple(_value(name, label) for label in labels)
    if not 1 < len(found) <= MOST or list(found) != sorted(set(found)):
        raise UsageError(f"--sweep {text!r} needs 2 to {MOST} values that rise")
    return Sweep(name, tuple(labels), found)


def _doubled(name: str, ends: Sequence[re.Match[str] | None]) -> list[str]:
    """Values from one end to the other, in the unit of the first."""
    first, last = ends
    assert first is not None
    assert last is not None
    number, most = float(first["number"]), _value(name, last[0])
    labels: list[str] = []
    while len(labels) <= MOST:
        label = f"{int(number) if number.is_integer() else number}{first['unit']}"
        if _value(name, label) > most:
            break
        labels.append(label)
        number *= 2
    return labels


def _value(name: str, label: str) -> float:
    """A value as a number, in units without a prefix."""
    from hybridc.cost_models.link import parse_rate, parse_seconds

    if name not in (BANDWIDTH, LATENCY):
        return int(label)
    try:
        return parse_rate(label) if name == BANDWIDTH else parse_seconds(label)
    except ValueError as error:
        raise UsageError(f"--sweep {name}: {error}") from error


def run_sweep(text: str, shapes: Sequence[str], plan: Callable[[list[str]], PlanFile]) -> Any:
    """Plans at each value, as JSON.

    Args:
        text: The ``--sweep`` option.
        shapes: The ``--shape`` options; one for the same dimension is replaced.
        plan: Makes a plan with given ``--shape`` options.
    """
    sweep = parse_sweep(text)
    if sweep.name in (BANDWIDTH, LATENCY):
        plans = _with_links(plan(list(shapes)), sweep)
    else:
        others = [shape for shape in shapes if shape.rpartition("=")[0] != sweep.name]
        plans = [plan([*others, f"{sweep.name}={label}"]) for label in sweep.labels]
    points = []
    for label, value, found in zip(sweep.labels, sweep.values, plans, strict=True):
        assert found.prediction is not None
        counts = Counter(group.device for group in found.groups)
        prediction = dataclasses.asdict(found.prediction)
        row = {"value": value, "label": label, "groups": dict(counts), "prediction": prediction}
        points.append(row)
    return {"dimension": sweep.name, "points": points, "crossovers": _crossovers(sweep, plans)}


def _with_links(plan: PlanFile, sweep: Sweep) -> list[PlanFile]:
    """The plan with another bandwidth or latency of all links, both ways."""
    from hybridc.placement.reconsider import Change, hardware_of, reconsider

    routes = hardware_of(plan, Change()).routes()
    if not routes:
        raise UsageError(f"--sweep {sweep.name}: all devices of the plan share one memory")
    field = "bytes_per_second" if sweep.name == BANDWIDTH else "latency_seconds"
    found = []
    for value in sweep.values:
        links = {ends: dataclasses.replace(r, **{field: value}) for ends, r in routes.items()}
        found.append(reconsider(plan, Change(links=links)))
    return found


def _crossovers(sweep: Sweep, plans: Sequence[PlanFile]) -> list[dict[str, Any]]:
    """Groups that are on another device than at the value before."""
    found = []
    ends = zip(sweep.values[1:], sweep.labels[1:], plans, plans[1:], strict=False)
    for value, label, before, after in ends:
        old = before.device_of_nodes()
        for group in after.groups:
            source = old.get(group.name, group.device)
            if source != group.device:
                moved = {"group": group.name, "from": source, "to": group.device}
                found.append({**moved, "at": value, "label": label})
    return found


def sweep_drawing(data: Any) -> str:
    """A sweep as SVG."""
    from hybridc.placement.sweep_plot import sweep_svg

    objective = data["points"][0]["prediction"]["objective"]
    return sweep_svg(data, lambda value: price(objective, value))


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
        rows.append([point["label"], groups, *texts])
    lines = table(rows, indent=0)
    for row in data["crossovers"]:
        lines.append(f"from {name}={row['label']} on: {row['group']} {row['from']} -> {row['to']}")
    return lines if data["crossovers"] else [*lines, "no group moves"]
