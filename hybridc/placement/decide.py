"""Decide where each group runs: what is allowed, then what is best.

A device may run a group if its target has not refused one of the group's nodes and no rule takes it
away. The fallback device may run it only if no other is left, or if the user named it as a target.
Where hardware is known, a solver takes the best of what is allowed; otherwise each group runs on
the first device that may run it, in the order given.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import onnx_ir as ir

from hybridc.cost_models.cost import MEASURED
from hybridc.errors import BudgetError, UnsupportedError, UsageError
from hybridc.placement.conflict import smallest_conflict
from hybridc.placement.cost_graph import CostGraph, make_cost_graph
from hybridc.placement.group import Group, make_groups
from hybridc.placement.hardware import Hardware, make_problem
from hybridc.placement.problem import (
    LATENCY,
    SECONDS,
    Infeasible,
    Placement,
    Problem,
    Solution,
    objective,
)
from hybridc.placement.rules import Exclusions, LimitRule, Rule, Rules, exclude, leaking_outputs
from hybridc.placement.solvers.choose import DEFAULT_SECONDS, solve
from hybridc.placement.solvers.one_device import prefer_one_device
from hybridc.placement.solvers.stages import prefer_stages
from hybridc.targets.protocol import Device

MEASURED_SHARE = 0.9
"""How much of a device's time has to be measured for the rest not to count."""

Refused = Mapping[ir.Node, Mapping[Device, str]]
"""Why targets refused nodes, by node and device."""


@dataclass(frozen=True)
class Request:
    """What a placement is asked for.

    Attributes:
        devices: Devices to choose from; the first is the default.
        rules: What must hold.
        hardware: Costs of the devices; ``None`` to take the first that may run a group.
        objective: What to minimize.
        seconds: Time for the solver.
        sizes: Value of each dynamic dimension that costs are counted at.
        fixed: Device of each node by name, out of an edited plan.
        remote: Name of the device that is on a server, if one is.
        strict_math: Whether targets may change results in nothing but the order of sums.
    """

    devices: tuple[Device, ...]
    rules: Rules = field(default_factory=Rules)
    hardware: Hardware | None = None
    objective: str = LATENCY
    seconds: float = DEFAULT_SECONDS
    sizes: Mapping[str, int] = field(default_factory=dict)
    fixed: Mapping[str, str] | None = None
    remote: str | None = None
    strict_math: bool = False


@dataclass(frozen=True)
class Costs:
    """What a decision rests on.

    Attributes:
        graph: Groups and tensors with their work.
        hardware: The devices, the fallback device among them.
        problem: The problem that was solved.
        solution: What the solver found.
    """

    graph: CostGraph
    hardware: Hardware
    problem: Problem
    solution: Solution


@dataclass(frozen=True)
class Decision:
    """Where each group runs.

    Attributes:
        groups: The groups in topological order.
        devices: Devices that the placement's numbers stand for.
        placement: Device of each group.
        exclusions: What rules took away.
        refused: What targets refused.
        costs: The figures behind it; ``None`` where hardware is not known.
    """

    groups: tuple[Group, ...]
    devices: tuple[Device, ...]
    placement: Placement
    exclusions: Exclusions
    refused: Refused
    costs: Costs | None = None

    def devices_of_groups(self) -> list[Device]:
        """The device of each group."""
        return [self.devices[device] for device in self.placement]


