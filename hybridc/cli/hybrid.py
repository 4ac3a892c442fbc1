"""Options and tables about a server at the other end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hybridc.bundle.manifest import CrossingSpec, Manifest, PlanSpec, PriceSpec
from hybridc.cli.options import Function, with_options
from hybridc.cli.output import milliseconds, size, table
from hybridc.errors import UsageError

if TYPE_CHECKING:
    from hybridc.remote.repository import ServerOptions

_OPTIONS = (
    click.option(
        "--repository",
        type=click.Path(path_type=Path),
        metavar="FOLDER",
        help="Where to write Triton's model repository; beside the bundle if not given.",
    ),
    click.option(
        "--remote-version",
        type=click.IntRange(min=1),
        default=1,
        help="Version of the models in the repository; others stay there and are served too.",
    ),
    click.option(
        "--remote-batch",
        type=click.IntRange(min=0),
        default=0,
        help="Rows of requests that the server runs at once; needs a range as in --shape "
        "batch=1..8.",
    ),
    click.option(
        "--remote-delay",
        default="1ms",
        metavar="TIME",
        help="How long the server lets a request wait for others to run with it.",
    ),
    click.option(
        "--remote-instances",
        type=click.IntRange(min=1),
        default=1,
        help="How many of each model run on the server at a time.",
    ),
    click.option(
        "--remote-warm-up", is_flag=True, help="Let the server run each model before it serves."
    ),
    click.option(
        "--remote-plans",
        type=click.IntRange(min=1),
        default=3,
        help="Most plans with a server that the bundle holds, beside the one without.",
    ),
    click.option(
        "--remote-precision",
        type=click.Choice(["fp32", "fp16", "int8"]),
        default="fp32",
        help="What large tensors of floating-point numbers cross as.",
    ),
    click.option(
        "--remote-updates",
        is_flag=True,
        help="Let the server's part be replaced without another edge bundle: it holds nothing of "
        "it, so no local plan, and takes any version that was compiled for the same edge.",
    ),
    click.option(
        "--requests-per-second",
        type=click.FloatRange(min=0, min_open=True),
        metavar="RATE",
        help="How often the model is run, all devices together: with --objective cost, the plan is "
        "taken that costs least at this rate.",
    ),
    click.option(
        "--kserve",
        metavar="URI",
        help="Write kserve.yaml for a repository that KServe finds at this address.",
    ),
)


def server_options(function: Function) -> Function:
    """How the server's side is written."""
    return with_options(_OPTIONS, function)


def read_server(output: Path, values: Mapping[str, Any]) -> ServerOptions:
    """The server's side, by options of the command line with ``--remote``.

    Raises:
        UsageError: One cannot be read.
    """
    from hybridc.cost_models.link import parse_seconds
    from hybridc.remote.repository import ServerOptions, model_name

    if values.get("precision", "fp32") != "fp32":
        raise UsageError(
            f"--precision {values['precision']} cannot be given with --remote; write the model "
            "with --keep-model first, and compile that with --remote"
        )
    try:
        delay = parse_seconds(values["remote_delay"])
    except ValueError as error:
        raise UsageError(f"--remote-delay: {error}") from error
    name = model_name(output.stem)
    return ServerOptions(
        values["repository"] or output.with_name(f"{name}-repository"),
        name,
        values["remote_version"],
        values["remote_plans"],
        values["remote_batch"],
        delay,
        values["remote_instances"],
        values["remote_warm_up"],
        values["kserve"],
        *_encoding(values),
        values["remote_updates"],
        values["requests_per_second"],
    )


def _encoding(values: Mapping[str, Any]) -> tuple[str | None, float | None]:
    """What tensors cross as, and the tolerance of plans in which they do."""
    from hybridc.cli.placing import is_given
    from hybridc.runtime.remote_encoding import BYTE, HALF, TOLERANCE

    dtype = {"fp32": None, "fp16": HALF, "int8": BYTE}[values["remote_precision"]]
    if dtype is None or is_given("tolerance"):
        return dtype, None
    return dtype, TOLERANCE[dtype]


def refuse_alone() -> None:
    """Refuse options about a server where there is none.

    Raises:
        UsageError: One was given.
    """
    from hybridc.cli.placing import is_given

    for option in _NAMES:
        if is_given(option):
            raise UsageError(f"--{option.replace('_', '-')} needs --remote")


_NAMES = (
    "repository",
    "remote_version",
    "remote_batch",
    "remote_delay",
    "remote_instances",
    "remote_warm_up",
    "remote_plans",
    "remote_precision",
    "remote_updates",
    "requests_per_second",
    "kserve",
)


def plan_table(manifest: Manifest) -> list[str]:
    """The plans of a bundle, and what crosses by each of them."""
    if not manifest.plans or manifest.link is None:
        return []
    link = manifest.link
    rate = link.bytes_per_second * 8e-6
    lines = [f"plans, the {_first_by(manifest)} at {rate:g} Mbit/s first:"]
    rows = [["plan", "here", "server", "crosses", "models"]]
    for plan in manifest.plans:
        models = [part.remote.model for part in plan.parts if part.remote]
        times = [milliseconds(seconds) for seconds in (plan.edge_seconds, plan.server_seconds)]
        rows.append([plan.name, *times, size(plan.bytes), ", ".join(models) or "-"])
    lines += [*table(rows), *_price_lines(manifest.plans)]
    for plan in manifest.plans:
        if plan.crossings:
            lines += [f"what crosses by {plan.name}:", *crossing_table(plan.crossings)]
    return lines


def _first_by(manifest: Manifest) -> str:
    return "cheapest" if manifest.plans[0].price else "best"


def _price_lines(plans: Sequence[PlanSpec]) -> list[str]:
    """What plans cost, the cheapest first, and at which rates they cost the same."""
    priced = [(plan, plan.price) for plan in plans if plan.price]
    if not priced:
        return []
    lines = [f"prices at {priced[0][1].requests_per_second:g} requests per second:"]
    lines += table([[plan.name, _hourly(price)] for plan, price in priced])
    local = next((price for plan, price in priced if not plan.round_trips), None)
    if local is None:
        return lines
    for plan, price in priced:
        if plan.round_trips:
            lines.append(_break_even(plan.name, price, local))
    return lines


def _hourly(price: PriceSpec) -> str:
    runs = price.requests_per_second * 3600e-6
    each = price.dollars_per_hour / runs
    return f"{price.dollars_per_hour:.4g} dollars per hour, {each:.4g} per million requests"


def _break_even(name: str, price: PriceSpec, local: PriceSpec) -> str:
    """At which rates a plan and the one without the server cost the same."""
    rate, rates = price.requests_per_second, price.break_even
    is_cheaper = price.dollars_per_hour < local.dollars_per_hour
    if not rates:
        return f"{name} costs {'less' if is_cheaper else 'no less'} than local at any rate"
    text = f"{name} costs the same as local at " + " and ".join(f"{r:.4g}" for r in rates)
    if len(rates) > 1 or rate == rates[0]:
        return f"{text} requests per second"
    side = "below" if is_cheaper == (rate < rates[0]) else "above"
    return f"{text} requests per second, and less {side}"


def crossing_table(crossings: Sequence[CrossingSpec]) -> list[str]:
    """What crosses, how large it is against the raw inputs, and why it may."""
    return table(
        [
            [c.tensor, c.source, "->", c.destination, size(c.bytes), f"{c.share:.1%}", c.reason]
            for c in crossings
        ]
    )
