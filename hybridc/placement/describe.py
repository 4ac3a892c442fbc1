"""From a decision to a plan's file: figures, transfers, and a reason for every group."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import hybridc
from hybridc.placement.decide import Costs, Decision, Request
from hybridc.placement.moves import Change, change_of_move, tensors_of
from hybridc.placement.plan_file import (
    SCHEMA,
    PlanCost,
    PlanDevice,
    PlanFile,
    PlanGroup,
    PlanLink,
    PlanTensor,
    PlanTransfer,
    Prediction,
)
from hybridc.placement.problem import (
    DOLLARS,
    FIGURE_OF,
    HOST,
    JOULES,
    SECONDS,
    THROUGHPUT,
    Problem,
    Tensor,
    busy,
    is_feasible,
    objective,
    peak_memory,
    place_name,
    reader_of,
    total,
)
from hybridc.placement.rules import PINNED, RULE, NodeRule, Rule, RuleTexts
from hybridc.placement.solvers.greedy import Greedy
from hybridc.placement.solvers.local_search import preferring

_UNIT = {SECONDS: (1e3, "ms"), JOULES: (1e3, "mJ"), DOLLARS: (1e6, "millionths of a dollar")}


@dataclass(frozen=True)
class Origin:
    """Where a plan comes from: names, checksum, options of the compile, and nodes that are gone."""

    model: str
    sha256: str
    shapes: tuple[str, ...] = ()
    bindings: tuple[str, ...] = ()
    rules: RuleTexts = field(default_factory=RuleTexts)
    merged: Mapping[str, str] = field(default_factory=dict)


def describe_plan(decision: Decision, request: Request, origin: Origin) -> PlanFile:
    """The plan's file of a decision."""
    costs = decision.costs
    used = set(decision.placement) | set(range(len(request.devices)))
    return PlanFile(
        schema=SCHEMA,
        hybridc=hybridc.__version__,
        model=origin.model,
        model_sha256=origin.sha256,
        shapes=origin.shapes,
        bindings=origin.bindings,
        rules=origin.rules,
        sizes=dict(request.sizes),
        devices=tuple(
            PlanDevice(
                device.name,
                device.kind,
                device.specification,
                costs.hardware.models[device.name].profile if costs else None,
                number >= len(request.devices),
                device.name == request.remote,
            )
            for number, device in enumerate(decision.devices)
            if number in used or costs
        ),
        links=_links(costs),
        groups=tuple(_groups(decision, request)),
        tensors=tuple(
            PlanTensor(t.name, t.bytes, t.source, t.readers, t.is_output)
            for t in (costs.graph.tensors if costs else ())
        ),
        transfers=transfers_of(costs) if costs else (),
        prediction=predict(costs) if costs else None,
        notes=_notes(costs),
        merged=dict(origin.merged),
    )


def _links(costs: Costs | None) -> tuple[PlanLink, ...]:
    links = costs.hardware.links.items() if costs else ()
    return tuple(
        PlanLink(a, b, route.latency_seconds, route.bytes_per_second, route.dollars_per_gigabyte)
        for (a, b), route in links
    )


def _notes(costs: Costs | None) -> tuple[str, ...]:
    if costs is None:
        return ("costs are not known: groups are on the first device that can run them",)
    unknown = sum(not group.work.is_known for group in costs.graph.groups)
    if unknown:
        return (f"{unknown} groups have sizes that are not known and count as one launch each",)
    return ()


def predict(costs: Costs) -> Prediction:
    """What the cost model says about a decision."""
    problem, placement = costs.problem, costs.solution.placement
    value = objective(problem, placement)
    bound = min(costs.solution.bound, value)
    work = busy(problem, placement)
    slowest = max(work.values(), default=0.0)
    return Prediction(
        objective=problem.objective,
        value=value,
        bound=bound,
        gap=(value - bound) / value if value else 0.0,
        solver=costs.solution.solver,
        latency_seconds=total(problem, SECONDS, placement),
        runs_per_second=1 / slowest if slowest else 0.0,
        joules=total(problem, JOULES, placement) if JOULES in problem.figures else None,
        dollars=total(problem, DOLLARS, placement),
        busy_seconds=work,
        memory_bytes={
            name: peak_memory(problem, placement, device)
            for device, name in enumerate(problem.devices)
            if device in placement
        },
        confidence=_confidence(costs),
        alternatives=_alternatives(problem),
    )


def _alternatives(problem: Problem) -> dict[str, float]:
    """The objective of simple plans, for comparison; those that break a limit are left out."""
    found = {
        f"all on {name}": objective(problem, preferring(problem, device))
        for device, name in enumerate(problem.devices)
        if any(device in allowed for allowed in problem.allowed)
    }
    free = dataclasses.replace(problem, limits={}, memory={})
    found["greedy"] = objective(problem, Greedy().solve(free, 0.0).placement)
    return {name: value for name, value in found.items() if value < math.inf}


def _confidence(costs: Costs) -> float:
    """Confidence of the groups' times, each weighted with its time."""
    names = costs.problem.devices
    found = [
        costs.hardware.estimate(group.work, names[device])
        for group, device in zip(costs.graph.groups, costs.solution.placement, strict=True)
    ]
    seconds = sum(cost.seconds for cost in found)
    return sum(cost.seconds * cost.confidence for cost in found) / seconds if seconds else 0.0


