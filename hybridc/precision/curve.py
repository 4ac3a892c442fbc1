"""The curve of accuracy against predicted latency and size, as JSON, a table or a plot in SVG."""

from __future__ import annotations

import dataclasses
import html
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from hybridc.bundle.files import replacing
from hybridc.errors import UsageError
from hybridc.precision.search import Found, Point

SUFFIXES = (".json", ".md", ".svg")

_WIDTH, _HEIGHT, _LEFT, _TOP, _GAP = 300, 220, 90, 40, 100


def check_suffix(path: Path) -> None:
    """Refuse a file of another kind.

    Raises:
        UsageError: Its suffix is none of ``SUFFIXES``.
    """
    if path.suffix not in SUFFIXES:
        raise UsageError(f"--trade-off {path}: its suffix is none of {', '.join(SUFFIXES)}")


def write_curve(found: Found, path: Path) -> None:
    """Write the curve in the form that the file's suffix asks for."""
    texts = {".json": as_json, ".md": as_table, ".svg": as_svg}
    with replacing(path) as beside:
        beside.write_text(texts[path.suffix](found), "utf-8")


def auto_notes(found: Found) -> list[str]:
    """Lines for the report: what was chosen, and why layers stay float."""
    none, chosen = found.points[0], found.point(found.chosen)
    wide = f", {len(found.wide)} in int16" if found.wide else ""
    lines = [
        f"{len(found.names)} of {len(found.layers)} convolutions and matrix products are in int8"
        f"{wide}: "
        f"predicted {1e3 * chosen.seconds:.3g} ms in place of {1e3 * none.seconds:.3g} "
        f"(profile {found.profile}), weights {chosen.bytes / 1e6:.3g} MB in place of "
        f"{none.bytes / 1e6:.3g}; {found.metric} {chosen.value:.6g} on samples of the calibration"
    ]
    lines += [
        f"{layer.name} stays fp32: {layer.reason} (alone it makes the cosine {1 - layer.error:.6f})"
        for layer in found.layers
        if layer.precision == "fp32"
    ]
    return lines


def as_json(found: Found) -> str:
    """All that was found."""
    return json.dumps(dataclasses.asdict(found), indent=1) + "\n"


def as_table(found: Found) -> str:
    """The points, and then the layers, in Markdown."""
    lines = [f"| layers in integers | {found.metric} | predicted ms | weights in MB | |"]
    lines.append("|---|---|---|---|---|")
    for point in found.points:
        mark = "chosen" if point.count == found.chosen else "" if point.is_kept else "over budget"
        row = [str(point.count), f"{point.value:.6f}", f"{1e3 * point.seconds:.3f}"]
        lines.append(f"| {' | '.join(row)} | {point.bytes / 1e6:.2f} | {mark} |")
    lines += ["", "| layer | 1 - cosine alone | predicted us saved | precision | |"]
    lines.append("|---|---|---|---|---|")
    for layer in found.layers:
        name = layer.name.replace("|", "\\|")
        figures = f"{layer.error:.2e} | {1e6 * layer.saved_seconds:.1f}"
        lines.append(f"| {name} | {figures} | {layer.precision} | {layer.reason} |")
    return "\n".join(lines) + "\n"


def as_svg(found: Found) -> str:
    """Two plots of the metric, over latency and over size; the chosen point is filled."""
    width = 2 * (_LEFT + _WIDTH) + _GAP
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{_HEIGHT + 2 * _TOP}" '
        'font-family="sans-serif" font-size="11">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    values = [point.value for point in found.points]
    plots = (
        ("predicted ms", [1e3 * point.seconds for point in found.points]),
        ("weights in MB", [point.bytes / 1e6 for point in found.points]),
    )
    for index, (label, across) in enumerate(plots):
        left = _LEFT + index * (_LEFT + _WIDTH + _GAP // 2)
        lines += _plot(found, left, label, across, values)
    return "\n".join([*lines, "</svg>"]) + "\n"


def _plot(
    found: Found, left: int, label: str, across: Sequence[float], values: Sequence[float]
) -> Iterator[str]:
    """Axes with their ends, a line through the points, and the bound."""
    low, high = _ends(across)
    bottom, top = _ends([*values, found.bound])

    def place(x: float, y: float) -> tuple[float, float]:
        return (
            left + _WIDTH * (x - low) / (high - low),
            _TOP + _HEIGHT * (top - y) / (top - bottom),
        )

    yield (
        f'<rect x="{left}" y="{_TOP}" width="{_WIDTH}" height="{_HEIGHT}" fill="none" '
        'stroke="#888"/>'
    )
    level = place(low, found.bound)[1]
    yield (
        f'<line x1="{left}" x2="{left + _WIDTH}" y1="{level:.1f}" y2="{level:.1f}" '
        'stroke="#c33" stroke-dasharray="4 3"/>'
    )
    places = [place(x, y) for x, y in zip(across, values, strict=True)]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    yield f'<polyline points="{line}" fill="none" stroke="#369"/>'
    for point, (x, y) in zip(found.points, places, strict=True):
        yield _dot(point, point.count == found.chosen, x, y)
    yield f'<text x="{left}" y="{_TOP + _HEIGHT + 14}">{low:.4g}</text>'
    yield (
        f'<text x="{left + _WIDTH}" y="{_TOP + _HEIGHT + 14}" text-anchor="end">{high:.4g}</text>'
    )
    middle = left + _WIDTH // 2
    yield f'<text x="{middle}" y="{_TOP + _HEIGHT + 28}" text-anchor="middle">{label}</text>'
    for number, height in ((top, _TOP + 8), (bottom, _TOP + _HEIGHT)):
        yield f'<text x="{left - 6}" y="{height}" text-anchor="end">{number:.6g}</text>'
    yield f'<text x="{left}" y="{_TOP - 10}">{html.escape(found.metric)}</text>'


def _dot(point: Point, is_chosen: bool, x: float, y: float) -> str:
    fill = "#369" if is_chosen else "white"
    title = f"{point.count} layers: {point.value:.6f}"
    return (
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{5 if is_chosen else 3}" fill="{fill}" '
        f'stroke="#369"><title>{title}</title></circle>'
    )


def _ends(numbers: Sequence[float]) -> tuple[float, float]:
    """The smallest and the largest number, apart from each other."""
    low, high = min(numbers), max(numbers)
    return (low, high) if high > low else (low - 0.5, high + 0.5)
