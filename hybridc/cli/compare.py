"""``hybridc compare``."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hybridc.cli.output import format_option, show, table

if TYPE_CHECKING:
    from hybridc.precision.compare import Difference


@click.command("compare")
@click.argument("first", type=click.Path(path_type=Path))
@click.argument("second", type=click.Path(path_type=Path))
@click.option(
    "--data",
    metavar="DATA",
    help="Inputs: a folder with npz or npy files, or module:function. Random ones without it.",
)
@click.option(
    "--samples",
    "count",
    type=click.IntRange(min=1),
    default=3,
    show_default=True,
    help="Number of random samples.",
)
@click.option("--layers", is_flag=True, help="Compare all tensors that two ONNX models both name.")
@click.option(
    "--bound",
    type=click.FloatRange(min=0),
    default=0.1,
    show_default=True,
    help="Relative error above which a row is marked.",
)
@format_option
def command(
    first: Path,
    second: Path,
    data: str | None,
    count: int,
    layers: bool,
    bound: float,
    format_: str,
) -> None:
    """Run FIRST and SECOND on the same inputs and print how much their results differ.

    Each is a bundle, or an ONNX model, which runs in ONNX Runtime. Errors are relative to FIRST.
    """
    from hybridc.precision.compare import (
        layer_differences,
        open_model,
        output_differences,
        random_samples,
    )
    from hybridc.precision.samples import load_samples

    models = [open_model(path) for path in (first, second)]
    if data is None:
        samples = list(random_samples(models, count))
    else:
        samples = list(load_samples(data, models[0].inputs, models[0].sizes))
    outputs = output_differences(models[0], models[1], samples)
    inside = layer_differences(models[0], models[1], samples) if layers else []
    found = {
        "samples": len(samples),
        "bound": bound,
        "outputs": [dataclasses.asdict(difference) for difference in outputs],
        "layers": [dataclasses.asdict(difference) for difference in inside],
    }
    show(format_, found, lambda: _as_lines(len(samples), outputs, inside, bound))


def _as_lines(
    count: int, outputs: list[Difference], inside: list[Difference], bound: float
) -> list[str]:
    lines = [f"worst of {count} sample{'s' * (count != 1)}:", *_rows("output", outputs, bound)]
    if inside:
        lines += ["", *_rows("tensor", inside, bound)]
        bad = sum(difference.relative > bound for difference in inside)
        lines.append(f"{bad} of {len(inside)} tensors differ by more than {bound:g} relative")
    return lines


def _rows(kind: str, differences: list[Difference], bound: float) -> list[str]:
    rows = [[kind, "relative error", "cosine", ""]]
    rows += [
        [d.name, f"{d.relative:.3g}", f"{d.cosine:.6f}", "LARGE" if d.relative > bound else ""]
        for d in differences
    ]
    return table(rows, indent=0)
