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
from hybridc.targets.protocol import Device

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
    """

    devices: tuple[Device, ...]
    rules: Rules = field(default_factory=Rules)
    hardware: Hardware | None = None
    objective: str = LATENCY
    seconds: float = DEFAULT_SECONDS
    sizes: Mapping[str, int] = field(default_factory=dict)
    fixed: Mapping[str, str] | None = None


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
    names = [device.name for device in devices]
    exclusions = exclude(graph, groups, request.rules, names)
    allowed = _allowed(request, groups, devices, exclusions, refused)
    if not all(allowed):
        _refuse_conflict(request, groups, devices, exclusions, refused)
    decision = Decision(groups, devices, (), exclusions, refused)
    if request.hardware is None:
        if request.rules.limits:
            raise UsageError(
                f"{request.rules.limits[0]} needs to know the devices: give a --profile for each"
            )
        return dataclasses.replace(decision, placement=tuple(min(may) for may in allowed))
    costs = _solve(graph, request, groups, allowed, request.hardware)
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


def _allowed(
    request: Request,
    groups: Sequence[Group],
    devices: Sequence[Device],
    exclusions: Exclusions,
    refused: Refused,
) -> list[frozenset[int]]:
    """Devices that may run each group; empty where none may."""
    allowed = []
    for group, taken in zip(groups, exclusions.by_group, strict=True):
        may = {i for i, d in enumerate(devices) if d.name not in taken}
        if request.fixed is not None:
            wanted = _fixed_device(request.fixed, group.nodes[0])
            may &= {i for i, d in enumerate(devices) if d.name == wanted}
            own = may
        else:
            own = may & set(range(len(request.devices)))
        able = {i for i in own if not any(devices[i] in refused.get(n, ()) for n in group.nodes)}
        last = {i for i in may if i >= len(request.devices)}
        allowed.append(frozenset(able or last))
    return allowed


def _refuse_leaks(graph: ir.Graph, rules: Rules) -> None:
    for rule, outputs in leaking_outputs(graph, rules).items():
        raise UnsupportedError(
            f"{rule} cannot be kept: the caller reads {outputs[0]!r}, which is computed from it; "
            f"let it leave with --release {outputs[0]}"
        )


def _refuse_conflict(
    request: Request,
    groups: Sequence[Group],
    devices: Sequence[Device],
    exclusions: Exclusions,
    refused: Refused,
) -> None:
    """Raise an error with the smallest set of rules that leaves a group without a device."""
    for group, taken in zip(groups, exclusions.by_group, strict=True):
        if _allowed(request, [group], devices, Exclusions([taken]), refused)[0]:
            continue
        rules = list(dict.fromkeys(rule for found in taken.values() for rule in found))

        def can_hold(
            some: Sequence[Rule],
            taken: Mapping[str, Sequence[Rule]] = taken,
            group: Group = group,
        ) -> bool:
            left = {n: [r for r in own if r in some] for n, own in taken.items()}
            own = Exclusions([{name: found for name, found in left.items() if found}])
            return bool(_allowed(request, [group], devices, own, refused)[0])

        raise _conflict(request, group, smallest_conflict(rules, can_hold), refused)


def _conflict(
    request: Request, group: Group, rules: Sequence[Rule], refused: Refused
) -> UnsupportedError:
    reasons = [
        (str(node.name), node.op_type, f"{device.name}: {reason}")
        for node in group.nodes
        for device, reason in refused.get(node, {}).items()
    ]
    parties = ["the plan"] if request.fixed is not None else []
    parties += map(str, rules)
    texts = " and ".join(parties)
    nodes = ", ".join(str(node.name) for node in group.nodes)
    if len(parties) < 2:
        return UnsupportedError(f"{texts} cannot be kept for {nodes}:", tuple(reasons))
    return UnsupportedError(
        f"{texts} contradict each other: together they leave no device for the nodes {nodes}, "
        "which are computed in one kernel",
        tuple(reasons),
    )


def _solve(
    graph: ir.Graph,
    request: Request,
    groups: Sequence[Group],
    allowed: Sequence[frozenset[int]],
    hardware: Hardware,
) -> Costs:
    described = make_cost_graph(graph, groups, request.sizes)
    limits, memory = limits_of(request.rules.limits)
    problem = make_problem(described, hardware, allowed, request.objective, limits, memory)
    try:
        solution = solve(problem, request.seconds)
    except Infeasible as error:
        raise _over_budget(problem, request, error.proven) from error
    return Costs(described, hardware, problem, solution)


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


def _over_budget(problem: Problem, request: Request, proven: bool) -> BudgetError:
    """An error with the rules that cannot be kept together."""
    limits = request.rules.limits
    if not proven:
        names = " and ".join(map(str, limits))
        return BudgetError(
            f"no placement was found in {request.seconds:g} s that keeps {names}; give more time "
            "with --solve-seconds"
        )

    def can_hold(some: Sequence[Rule]) -> bool:
        seconds, memory = limits_of([rule for rule in some if isinstance(rule, LimitRule)])
        numbers = {problem.devices.index(name): most for name, most in memory.items()}
        try:
            solve(dataclasses.replace(problem, limits=seconds, memory=numbers), request.seconds)
        except Infeasible as error:
            return not error.proven
        return True

    conflict = smallest_conflict(limits, can_hold)
    texts = " and ".join(map(str, conflict))
    free = dataclasses.replace(problem, objective=LATENCY, limits={}, memory={})
    fastest = objective(free, solve(free, request.seconds).placement)
    return BudgetError(
        f"{texts} cannot be kept: no placement does so, by the cost model; the fastest one without "
        f"limits takes {fastest * 1e3:.3g} ms"
    )
