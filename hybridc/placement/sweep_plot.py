"""Draw a sweep as SVG: what plans cost at each value, and how their groups are shared out.

Values stand at equal distances, as they mostly double. The scale of costs is logarithmic, unless
something costs nothing. Below it a bar for each value shows the share of each device, and dashed
lines stand where groups move.
"""

from __future__ import annotations

import html
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from hybridc.placement.drawing import COLORS

OWN = "the plan"
_LINES = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#8c564b", "#e377c2", "#7f7f7f", "#bcbd22")

_LEFT, _TOP, _WIDTH, _HEIGHT = 90, 40, 560, 280
_BAR, _GAP, _LEGEND = 40, 24, 190

Scale = Callable[[float], float]


def sweep_svg(data: Mapping[str, Any], price: Callable[[float], str]) -> str:
    """The drawing.

    Args:
        data: A sweep as JSON: ``dimension``, ``points`` with their predictions, ``crossovers``.
        price: A cost in words, with its unit.
    """
    points = data["points"]
    lines = _lines(points)
    across = _across(len(points))
    up, ticks = _upward([value for line in lines.values() for value in line if value is not None])
    bar = _TOP + _HEIGHT + _GAP
    parts = [
        _text(_LEFT, 20, f"{points[0]['prediction']['objective']} over {data['dimension']}"),
        *(_tick(up(tick), price(tick)) for tick in ticks),
        *_moves(data["crossovers"], [point["label"] for point in points], across),
        *(_line(number, line, across, up) for number, line in enumerate(lines.values())),
        *_bars(points, across, bar),
        *(
            _text(across(index), bar + _BAR + 18, point["label"], "middle")
            for index, point in enumerate(points)
        ),
        *_legend(list(lines), _devices(points)),
    ]
    rows = max(len(lines) + len(_devices(points)) + 1, 17)
    height = max(bar + _BAR + 40, _TOP + 20 * rows)
    size = f'width="{_LEFT + _WIDTH + _LEGEND}" height="{height}"'
    style = 'font-family="sans-serif" font-size="12"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>'
    return "\n".join([head, '<rect width="100%" height="100%" fill="white"/>', *parts, "</svg>\n"])


def _lines(points: Sequence[Mapping[str, Any]]) -> dict[str, list[float | None]]:
    """The plan's costs and those of simple plans, by name; ``None`` where there is no such plan."""
    predictions = [point["prediction"] for point in points]
    names = dict.fromkeys(name for found in predictions for name in found["alternatives"])
    own: dict[str, list[float | None]] = {OWN: [found["value"] for found in predictions]}
    return own | {name: [f["alternatives"].get(name) for f in predictions] for name in names}


def _across(count: int) -> Scale:
    step = _WIDTH / count
    return lambda index: _LEFT + step * (index + 0.5)


def _upward(values: Sequence[float]) -> tuple[Scale, list[float]]:
    """Where a cost stands, and costs to write beside the scale."""
    low, high = min(values), max(values)
    if low <= 0:
        top = high or 1.0
        return lambda v: _TOP + _HEIGHT * (1 - v / top), [top * n / 4 for n in range(5)]
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    steps = [n * 10.0**power for power in range(first - 1, last + 1) for n in (1, 2, 5)]
    low = max(step for step in steps if step <= low * (1 + 1e-9))
    high = min(step for step in [*steps, 10.0 ** (last + 1)] if step >= high and step > low)
    span = math.log(high / low)
    ticks = [step for step in steps if low <= step <= high]
    return lambda v: _TOP + _HEIGHT * (1 - math.log(v / low) / span), ticks


def _tick(y: float, text: str) -> str:
    rule = f'<path d="M{_LEFT} {y:.1f}h{_WIDTH}" stroke="#dddddd"/>'
    return rule + _text(_LEFT - 6, y + 4, text, "end")


def _line(number: int, values: Sequence[float | None], across: Scale, up: Scale) -> str:
    """A line through all values that there are; the plan's own is the thickest."""
    known = [(across(i), up(value)) for i, value in enumerate(values) if value is not None]
    corners = " ".join(f"{x:.1f},{y:.1f}" for x, y in known)
    look = 'stroke-width="4"' if number == 0 else 'stroke-width="1.5" stroke-dasharray="6 3"'
    color = _LINES[number % len(_LINES)]
    return f'<polyline points="{corners}" fill="none" stroke="{color}" {look}/>'


def _moves(
    crossovers: Sequence[Mapping[str, Any]], labels: Sequence[str], across: Scale
) -> Iterator[str]:
    """A line before each value at which groups are elsewhere than at the one before."""
    for label, count in Counter(row["label"] for row in crossovers).items():
        x = across(labels.index(label) - 0.5)
        end = _TOP + _HEIGHT + _GAP + _BAR
        yield f'<path d="M{x:.1f} {_TOP}V{end}" stroke="#999999" stroke-dasharray="2 3"/>'
        yield _text(x, _TOP - 4, f"{count} move", "middle")


def _devices(points: Sequence[Mapping[str, Any]]) -> list[str]:
    return sorted({name for point in points for name in point["groups"]})


def _bars(points: Sequence[Mapping[str, Any]], across: Scale, top: float) -> Iterator[str]:
    """Shares of the devices in the groups, from the top down in the order of the legend."""
    names, width = _devices(points), _WIDTH / len(points) * 0.7
    for index, point in enumerate(points):
        total, y = sum(point["groups"].values()), top
        for number, name in enumerate(names):
            height = _BAR * point["groups"].get(name, 0) / total
            box = f'x="{across(index) - width / 2:.1f}" y="{y:.1f}" width="{width:.1f}"'
            color = COLORS[number % len(COLORS)]
            yield f'<rect {box} height="{height:.1f}" fill="{color}" class="share"/>'
            y += height


def _legend(lines: Sequence[str], devices: Sequence[str]) -> Iterator[str]:
    x, y = _LEFT + _WIDTH + 20, _TOP + 10
    for number, name in enumerate(lines):
        color, width = _LINES[number % len(_LINES)], 4 if number == 0 else 1.5
        yield f'<path d="M{x} {y - 4}h20" stroke="{color}" stroke-width="{width}"/>'
        yield _text(x + 28, y, name)
        y += 20
    yield _text(x, y + 16, "groups on")
    for number, name in enumerate(devices):
        y += 20
        box = f'x="{x}" y="{y + 6}" width="20" height="12"'
        yield f'<rect {box} fill="{COLORS[number % len(COLORS)]}"/>'
        yield _text(x + 28, y + 16, name)


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{html.escape(text)}</text>'
