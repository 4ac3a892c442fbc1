"""``hybridc compile``."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hybridc.cli.alternatives import (
    alternative_lines,
    alternative_option,
    read_alternatives,
)
from hybridc.cli.hybrid import plan_table, read_server, refuse_alone, server_options
from hybridc.cli.options import bundle_output_option, cache_options, read_cache
from hybridc.cli.output import format_option, progress, show, size, table
from hybridc.cli.placing import (
    Asked,
    compile_options,
    cost_options,
    model_options,
    read_plan,
    rule_options,
)
from hybridc.cli.precision import compile_function, precision_options
from hybridc.cli.tuning import read_tuning, tuning_options

if TYPE_CHECKING:
    from hybridc.compiler import Options, Report
    from hybridc.frontend.pipe import Stage
    from hybridc.placement.plan_file import PlanFile


@click.command("compile")
@click.argument(
    "models", metavar="MODEL...", nargs=-1, required=True, type=click.Path(path_type=Path)
)
@bundle_output_option
@model_options
@rule_options
@cost_options
@click.option(
    "--pipe",
    "pipes",
    multiple=True,
    metavar="A:OUTPUT=B:INPUT",
    help="Feed an output of one model to an input of a later one; both by their files' names. "
    "Repeatable.",
)
@click.option(
    "--step",
    "steps",
    multiple=True,
    metavar="MODEL=MODULE:FUNCTION",
    help="Run a Python function of yours before a model, which gives all inputs of that model; the "
    "output is a folder with a chain of bundles. Repeatable.",
)
@click.option(
    "--plan",
    "plan_file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Place the nodes as this plan does, which hybridc plan wrote and you may have edited. "
    "Targets, shapes, bindings and rules that are not given are the plan's.",
)
@click.option(
    "--sample",
    "samples",
    multiple=True,
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Inputs to check the bundle with, as npz or npy. Repeatable; without it they are random.",
)
@click.option(
    "--tolerance",
    type=click.FloatRange(min=0),
    default=1e-4,
    show_default=True,
    help="Largest error allowed, relative to an output's largest magnitude.",
)
@click.option(
    "--no-fallback",
    is_flag=True,
    help="Refuse a model with nodes that no target compiles, instead of leaving them to ONNX "
    "Runtime.",
)
@alternative_option
@click.option("--no-verify", is_flag=True, help="Do not compare with the reference at the end.")
@click.option(
    "--strict-math",
    is_flag=True,
    help="Only kernels that change sums in nothing but their order: no Winograd convolutions, and "
    "16-bit floats are rounded at every operator.",
)
@precision_options
@cache_options
@tuning_options
@server_options
@format_option
def command(
    models: tuple[Path, ...],
    output: Path,
    plan_file: Path | None,
    samples: tuple[Path, ...],
    format_: str,
    **values: Any,
) -> None:
    """Compile the ONNX file MODEL to a bundle; or several to one, joined by --pipe.

    The bundle holds everything that running it needs. At the end it is loaded in a fresh process
    and its results are compared with ONNX Runtime's; if they differ, nothing is written.

    \b
    Examples:
      hybridc compile squeezenet.onnx -o squeezenet.hyb
      hybridc compile detector.onnx -o detector/ --shape x=1x3x640x640
      hybridc compile model.onnx -o model.hyb --target llvm:0 --target llvm:1 --pin 'head*=llvm:1'
    """
    with _collecting_later():
        import hybridc.compiler  # noqa: F401
        from hybridc.frontend.pipe import split_stages

    if values["remote"] is None:
        refuse_alone()
    plan = read_plan(plan_file) if plan_file is not None else None
    stages = split_stages(models, values["pipes"], values["steps"])
    compile_stage = partial(_compile_stage, plan, len(stages) > 1)
    if len(stages) == 1:
        report = compile_stage(stages[0], output, values, samples)
        show(format_, _as_json(report), lambda: _as_lines(report))
        return
    from hybridc.cli.chain import compile_chain

    values = {**values, "plan_file": plan_file}
    reports = compile_chain(stages, output, values, samples, compile_stage)
    data = {name: _as_json(report) for name, report in reports.items()}
    show(format_, data, lambda: [line for own in reports.values() for line in _as_lines(own)])


def _compile_stage(
    plan: PlanFile | None,
    prefixed: bool,
    stage: Stage,
    output: Path,
    values: Mapping[str, Any],
    samples: Sequence[Path],
) -> Report:
    """Compile one stage, for this machine alone or for it and a server."""
    from hybridc.frontend.pipe import joined_models

    options = _read_options(Asked(values, plan), samples)
    compile_here = compile_function(values)
    server = read_server(output, values) if options.remote is not None else None
    with joined_models(stage.paths, stage.pipes, prefixed=prefixed) as model:
        if server is None:
            return compile_here(model, output, options, progress())
        from hybridc.remote.compile import compile_hybrid

        return compile_hybrid(model, output, options, server, progress())


def _read_options(asked: Asked, samples: Sequence[Path]) -> Options:
    from hybridc.compiler import Options

    known, values = compile_options(asked), asked.values
    return Options(
        **known,
        alternatives=read_alternatives(values["alternatives"], known["remote"]),
        samples=tuple(samples),
        tolerance=values["tolerance"],
        fallback=not values["no_fallback"],
        isolate=True,
        verify=not values["no_verify"],
        strict_math=values["strict_math"],
        cache=read_cache(values["cache"], values["no_cache"]),
        tuning=read_tuning(values, known["devices"]),
    )


@contextmanager
def _collecting_later() -> Iterator[None]:
    """Garbage is not looked for while modules are imported, nor ever in what they leave behind.

    The compiler's modules are a million objects that stay, and collections walk all objects.
    """
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        gc.enable()


def _as_json(report: Report) -> dict[str, Any]:
    return {
        "output": str(report.output),
        "manifest": dataclasses.asdict(report.manifest),
        "notes": list(report.notes),
        "errors": [dict(error) for error in report.errors],
    }


def _as_lines(report: Report) -> list[str]:
    manifest = report.manifest
    total = sum(file.bytes for file in manifest.files)
    lines = [f"{report.output}: {size(total)} in {len(manifest.parts)} part(s)"]
    rows = [
        [part.name, part.device, f"{len(part.nodes)} nodes", f"{size(part.memory_bytes)} memory"]
        for part in manifest.parts
    ]
    lines += table(rows)
    lines += alternative_lines(manifest)
    lines += plan_table(manifest)
    if manifest.fallbacks:
        lines.append(f"{len(manifest.fallbacks)} nodes are left to ONNX Runtime:")
        lines += table([[f.node, f.operator, f.reason] for f in manifest.fallbacks])
    if report.errors:
        lines += _error_lines(report)
    return lines + [f"note: {note}" for note in report.notes]


def _error_lines(report: Report) -> list[str]:
    """The largest error; one for each plan if tensors cross in fewer bytes by some."""
    manifest = report.manifest
    parts = [part for plan in manifest.plans for part in plan.parts]
    by_plan = any(part.remote and part.remote.encodings for part in parts)
    worst: dict[str, float] = {}
    for error in report.errors:
        whose = f" by {error['plan']}" if by_plan else ""
        worst[whose] = max(worst.get(whose, 0.0), float(error["error"]))
    reference = manifest.samples[0].reference if manifest.samples else "the reference"
    head = f"largest error against {reference}"
    return [f"{head}{whose}: {value:.2g} relative" for whose, value in worst.items()]
