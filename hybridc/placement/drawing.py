"""Draw the graph of a plan's groups as SVG: one row for each level, a color for each device.

A group is one row below the lowest of those that it reads. Within a row groups stand in the order
of the middle of what they read, so that most lines run down without crossing. Each box stands under
that middle, as near as its neighbors allow.
"""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from hybridc.placement.plan_file import PlanFile

COLORS = ("#9ecae1", "#fdae6b", "#a1d99b", "#bcbddc", "#fa9fb5", "#fee391", "#c7c7c7", "#66c2a4")
"""Colors of devices, in their order; from the ninth on they come again."""

_WIDTH, _HEIGHT, _GAP, _ROW = 190, 34, 20, 74
_LETTERS = 26
_CALLER = -1


@dataclass(frozen=True)
class Edge:
    """A tensor that one group reads of another, or of the caller, or that the caller reads.

    Attributes:
        tensor: Its name.
        bytes: Its size.
        source: Index of a group; -1 for the caller.
        target: Index of a group; -1 for the caller.
        is_copied: Whether it passes from one device to another.
    """

    tensor: str
    bytes: int
    source: int
    target: int
    is_copied: bool


def edges(plan: PlanFile) -> list[Edge]:
    """Every edge between groups, without those from and to the caller.

    A plan that was made without costs knows none.
    """
    found = []
    for tensor in plan.tensors:
        for reader in tensor.readers:
            if tensor.source != _CALLER:
                apart = plan.groups[tensor.source].device != plan.groups[reader].device
                found.append(Edge(tensor.name, tensor.bytes, tensor.source, reader, apart))
    return found


def colors(plan: PlanFile) -> dict[str, str]:
    """The color of each device that runs something."""
    used = dict.fromkeys(group.device for group in plan.groups)
    names = [device.name for device in plan.devices if device.name in used]
    return {name: COLORS[index % len(COLORS)] for index, name in enumerate(names)}


def positions(count: int, lines: Sequence[Edge]) -> list[tuple[float, int]]:
    """Place of each box: the middle of it across, and its row.

    Args:
        count: Number of groups, which are in topological order.
        lines: What they read of each other.
    """
    read: list[list[int]] = [[] for _ in range(count)]
    for line in lines:
        read[line.target].append(line.source)
    rows: list[int] = []
    members: dict[int, list[int]] = {}
    for index in range(count):
        rows.append(max((rows[source] + 1 for source in read[index]), default=0))
        members.setdefault(rows[-1], []).append(index)
    across = [0.0] * count
    for row in sorted(members):
        _spread(members[row], read, across)
    least = min(across, default=0.0)
    return [(x - least + _WIDTH / 2 + _GAP, row) for x, row in zip(across, rows, strict=True)]


def _spread(own: list[int], read: Sequence[Sequence[int]], across: list[float]) -> None:
    """Put the boxes of a row under the middle of what they read, none over another."""
    wanted = {
        index: sum(across[source] for source in read[index]) / len(read[index])
        if read[index]
        else 0.0
        for index in own
    }
    own.sort(key=lambda index: (wanted[index], index))
    step = _WIDTH + _GAP
    places: list[float] = []
    for index in own:
        places.append(max(wanted[index], places[-1] + step if places else wanted[index]))
    shift = sum(p - wanted[i] for p, i in zip(places, own, strict=True)) / max(len(own), 1)
    for index, place in zip(own, places, strict=True):
        across[index] = place - shift


def draw(plan: PlanFile) -> str:
    """The drawing as an ``svg`` element; each box has its index as ``data-group``."""
    lines = edges(plan)
    spots = positions(len(plan.groups), lines)
    width = max((x for x, _ in spots), default=0.0) + _WIDTH / 2 + _GAP
    height = (max((row for _, row in spots), default=0) + 1) * _ROW
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height}" '
        f'viewBox="0 0 {width:.0f} {height}">'
    )
    return "\n".join([head, *_lines(lines, spots), *_boxes(plan, spots, colors(plan)), "</svg>"])


def _lines(lines: Sequence[Edge], spots: Sequence[tuple[float, int]]) -> Iterator[str]:
    for line in lines:
        (x, row), (u, other) = spots[line.source], spots[line.target]
        y, v = row * _ROW + _GAP / 2 + _HEIGHT, other * _ROW + _GAP / 2
        bend = max((v - y) / 2, 12)
        kind = "copy" if line.is_copied else "edge"
        title = html.escape(f"{line.tensor}: {line.bytes} bytes")
        yield (
            f'<path class="{kind}" d="M{x:.1f} {y:.1f}C{x:.1f} {y + bend:.1f} '
            f'{u:.1f} {v - bend:.1f} {u:.1f} {v:.1f}"><title>{title}</title></path>'
        )


def _boxes(
    plan: PlanFile, spots: Sequence[tuple[float, int]], shades: Mapping[str, str]
) -> Iterator[str]:
    for index, (group, (x, row)) in enumerate(zip(plan.groups, spots, strict=True)):
        left, top = x - _WIDTH / 2, row * _ROW + _GAP / 2
        operators = "+".join(node.operator for node in group.work.nodes) if group.work else ""
        title = html.escape(f"{group.name} on {group.device}: {group.reason}")
        yield (
            f'<g class="group" data-group="{index}" tabindex="0"><title>{title}</title>'
            f'<rect x="{left:.1f}" y="{top:.1f}" width="{_WIDTH}" height="{_HEIGHT}" rx="4" '
            f'fill="{shades[group.device]}"/>'
            f'<text x="{x:.1f}" y="{top + 14:.1f}">{html.escape(_short(group.name))}</text>'
            f'<text x="{x:.1f}" y="{top + 27:.1f}" class="small">{html.escape(_short(operators))}'
            "</text></g>"
        )


def _short(text: str) -> str:
    """A text that fits into a box."""
    return text if len(text) <= _LETTERS else f"{text[: _LETTERS - 8]}…{text[-7:]}"
