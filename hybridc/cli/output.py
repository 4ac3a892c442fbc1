"""What the verbs share: the ``--format`` option, tables, and numbers for people."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import click

_Function = TypeVar("_Function", bound=Callable[..., Any])


def format_option(function: _Function) -> _Function:
    """The option ``--format text|json``."""
    choice = click.Choice(["text", "json"])
    option = click.option(
        "--format", "format_", type=choice, default="text", help="How to print the result."
    )
    return option(function)


def show(format_: str, data: Any, lines: Callable[[], Sequence[str]]) -> None:
    """Print ``data`` as JSON, or the lines that describe it, to standard output."""
    if format_ == "json":
        click.echo(json.dumps(data, indent=2, ensure_ascii=False))
    else:
        click.echo("\n".join(lines()))


def progress() -> Callable[[str], None]:
    """Prints lines of progress, from any thread; raises an interrupt that native code has lost."""
    interrupts = click.get_current_context().obj

    def print_line(line: str) -> None:
        if interrupts:
            raise KeyboardInterrupt
        click.echo(line, err=True)

    return print_line


def table(rows: Sequence[Sequence[str]], indent: int = 2) -> list[str]:
    """Rows as lines with their columns aligned."""
    if not rows:
        return []
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        lines.append((" " * indent + "  ".join(cells)).rstrip())
    return lines


def size(count: int) -> str:
    """A number of bytes in words."""
    value = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000 or unit == "GB":
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    raise AssertionError


def shape(dims: Sequence[int | str]) -> str:
    """A shape as on the command line; ``scalar`` for rank 0."""
    return "x".join(map(str, dims)) or "scalar"


def milliseconds(seconds: float) -> str:
    """A time in words."""
    return f"{seconds * 1e3:.4g} ms"


_UNITS = {"latency": (1e3, "ms"), "throughput": (1e3, "ms"), "energy": (1e3, "mJ")}


def price(objective: str, value: float) -> str:
    """What an objective of the placement came to, with its unit."""
    scale, unit = _UNITS.get(objective, (1e6, "millionths of a dollar"))
    return f"{value * scale:.4g} {unit}"
