"""``hybridc calibrate build``, ``hybridc calibrate run`` and ``hybridc calibrate train``."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hybridc.bundle.files import write_text
from hybridc.cli.options import bundle_output_option
from hybridc.cli.output import format_option, progress, show, table

if TYPE_CHECKING:
    from hybridc.calibration.build import Report
    from hybridc.calibration.machine import Machine, MachineDevice
    from hybridc.cost_models.learned import LearnedFile


@click.group("calibrate")
def command() -> None:
    """Measure what kernels, copies and launches cost on a machine.

    A bundle of kernels is built where the compiler is, and run where the devices are. What comes
    out is a file for --costs and --profile of compile and plan.

    \b
    Examples:
      hybridc calibrate build --target llvm --target cuda:sm_90 --model model.onnx -o cal/
      hybridc calibrate run cal/ -o machine.json
      hybridc compile model.onnx -o model.hyb --target llvm --target cuda:sm_90 \\
          --costs machine.json
    """


@command.command("build")
@bundle_output_option
@click.option(
    "--target",
    "targets",
    multiple=True,
    default=("llvm",),
    show_default=True,
    metavar="[NAME=]KIND[:WHAT]",
    help="A device to measure, as for compile. Repeatable.",
)
@click.option(
    "--model",
    "models",
    multiple=True,
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="An ONNX file whose groups are to be measured, on every device that can run them. "
    "Repeatable.",
)
@click.option(
    "--shape",
    "shapes",
    multiple=True,
    metavar="NAME=DIMENSIONS",
    help="Sizes of the models' inputs or named dimensions, each a single number. Repeatable.",
)
@click.option(
    "--bind",
    "bindings",
    multiple=True,
    metavar="INPUT=VALUE",
    help="Bind an input of the models to a value, as for compile. Repeatable.",
)
@format_option
def build(
    output: Path,
    targets: tuple[str, ...],
    models: tuple[Path, ...],
    shapes: tuple[str, ...],
    bindings: tuple[str, ...],
    format_: str,
) -> None:
    """Build a bundle of kernels to measure; needs the compiler, and none of the devices."""
    from hybridc.calibration.build import ModelRequest, build_calibration
    from hybridc.errors import UsageError
    from hybridc.frontend.bind import parse_bindings
    from hybridc.frontend.shapes import parse_shapes
    from hybridc.targets.registry import parse_targets

    if (shapes or bindings) and not models:
        raise UsageError("--shape and --bind are about a --model, and none is given")
    sizes, values = parse_shapes(shapes), parse_bindings(bindings)
    requests = [ModelRequest(path, sizes, values) for path in models]
    report = build_calibration(output, parse_targets(targets), requests, progress())
    data = {**dataclasses.asdict(report), "output": str(report.output)}
    show(format_, data, lambda: _build_lines(report))


@command.command("run")
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    required=True,
    metavar="FILE",
    help="Where to write what was measured, as JSON.",
)
@click.option(
    "--seconds",
    type=click.FloatRange(min=0, min_open=True),
    default=0.5,
    show_default=True,
    help="Longest time for a kernel whose figure does not come to rest.",
)
@click.option(
    "--known",
    "known_path",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="A file that was written before on this machine, perhaps OUTPUT itself: only groups that "
    "it lacks are measured, and added to what it says.",
)
@format_option
def run(bundle: Path, output: Path, seconds: float, known_path: Path | None, format_: str) -> None:
    """Measure the kernels of BUNDLE on this machine; needs the loader only.

    Each figure is a median over runs until it rests, with the spread that was seen.
    """
    from hybridc.calibration.known import read_known
    from hybridc.calibration.machine import to_json
    from hybridc.calibration.run import run_calibration

    known = read_known(known_path) if known_path else None
    machine = run_calibration(bundle, seconds, progress(), known=known)
    text = to_json(known.with_more(machine) if known else dataclasses.asdict(machine))
    write_text(output, text, "what was measured")
    show(format_, dataclasses.asdict(machine), lambda: _run_lines(output, machine))


@command.command("train")
@click.argument("machines", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "--kind", default="llvm", show_default=True, help="Kind of target whose devices are learned."
)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Where to write the trees by themselves, as JSON.",
)
@click.option(
    "--into",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="A machine's file: its devices of that kind get the trees, in place of those that come "
    "with hybridc.",
)
@format_option
def train(
    machines: tuple[Path, ...], kind: str, output: Path | None, into: Path | None, format_: str
) -> None:
    """Learn what groups cost from MACHINES, files that run wrote, each with other models.

    What comes out estimates groups that were not measured better than a roofline does. Its error is
    that on files left out, one after the other.
    """
    from hybridc.cost_models.learned import to_json
    from hybridc.cost_models.train import read_sources, store_in_machine
    from hybridc.cost_models.train import train as train_trees
    from hybridc.errors import UsageError

    if output is None and into is None:
        raise UsageError("say where the trees go: --output FILE, or --into a machine's file")
    sources = read_sources(machines, kind)
    devices = ", ".join(sorted({source.profile.name for source in sources}))
    trees = train_trees(sources, kind, f"{len(sources)} measurements of models on: {devices}")
    if output is not None:
        write_text(output, to_json(trees), "the trees")
    if into is not None:
        write_text(into, store_in_machine(trees, into), "the machine's file")
    data = {"kind": kind, "held_out": dataclasses.asdict(trees.held_out)}
    show(format_, data, lambda: _train_lines(trees))


def _train_lines(trees: LearnedFile) -> list[str]:
    found = trees.held_out
    rows = [
        ["median error", "learned", "roofline"],
        ["of a group", f"{found.error:.0%}", f"{found.roofline_error:.0%}"],
        ["of all groups of a file", f"{found.sum_error:.0%}", f"{found.roofline_sum_error:.0%}"],
    ]
    head = f"{trees.kind}: {found.groups} groups of {found.sources} files, each left out once"
    return [head, *table(rows)]


def _build_lines(report: Report) -> list[str]:
    counts = ", ".join(f"{count} for {name}" for name, count in report.kernels.items())
    notes = (f"left out: {note}" for note in report.notes)
    return [f"{report.output}: kernels: {counts}", *notes]


def _run_lines(output: Path, machine: Machine) -> list[str]:
    lines = [f"{output}: {len(machine.devices)} device(s)"]
    for name, device in machine.devices.items():
        lines += [f"{name}: {device.profile.name}", *_device_lines(device)]
    return lines + [f"note: {note}" for note in machine.notes]


def _device_lines(device: MachineDevice) -> list[str]:
    rows = [["figure", "value", "source", "confidence", "runs"]]
    for one in device.figures:
        numbers = [f"{one.value:.4g}", one.source, f"{one.confidence:.0%}", str(one.runs)]
        rows.append([one.name, *numbers])
    spreads = sorted(one.spread for one in device.measurements)
    middle = f"{spreads[len(spreads) // 2]:.1%}" if spreads else "-"
    return [*table(rows), f"  {len(spreads)} groups measured, median spread {middle}"]
