"""Ask a plan again, without its model: on other hardware, for another objective, after an edit.

The plan keeps the work of every group and the costs that were known, so nothing else is needed.
Costs of a device stay as they were, measured ones included, unless its profile is replaced.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field

from hybridc.cost_models.cost import Cost, Ranked
from hybridc.cost_models.device import DeviceProfile
from hybridc.cost_models.group_work import GroupWork
from hybridc.cost_models.link import Route
from hybridc.cost_models.load import DeviceModel
from hybridc.cost_models.roofline import Roofline
from hybridc.errors import BudgetError, UsageError
from hybridc.placement.cost_graph import CostGraph, CostGroup
from hybridc.placement.decide import Costs, find_best, limits_of
from hybridc.placement.describe import describe_costs, predict, transfers_of
from hybridc.placement.hardware import Hardware, make_problem
from hybridc.placement.moves import tensors_of
from hybridc.placement.plan_file import PlanFile, PlanGroup, PlanLink
from hybridc.placement.problem import Infeasible, Placement, Problem, Solution, Tensor
from hybridc.placement.rules import parse_rules
from hybridc.placement.solvers.choose import DEFAULT_SECONDS


@dataclass(frozen=True)
class Recorded:
    """Costs that a plan keeps, by the group's signature."""

    costs: Mapping[str, Cost]

    def estimate(self, group: GroupWork, device: DeviceProfile) -> Cost | None:
        """The cost that the plan has for a group."""
        return self.costs.get(group.signature)


@dataclass(frozen=True)
class Change:
    """What is different from when the plan was made.

    Attributes:
        models: Other devices in the place of those of the plan, by name.
        links: Other links.
        objective: Another objective; ``None`` for the plan's own.
        seconds: Time for the solver.
    """

    models: Mapping[str, DeviceModel] = field(default_factory=dict)
    links: Mapping[tuple[str, str], Route] = field(default_factory=dict)
    objective: str | None = None
    seconds: float = DEFAULT_SECONDS


def hardware_of(plan: PlanFile, change: Change) -> Hardware:
    """The plan's hardware with what is changed.

    Raises:
        UsageError: The plan knows no costs, or the change names a device that it does not have.
    """
    names = tuple(device.name for device in plan.devices)
    for name in change.models:
        if name not in names:
            raise UsageError(f"the plan has no device {name!r}; it has {', '.join(names)}")
    models = {}
    for device in plan.devices:
        if device.name in change.models:
            models[device.name] = change.models[device.name]
        elif device.profile is None:
            raise UsageError("the plan was made without costs: make it with a --profile")
        else:
            known = Recorded(_costs_on(plan, device.name))
            models[device.name] = DeviceModel(device.profile, Ranked([known, Roofline()]))
    links = {
        (link.source, link.destination): Route(
            link.latency_seconds,
            link.bytes_per_second,
            dollars_per_gigabyte=link.dollars_per_gigabyte,
        )
        for link in plan.links
    }
    return Hardware(names, models, {**links, **change.links})


def _costs_on(plan: PlanFile, device: str) -> dict[str, Cost]:
    return {
        group.work.signature: Cost(cost.seconds, group.work.bytes, cost.source, cost.confidence)
        for group in plan.groups
        if group.work is not None
        for cost in group.costs
        if cost.device == device
    }


def reconsider(plan: PlanFile, change: Change) -> PlanFile:
    """The best plan after a change.

    Raises:
        UsageError: See :func:`hardware_of`.
        BudgetError: The plan's limits cannot be kept any more.
    """
    costs = _costs(plan, change)
    try:
        solution = find_best(costs.problem, costs.graph, costs.hardware, change.seconds)
    except Infeasible as error:
        raise BudgetError("no placement keeps the limits of the plan on this hardware") from error
    return _redescribed(plan, dataclasses.replace(costs, solution=solution))