@dataclass(frozen=True)
class _Case:
    """What is known before devices are chosen: groups, and who may run them."""

    request: Request
    groups: tuple[Group, ...]
    devices: tuple[Device, ...]
    exclusions: Exclusions
    refused: Refused

    def allowed(self, rules: Sequence[Rule] | None = None) -> list[frozenset[int]]:
        """Devices that may run each group, by all rules or by some; empty where none may."""
        return [self.allowed_for(index, rules) for index in range(len(self.groups))]

    def allowed_for(self, index: int, rules: Sequence[Rule] | None = None) -> frozenset[int]:
        """Devices that may run one group."""
        group, taken = self.groups[index], self.exclusions.by_group[index]
        may = {
            number
            for number, device in enumerate(self.devices)
            if not any(rules is None or r in rules for r in taken.get(device.name, ()))
        }
        given = set(range(len(self.request.devices)))
        if self.request.fixed is not None:
            wanted = _fixed_device(self.request.fixed, group.nodes[0])
            may &= {number for number, device in enumerate(self.devices) if device.name == wanted}
            given |= may
        able = {
            number
            for number in may & given
            if not any(self.devices[number] in self.refused.get(n, ()) for n in group.nodes)
        }
        return frozenset(able or may - set(range(len(self.request.devices))))


def decide(graph: ir.Graph, request: Request, refused: Refused, refuge: Device) -> Decision:
    """Place the groups of a graph.

    Args:
        graph: The model after the passes.
        request: What is asked for.
        refused: What targets refused so far; such nodes are groups of their own.
        refuge: Device for what no other may run.

    Raises:
        UnsupportedError: The rules contradict each other, or what can be compiled.
        BudgetError: They contradict a limit on memory or time.
        UsageError: A rule names nothing, or the plan is of another model.
    """
    devices = request.devices + ((refuge,) if refuge not in request.devices else ())
    groups = tuple(_groups(graph, refused, request.fixed))
    _refuse_leaks(graph, request.rules)
    exclusions = exclude(graph, groups, request.rules, [device.name for device in devices])
    case = _Case(request, groups, devices, exclusions, refused)
    allowed = case.allowed()
    for index, may in enumerate(allowed):
        if not may:
            raise _conflict(case, index)
    decision = Decision(groups, devices, (), exclusions, refused)
    if request.hardware is None:
        if request.rules.limits:
            raise UsageError(
                f"{request.rules.limits[0]} needs to know the devices: give a --profile for each"
            )
        return dataclasses.replace(decision, placement=tuple(min(may) for may in allowed))
    costs = _solve(case, make_cost_graph(graph, groups, request.sizes), request.hardware)
    return dataclasses.replace(decision, placement=costs.solution.placement, costs=costs)


def _groups(graph: ir.Graph, refused: Refused, fixed: Mapping[str, str] | None) -> list[Group]:
    """Groups; refused nodes stand alone, and so do those that an edited plan tears off."""
    alone = set(refused)
    while True:
        groups = make_groups(list(graph), alone)
        if fixed is None:
            return groups
        torn = {
            node
            for group in groups
            for node in group.nodes
            if _fixed_device(fixed, node) != _fixed_device(fixed, group.nodes[0])
        }
        if not torn:
            return groups
        alone |= torn


def _fixed_device(fixed: Mapping[str, str], node: ir.Node) -> str:
    try:
        return fixed[str(node.name)]
    except KeyError:
        raise UsageError(
            f"the plan has no node {node.name!r}: it was made of another model, or with other "
            "--shape or --bind options"
        ) from None


def _refuse_leaks(graph: ir.Graph, rules: Rules) -> None:
    for rule, outputs in leaking_outputs(graph, rules).items():
        raise UnsupportedError(
            f"{rule} cannot be kept: the caller reads {outputs[0]!r}, which is computed from it; "
            f"let it leave with --release {outputs[0]}"
        )


def _conflict(case: _Case, index: int) -> UnsupportedError:
    """An error with the smallest set of rules that leaves a group without a device."""
    group, taken = case.groups[index], case.exclusions.by_group[index]
    rules = list(dict.fromkeys(rule for found in taken.values() for rule in found))
    found = smallest_conflict(rules, lambda some: bool(case.allowed_for(index, some)))
    reasons = [
        (str(node.name), node.op_type, f"{device.name}: {reason}")
        for node in group.nodes
        for device, reason in case.refused.get(node, {}).items()
    ]
    parties = ["the plan"] if case.request.fixed is not None else []
    parties += map(str, found)
    texts, nodes = " and ".join(parties), ", ".join(str(node.name) for node in group.nodes)
    if len(parties) < 2:
        return UnsupportedError(f"{texts} cannot be kept for {nodes}:", tuple(reasons))
    return UnsupportedError(
        f"{texts} contradict each other: together they leave no device for the nodes {nodes}, "
        "which are computed in one kernel",
        tuple(reasons),
    )


