"""``hybridc explain``."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hybridc.bundle.files import write_text
from hybridc.cli.hybrid import crossing_table
from hybridc.cli.output import format_option, milliseconds, price, show, size, table
from hybridc.cli.placing import OBJECTIVES, parse_profiles, read_plan
from hybridc.errors import UsageError

if TYPE_CHECKING:
    from hybridc.placement.plan_file import PlanCost, PlanFile, PlanGroup, Prediction
    from hybridc.placement.reconsider import Change

html_option = click.option(
    "--html",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write the plan as one HTML page too, with the graph drawn and colored by device.",
)

_NAMES = {"throughput": "slowest stage"}


@click.command("explain")
@click.argument("plan", type=click.Path(path_type=Path))
@click.argument("node", required=False)
@click.option(
    "--profile",
    "profiles",
    multiple=True,
    metavar="DEVICE=PROFILE",
    help="What would change if a device were another. Repeatable.",
)
@click.option(
    "--link",
    "links",
    multiple=True,
    metavar="A-B=RATE,DELAY",
    help="What would change if a link were another. Repeatable.",
)
@click.option(
    "--objective", type=click.Choice(OBJECTIVES), help="What would change for this objective."
)
@click.option(
    "--solve-seconds",
    type=click.FloatRange(min=0, min_open=True),
    default=10.0,
    show_default=True,
    help="Time to search for another placement.",
)
@html_option
@format_option
def command(
    plan: Path,
    node: str | None,
    profiles: tuple[str, ...],
    links: tuple[str, ...],
    objective: str | None,
    solve_seconds: float,
    html: Path | None,
    format_: str,
) -> None:
    """Say why the nodes of PLAN, a plan's file or a bundle, are where they are.

    With NODE, about that node alone. With --profile, --link or --objective, what would be different
    then; the hardware need not be here.

    \b
    Examples:
      hybridc explain model.hyb
      hybridc explain plan.json conv1
      hybridc explain plan.json --profile cuda:0=l4
    """
    from hybridc.placement.reconsider import as_edited, reconsider

    before = as_edited(read_plan(plan))
    if html is not None:
        if node or profiles or links or objective:
            raise UsageError("--html is about the plan as it is; leave other options out")
        write_html(before, html)
    if profiles or links or objective:
        change = _change(before, profiles, links, objective, solve_seconds)
        after = reconsider(before, change)
        moved = _moved(before, after)
        data: dict[str, Any] = {"plan": dataclasses.asdict(after), "moved": moved}
        show(format_, data, lambda: _change_lines(before, after, moved, node))
        return
    if node is None:
        show(format_, dataclasses.asdict(before), lambda: _all_lines(before))
        return
    group = find_group(before, node)
    show(
        format_,
        dataclasses.asdict(group),
        lambda: [*_merged_lines(before, node), *group_lines(before, group)],
    )


def write_html(plan: PlanFile, path: Path) -> None:
    """Write a plan as one HTML page.

    Raises:
        UsageError: The file cannot be written.
    """
    from hybridc.placement.report import html_report

    texts = ["\n".join(group_lines(plan, group)) for group in plan.groups]
    write_text(path, html_report(plan, plan_lines(plan), texts), "the report")


def _change(
    plan: PlanFile,
    profiles: tuple[str, ...],
    links: tuple[str, ...],
    objective: str | None,
    seconds: float,
) -> Change:
    from hybridc.cost_models.link import parse_links
    from hybridc.cost_models.load import load_device
    from hybridc.cost_models.measured import Code
    from hybridc.placement.reconsider import Change

    names = [device.name for device in plan.devices]
    kinds = {d.name: Code(d.kind, d.specification, {}) for d in plan.devices}
    given = parse_profiles(profiles, names)
    models = {name: load_device(profile, kinds[name], name) for name, profile in given.items()}
    return Change(models, parse_links(links, names), objective, seconds)


def find_group(plan: PlanFile, node: str) -> PlanGroup:
    """The group that holds a node, or what became of it.

    Raises:
        UsageError: None does.
    """
    import difflib

    wanted = plan.merged.get(node, node)
    for group in plan.groups:
        if wanted in group.nodes:
            return group
    names = [name for group in plan.groups for name in group.nodes]
    close = difflib.get_close_matches(node, names, 1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    raise UsageError(f"the plan has no node {node!r}{hint}")


def _merged_lines(plan: PlanFile, node: str) -> list[str]:
    """What became of a node that simplifying took away."""
    if node not in plan.merged:
        return []
    return [f"{node} was merged when the model was simplified; its result goes to this group:"]


def _moved(before: PlanFile, after: PlanFile) -> list[dict[str, str]]:
    pairs = zip(before.groups, after.groups, strict=True)
    return [
        {"group": old.name, "from": old.device, "to": new.device}
        for old, new in pairs
        if old.device != new.device
    ]


def plan_lines(plan: PlanFile) -> list[str]:
    """A plan in a few lines: what it costs, which device does what, and what is copied."""
    used = {group.device for group in plan.groups}
    head = f"{plan.model}: {len(plan.groups)} groups on {len(used)} device(s)"
    prediction = plan.prediction
    if prediction is None:
        return [head, *_device_table(plan), *(f"note: {note}" for note in plan.notes)]
    lines = [head, *_figure_lines(prediction), *_device_table(plan)]
    if plan.transfers:
        lines.append("copies:")
        lines += table(
            [
                [t.tensor, t.source, "->", t.destination, size(t.bytes), milliseconds(t.seconds)]
                for t in plan.transfers
            ]
        )
    if plan.audit:
        lines += ["what crosses to and from the server:", *crossing_table(plan.audit)]
    counts = Counter(group.why for group in plan.groups)
    reasons = ", ".join(f"{why} {count}" for why, count in counts.most_common())
    lines.append(f"groups by reason: {reasons}")
    return lines + [f"note: {note}" for note in plan.notes]


def _figure_lines(prediction: Prediction) -> list[str]:
    name = prediction.objective
    value = price(prediction.objective, prediction.value)
    bound = price(prediction.objective, prediction.bound)
    proof = f"at most {prediction.gap:.1%} from the best (bound {bound})"
    if prediction.gap <= 1e-6:
        proof = "no plan is better"
    lines = [f"{_NAMES.get(name, name)} {value}, {proof}; solver: {prediction.solver}"]
    rows = [
        ["one run", milliseconds(prediction.latency_seconds)],
        ["as a pipeline", f"{prediction.runs_per_second:.4g} runs per second"],
        ["confidence", f"{prediction.confidence:.0%}"],
    ]
    if prediction.joules is not None:
        rows.append(["energy", f"{prediction.joules * 1e3:.4g} mJ"])
    rows += [
        [f"{label} instead", price(prediction.objective, other)]
        for label, other in prediction.alternatives.items()
    ]
    return lines + table(rows)


def _device_table(plan: PlanFile) -> list[str]:
    counts = Counter(group.device for group in plan.groups)
    rows = [["device", "groups", "busy", "memory", "profile"]]
    for device in plan.devices:
        if device.is_fallback and not counts[device.name]:
            continue
        busy, memory = "-", "-"
        if plan.prediction is not None:
            busy = milliseconds(plan.prediction.busy_seconds.get(device.name, 0.0))
            memory = size(plan.prediction.memory_bytes.get(device.name, 0))
        profile = device.profile
        text = f"{profile.name} ({profile.source})" if profile else "not known"
        rows.append([device.name, str(counts[device.name]), busy, memory, text])
    return table(rows)


def _all_lines(plan: PlanFile) -> list[str]:
    rows = [["node", "operators", "device", "why", "reason"]]
    for group in plan.groups:
        rows.append([group.name, _operators(group), group.device, group.why, group.reason])
    return [*plan_lines(plan), "groups:", *table(rows)]


def _operators(group: PlanGroup) -> str:
    if group.work is None:
        return f"{len(group.nodes)} nodes"
    return "+".join(node.operator for node in group.work.nodes)


def group_lines(plan: PlanFile, group: PlanGroup) -> list[str]:
    """All about one group."""
    lines = [
        f"{group.name} runs on {group.device}: {group.why}",
        f"  {group.reason}",
    ]
    if len(group.nodes) > 1:
        lines.append(f"computed in one kernel: {', '.join(group.nodes)}")
    if group.costs:
        rows = [["device", "time", "source", "confidence", "copies", "in all"]]
        rows += [_cost_row(plan, group, cost) for cost in group.costs]
        lines += ["if it ran elsewhere, all else as it is:", *table(rows), *_source_lines(group)]
    for device, text in group.refused.items():
        lines.append(f"{device} cannot compile it: {text}")
    for device, text in group.excluded.items():
        lines.append(f"not on {device}: {text}")
    return lines


_FROM = {
    "learned": "trees that were trained on measurements of other models",
    "calibrated": "a roofline that was fitted to measurements of the device",
}


def _source_lines(group: PlanGroup) -> list[str]:
    """How far off times are that were not measured, by what left-out groups showed."""
    found = {(cost.source, f"{1 - cost.confidence:.0%}") for cost in group.costs}
    return [
        f"  {source}: {_FROM[source]}; median error {error} on groups left out of that"
        for source, error in sorted(found)
        if source in _FROM
    ]


def _cost_row(plan: PlanFile, group: PlanGroup, cost: PlanCost) -> list[str]:
    changes = ["not allowed", ""]
    prediction = plan.prediction
    if cost.device == group.device:
        changes = ["here", ""]
    elif prediction and cost.moved is not None and cost.copies is not None:
        changes = [_signed(prediction, cost.copies), _signed(prediction, cost.moved)]
    return [
        cost.device,
        milliseconds(cost.seconds),
        cost.source,
        f"{cost.confidence:.0%}",
        *changes,
    ]


def _signed(prediction: Prediction, value: float) -> str:
    return ("+" if value >= 0 else "") + price(prediction.objective, value)


def _change_lines(
    before: PlanFile, after: PlanFile, moved: Sequence[dict[str, str]], node: str | None
) -> list[str]:
    assert before.prediction is not None
    assert after.prediction is not None
    lines = [
        f"before: {price(before.prediction.objective, before.prediction.value)}",
        f"after:  {price(after.prediction.objective, after.prediction.value)}",
    ]
    if node is not None:
        return lines + group_lines(after, find_group(after, node))
    if moved:
        lines.append(f"{len(moved)} of {len(after.groups)} groups would move:")
        lines += table([[row["group"], row["from"], "->", row["to"]] for row in moved])
    else:
        lines.append("no group would move")
    return [*lines, *plan_lines(after)]
