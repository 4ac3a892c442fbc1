"""``hybridc plan``."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hybridc.bundle.files import write_text
from hybridc.cli.explain import html_option
from hybridc.cli.output import format_option, show
from hybridc.cli.placing import Asked, compile_options, cost_options, model_options, rule_options

if TYPE_CHECKING:
    from hybridc.placement.plan_file import PlanFile


@click.command("plan")
@click.argument("model", type=click.Path(path_type=Path))
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Where to write the plan, as JSON.",
)
@model_options
@rule_options
@cost_options
@click.option(
    "--sweep",
    metavar="NAME=VALUES",
    help="Plan for several sizes of a dynamic dimension, as in batch=1,2,4..64, or figures of all "
    "links, as in link.bandwidth=1gbit..64gbit or link.latency=1us..1ms, and show where the "
    "placement changes.",
)
@click.option(
    "--plot",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Draw the sweep, as SVG.",
)
@html_option
@click.option(
    "--save-model",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write the simplified model as ONNX too, with the device and the reason of each node as "
    "metadata.",
)
@click.option("--no-fallback", is_flag=True, help="Refuse nodes that no target compiles.")
@format_option
def command(
    model: Path,
    output: Path | None,
    sweep: str | None,
    plot: Path | None,
    html: Path | None,
    save_model: Path | None,
    no_fallback: bool,
    format_: str,
    **values: Any,
) -> None:
    """Place the ONNX file MODEL on devices by cost, without compiling it.

    The devices need not be here: profiles say what they can do. The plan can be edited and given
    to compile with --plan, and explain tells why each node is where it is.

    \b
    Examples:
      hybridc plan model.onnx --target llvm:znver3 --target cuda:sm_90
      hybridc plan model.onnx -o plan.json --target llvm --target cuda \\
          --profile llvm:0=zen3 --profile cuda:0=l4 --link llvm:0-cuda:0=100gbit,10us
    """
    from hybridc.cli.explain import plan_lines, write_html
    from hybridc.cli.sweep import run_sweep, sweep_drawing, sweep_lines
    from hybridc.errors import UsageError
    from hybridc.placement.plan_file import plan_to_json

    def plan_for(shapes: Sequence[str]) -> PlanFile:
        return _plan(model, {**values, "shapes": tuple(shapes)}, not no_fallback, save_model)

    if sweep is not None:
        if output or html or save_model:
            raise UsageError("--sweep makes several plans; leave --output and other files out")
        data = run_sweep(sweep, values["shapes"], plan_for)
        if plot is not None:
            write_text(plot, sweep_drawing(data), "the drawing")
        show(format_, data, lambda: sweep_lines(data))
        return
    if plot is not None:
        raise UsageError("--plot draws a --sweep, and none is given")
    plan = plan_for(values["shapes"])
    if output is not None:
        write_text(output, plan_to_json(plan), "the plan")
    if html is not None:
        write_html(plan, html)
    show(format_, dataclasses.asdict(plan), lambda: plan_lines(plan))


def _plan(
    model: Path, values: Mapping[str, Any], fallback: bool, save_model: Path | None
) -> PlanFile:
    """A plan, by options of the command line."""
    from hybridc.compiler import Options, plan_model
    from hybridc.errors import UsageError
    from hybridc.frontend.read import read_model

    options = compile_options(Asked(values))
    if options["hardware"] is None:
        names = ", ".join(device.name for device in options["devices"])
        raise UsageError(f"a plan needs to know the devices: give a --profile for {names}")
    graph_model, _, plan, _ = plan_model(
        read_model(model), Options(**options, fallback=fallback, isolate=True)
    )
    if save_model is not None:
        from hybridc.placement.annotate import save_annotated

        save_annotated(graph_model, plan, save_model)
    return plan