def transfers_of(costs: Costs) -> tuple[PlanTransfer, ...]:
    """What is copied, in order of the tensors."""
    problem = costs.problem
    rows = []
    for tensor, source, destination in problem.copies(costs.solution.placement):
        seconds = problem.figures[SECONDS].ways[source, destination].price(tensor.bytes)
        origin = "input" if source == HOST else problem.devices[source]
        target = _destination_name(problem, destination)
        rows.append(PlanTransfer(tensor.name, origin, target, tensor.bytes, seconds))
    return tuple(rows)


def _destination_name(problem: Problem, destination: int) -> str:
    reader = reader_of(problem.places, destination)
    if reader is None:
        return place_name(problem, destination)
    return "caller" if reader == HOST else problem.devices[reader]


def _groups(decision: Decision, request: Request) -> list[PlanGroup]:
    costs = decision.costs
    touched = tensors_of(costs.problem) if costs else []
    rows = []
    for index, group in enumerate(decision.groups):
        refused = {
            device.name: reason
            for node in group.nodes
            for device, reason in decision.refused.get(node, {}).items()
        }
        taken = decision.exclusions.by_group[index]
        found = describe_costs(costs, index, touched[index]) if costs else ((), "", "")
        why, reason = _reason(decision, request, index, refused) or found[1:]
        here = decision.devices[decision.placement[index]].name
        rows.append(
            PlanGroup(
                group.name,
                here,
                here,
                tuple(str(node.name) for node in group.nodes),
                why,
                reason,
                refused,
                {name: ", ".join(map(str, rules)) for name, rules in sorted(taken.items())},
                found[0],
                costs.graph.groups[index].work if costs else None,
            )
        )
    return rows


def describe_costs(
    costs: Costs, index: int, tensors: Sequence[Tensor]
) -> tuple[tuple[PlanCost, ...], str, str]:
    """Costs of a group on every device, and the reason that they give for where it is.

    Args:
        costs: The figures.
        index: The group.
        tensors: What it reads or computes, see :func:`tensors_of`.
    """
    problem, placement = costs.problem, costs.solution.placement
    changes = {
        device: change_of_move(problem, placement, index, device, tensors)
        for device in sorted(problem.allowed[index])
    }
    rows = []
    for device, name in enumerate(problem.devices):
        cost = costs.hardware.estimate(costs.graph.groups[index].work, name)
        change = changes.get(device)
        moved = (change.total, change.copies) if change else (None, None)
        rows.append(PlanCost(name, cost.seconds, cost.source, cost.confidence, *moved))
    return (tuple(rows), *_by_cost(costs, index, changes))


def _reason(
    decision: Decision, request: Request, index: int, refused: dict[str, str]
) -> tuple[str, str] | None:
    """Why a group is where it is, as a word and as a sentence; ``None`` if costs decided."""
    here = decision.placement[index]
    name = decision.devices[here].name
    taken = decision.exclusions.by_group[index]
    if request.fixed is not None:
        return "plan", f"the plan puts it on {name}"
    if taken and len(_left(decision, request, index, refused)) < 2:
        rules = list(dict.fromkeys(rule for found in taken.values() for rule in found))
        return _kind(rules[0]), ", ".join(map(str, rules))
    others = [d for i, d in enumerate(request.devices) if i != here]
    if refused and all(d.name in refused or d.name in taken for d in others):
        texts = "; ".join(f"{device} cannot compile it: {text}" for device, text in refused.items())
        return "unsupported", texts
    if not others:
        return "only device", f"{name} is the only device"
    if decision.costs is None:
        return "order", f"{name} is the first device that can run it; costs are not known"
    return None


def _left(decision: Decision, request: Request, index: int, refused: dict[str, str]) -> list[str]:
    """Devices that rules and targets leave to a group, without a fallback device."""
    taken = decision.exclusions.by_group[index]
    return [d.name for d in request.devices if d.name not in taken and d.name not in refused]


def _kind(rule: Rule) -> str:
    return PINNED if isinstance(rule, NodeRule) and rule.option == "pin" else RULE


def _by_cost(costs: Costs, index: int, changes: dict[int, Change]) -> tuple[str, str]:
    """The figures of each device that may run a group, as a reason."""
    problem, placement = costs.problem, costs.solution.placement
    here = placement[index]
    scale, unit = _UNIT[FIGURE_OF[problem.objective]]
    own = problem.figure.groups[index]
    texts, blocked = [], ""
    for device, change in changes.items():
        if device == here:
            continue
        moved = (*placement[:index], device, *placement[index + 1 :])
        if change.total < 0 and not is_feasible(problem, moved):
            blocked = blocked or _limit(problem, moved)
        verb = "add" if change.copies >= 0 else "save"
        texts.append(
            f"{own[device] * scale:.4g} {unit} on {problem.devices[device]}, and moving it there "
            f"alone would {verb} {abs(change.copies) * scale:.4g} {unit} of copies: "
            f"{change.total * scale:+.4g} {unit} in all"
        )
    text = "; ".join([f"{own[here] * scale:.4g} {unit} here", *texts])
    if blocked:
        return blocked, f"{text}; the {blocked} limit does not allow it"
    if problem.objective == THROUGHPUT:
        text += "; the slowest stage decides, not the sum"
    return "cost", text


def _limit(problem: Problem, moved: Sequence[int]) -> str:
    """The kind of limit that a placement breaks."""
    memory_only = dataclasses.replace(problem, limits={})
    return "memory" if not is_feasible(memory_only, moved) else "time"