def _solve(case: _Case, graph: CostGraph, hardware: Hardware) -> Costs:
    problem = _problem(case, graph, hardware, case.request.rules.rules)
    try:
        solution = find_best(problem, graph, hardware, case.request.seconds)
    except Infeasible as error:
        raise _over_budget(case, graph, hardware, error.proven) from error
    return Costs(graph, hardware, problem, solution)


def find_best(
    problem: Problem, graph: CostGraph, hardware: Hardware, seconds: float = DEFAULT_SECONDS
) -> Solution:
    """The best placement: what a solver finds, or one device where times were measured.

    Args:
        problem: The problem.
        graph: The groups that it is made of.
        hardware: The devices that it is made of.
        seconds: Time for the solver.

    Raises:
        Infeasible: No placement keeps the limits, or none was found in the time.
    """
    found = prefer_stages(problem, solve(problem, seconds))
    if not is_measured(problem, graph, hardware):
        return found
    return prefer_one_device(problem, found, hardware.measured_handoffs())


def is_measured(problem: Problem, graph: CostGraph, hardware: Hardware) -> bool:
    """Whether what each device may compute was measured, but for a tenth of its time at most."""
    groups = [
        (group.work, allowed)
        for group, allowed in zip(graph.groups, problem.allowed, strict=True)
        if not group.work.is_view
    ]
    for device, name in enumerate(hardware.names):
        costs = [hardware.estimate(work, name) for work, allowed in groups if device in allowed]
        known = sum(cost.seconds for cost in costs if cost.source == MEASURED)
        if known < MEASURED_SHARE * sum(cost.seconds for cost in costs):
            return False
    return True


def _problem(case: _Case, graph: CostGraph, hardware: Hardware, rules: Sequence[Rule]) -> Problem:
    """The problem with some of the rules."""
    limits, memory = limits_of([rule for rule in rules if isinstance(rule, LimitRule)])
    allowed = case.allowed(rules)
    return make_problem(graph, hardware, allowed, case.request.objective, limits, memory)


def limits_of(rules: Sequence[LimitRule]) -> tuple[dict[str, float], dict[str, int]]:
    """The tightest limit on the latency, and on each device's memory."""
    limits: dict[str, float] = {}
    memory: dict[str, int] = {}
    for rule in rules:
        if rule.option == "memory":
            memory[rule.device] = min(int(rule.most), memory.get(rule.device, int(rule.most)))
        else:
            limits[SECONDS] = min(rule.most, limits.get(SECONDS, rule.most))
    return limits, memory


def _over_budget(case: _Case, graph: CostGraph, hardware: Hardware, proven: bool) -> BudgetError:
    """An error with the smallest set of rules that no placement keeps."""
    rules, seconds = case.request.rules, case.request.seconds
    if not proven:
        names = " and ".join(map(str, rules.limits))
        return BudgetError(
            f"no placement was found in {seconds:g} s that keeps {names}; give more time with "
            "--solve-seconds"
        )

    def can_hold(some: Sequence[Rule]) -> bool:
        try:
            solve(_problem(case, graph, hardware, some), seconds)
        except Infeasible as error:
            return not error.proven
        return True

    texts = " and ".join(map(str, smallest_conflict(rules.rules, can_hold)))
    free = dataclasses.replace(_problem(case, graph, hardware, ()), objective=LATENCY)
    fastest = objective(free, solve(free, seconds).placement)
    return BudgetError(
        f"{texts} cannot be kept: no placement does so, by the cost model; the fastest one without "
        f"rules takes {fastest * 1e3:.3g} ms"
    )