def as_edited(plan: PlanFile) -> PlanFile:
    """The same plan with figures that fit the devices that its groups are on now.

    The bound stays: it is that of the best plan. A plan that was not edited stays as it is.
    """
    edited = {index for index, group in enumerate(plan.groups) if group.device != group.placed}
    if plan.prediction is None or not edited:
        return plan
    names = [device.name for device in plan.devices]
    placement = tuple(names.index(group.device) for group in plan.groups)
    found = _redescribed(plan, _placed(_costs(plan, Change()), placement, plan.prediction.bound))
    groups = [
        dataclasses.replace(
            group,
            placed=old.placed,
            why="plan" if index in edited else group.why,
            reason=f"moved by hand from {old.placed}: {group.reason}"
            if index in edited
            else group.reason,
        )
        for index, (group, old) in enumerate(zip(found.groups, plan.groups, strict=True))
    ]
    return dataclasses.replace(found, groups=tuple(groups))


def _placed(costs: Costs, placement: Placement, bound: float) -> Costs:
    problem = dataclasses.replace(costs.problem, allowed=_with(costs.problem, placement))
    solution = Solution(placement, bound, "by hand")
    return dataclasses.replace(costs, problem=problem, solution=solution)


def _with(problem: Problem, placement: Placement) -> tuple[frozenset[int], ...]:
    """What is allowed, and what was chosen by hand."""
    rows = zip(problem.allowed, placement, strict=True)
    return tuple(allowed | {device} for allowed, device in rows)


def _costs(plan: PlanFile, change: Change) -> Costs:
    """The plan's problem after a change, not solved yet."""
    hardware = hardware_of(plan, change)
    groups = []
    for group in plan.groups:
        if group.work is None:
            raise UsageError("the plan was made without costs: make it with a --profile")
        groups.append(CostGroup(group.name, group.nodes, group.work))
    tensors = tuple(Tensor(t.name, t.bytes, t.source, t.readers, t.is_output) for t in plan.tensors)
    graph = CostGraph(tuple(groups), tensors)
    limits, memory = limits_of(parse_rules(plan.rules, hardware.names, plan.remote).limits)
    objective = change.objective or (plan.prediction.objective if plan.prediction else "latency")
    allowed = [_allowed(plan, group) for group in plan.groups]
    problem = make_problem(graph, hardware, allowed, objective, limits, memory)
    return Costs(graph, hardware, problem, Solution((), 0.0, ""))


def _allowed(plan: PlanFile, group: PlanGroup) -> frozenset[int]:
    """Devices that neither a target nor a rule took away; the fallback device if none is left."""
    may = [
        (number, device.is_fallback)
        for number, device in enumerate(plan.devices)
        if device.name not in group.refused and device.name not in group.excluded
    ]
    return frozenset(n for n, last in may if not last) or frozenset(n for n, _ in may)


def _redescribed(plan: PlanFile, costs: Costs) -> PlanFile:
    groups = []
    touched = tensors_of(costs.problem)
    for index, group in enumerate(plan.groups):
        found, why, reason = describe_costs(costs, index, touched[index])
        device = costs.problem.devices[costs.solution.placement[index]]
        fixed = len(costs.problem.allowed[index]) < 2 and group.why not in ("cost", "plan")
        groups.append(
            dataclasses.replace(
                group,
                device=device,
                placed=device,
                costs=found,
                why=group.why if fixed else why,
                reason=group.reason if fixed else reason,
            )
        )
    devices = tuple(
        dataclasses.replace(device, profile=costs.hardware.models[device.name].profile)
        for device in plan.devices
    )
    links = tuple(
        PlanLink(a, b, route.latency_seconds, route.bytes_per_second, route.dollars_per_gigabyte)
        for (a, b), route in costs.hardware.links.items()
    )
    return dataclasses.replace(
        plan,
        devices=devices,
        links=links,
        groups=tuple(groups),
        transfers=transfers_of(costs),
        prediction=predict(costs),
    )
