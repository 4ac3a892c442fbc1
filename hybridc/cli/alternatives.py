"""``--alternative``, and what reports say of a bundle's other ways to run its model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from hybridc.cli.output import size
from hybridc.errors import UsageError

if TYPE_CHECKING:
    from hybridc.bundle.manifest import Manifest
    from hybridc.targets.protocol import Device

alternative_option = click.option(
    "--alternative",
    "alternatives",
    multiple=True,
    metavar="KIND[:WHAT]",
    help="A device that runs all of the model where a device before it is missing. Repeatable; the "
    "loader takes the first that it can, and says so.",
)


def read_alternatives(texts: tuple[str, ...], remote: str | None) -> tuple[Device, ...]:
    """The devices of ``--alternative``.

    Raises:
        UsageError: One cannot be read, or there is a server.
    """
    from hybridc.targets.registry import parse_targets

    if texts and remote is not None:
        raise UsageError("--alternative cannot be given with --remote, which makes its own plans")
    return parse_targets(texts)


def alternative_lines(manifest: Manifest) -> list[str]:
    """A line for each other way to run the model, in the order in which they are tried."""
    lines = []
    for way in manifest.ways()[1:]:
        devices = ", ".join(f"{d.name} ({d.kind} for {d.built_for})" for d in way.devices)
        memory = size(sum(part.memory_bytes for part in way.parts))
        left = f", {len(way.fallbacks)} nodes left to ONNX Runtime" if way.fallbacks else ""
        lines.append(f"or else: {devices}, {len(way.parts)} part(s), {memory} memory{left}")
    return lines
