"""Any number of devices, and limits: an integer program, solved by HiGHS.

Variables, all from 0 to 1:

    x[g, d]       group g runs on device d; a whole number, and for each group they add up to 1
    w[r, a, d]    reader r of a tensor is on d and its producer is on a
    z[t, a, q]    tensor t is copied from a to destination q

    sum over a of w[r, a, d] = x[r, d]      sum over d of w[r, a, d] = x[producer, a]
    z[t, a, q] >= sum of w[r, a, d] over the devices d that q serves,  for each reader r

The w tie both ends of a tensor together, which keeps the relaxation tight: on graphs without cycles
and forks it is exact by itself. A tensor with one reader needs no z. Copies of the model's inputs
need no w, since it is known where they come from.

The relaxation's bound is the bound of the plan. Prices are scaled to about 1, because HiGHS's
tolerances are absolute.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from hybridc.placement.problem import (
    HOST,
    SECONDS,
    THROUGHPUT,
    Figure,
    Infeasible,
    Placement,
    Problem,
    Solution,
    Tensor,
    is_feasible,
    is_held,
    lifetime,
    objective,
    resource,
)
from hybridc.placement.solvers.highs import Program, run

if TYPE_CHECKING:
    import highspy

GAP = 1e-7
"""Relative gap at which a placement counts as proven."""

_Terms = list[tuple[int, float]]


@dataclass
class _Model:
    """A problem as a program.

    Attributes:
        problem: The problem.
        program: The program.
        runs: Variable of each group on each device that may run it.
        copies: Variables that make up each copy, by tensor, source and destination.
        unit: What a price is divided by.
    """

    problem: Problem
    program: Program
    runs: list[dict[int, int]]
    copies: dict[tuple[int, int, int], list[int]]
    unit: float


class IntegerProgram:
    """The solver."""

    name = "integer program"

    def why_not(self, problem: Problem) -> str | None:
        """It takes every problem."""
        return None

    def solve(self, problem: Problem, seconds: float, start: Placement | None = None) -> Solution:
        """The best placement found in the time, with what is proven about it.

        Args:
            problem: The problem.
            seconds: Time to search.
            start: A feasible placement to improve on.

        Raises:
            Infeasible: No placement keeps the limits, or none was found in the time.
        """
        if not all(problem.allowed):
            raise Infeasible
        if not problem.groups:
            return Solution((), 0.0, self.name)
        import highspy  # here, since most compiles have nothing to solve

        model = _build(problem)
        known = None if start is None else _start(model, start)
        highs = run(model.program, seconds, GAP / 10, known)
        found = _read(model, highs) or start
        if found is None or not is_feasible(problem, found):
            raise Infeasible(highs.getModelStatus() == highspy.HighsModelStatus.kInfeasible)
        value = objective(problem, found)
        once = 0.0 if problem.objective == THROUGHPUT else problem.figure.once
        bound = min(value, highs.getInfo().mip_dual_bound * model.unit + once)
        bound = value if value - bound <= GAP * value else max(bound, 0.0)
        return Solution(found, bound, self.name)


def _build(problem: Problem) -> _Model:
    program = Program()
    runs = [{d: program.variable(whole=True) for d in sorted(a)} for a in problem.allowed]
    for variables in runs:
        program.row([(v, 1.0) for v in variables.values()], 1.0, 1.0)
    model = _Model(problem, program, runs, {}, _unit(problem, problem.figure))
    for index, tensor in enumerate(problem.tensors):
        _add_tensor(model, index, tensor)
    if problem.objective == THROUGHPUT:
        _minimize_busiest(model)
    else:
        for variable, price in _terms(model, problem.figure, model.unit):
            program.cost[variable] += price
    for name, most in problem.limits.items():
        figure = problem.figures[name]
        unit = _unit(problem, figure)
        program.row(_terms(model, figure, unit), -np.inf, (most - figure.once) / unit)
    for device, most_bytes in problem.memory.items():
        _limit_memory(model, device, most_bytes)
    return model


def _unit(problem: Problem, figure: Figure) -> float:
    """About the price of a group, or of a copy where groups have none."""
    rows = figure.groups
    cheapest = [min(rows[g][d] for d in allowed) for g, allowed in enumerate(problem.allowed)]
    dearest = [max(rows[g][d] for d in allowed) for g, allowed in enumerate(problem.allowed)]
    ways = figure.ways.values()
    copies = [way.price(tensor.bytes) for tensor in problem.tensors for way in ways]
    for prices in (cheapest, dearest, copies):
        positive = [price for price in prices if price > 0]
        if positive:
            return sum(positive) / len(positive)
    return 1.0


def _add_tensor(model: _Model, index: int, tensor: Tensor) -> None:
    """Variables for a tensor's copies, tied to where its producer and its readers are."""
    problem = model.problem
    if tensor.source == HOST:
        for reader in tensor.readers:
            _need(model, index, HOST, ((d, v) for d, v in model.runs[reader].items()))
        return
    producer = model.runs[tensor.source]
    if tensor.is_output:
        for source, variable in producer.items():
            _need(model, index, source, [(HOST, variable)])
    for reader in tensor.readers:
        pairs = _tie(model, producer, model.runs[reader])
        if len(tensor.readers) == 1 and not tensor.is_output:
            for (source, device), variable in pairs.items():
                for destination in problem.destinations(source, device):
                    model.copies.setdefault((index, source, destination), []).append(variable)
            continue
        for source in producer:
            _need(model, index, source, ((d, v) for (a, d), v in pairs.items() if a == source))


def _tie(
    model: _Model, producer: Mapping[int, int], reader: Mapping[int, int]
) -> dict[tuple[int, int], int]:
    """Variables for both ends of a tensor at once, by the producer's and the reader's device."""
    program = model.program
    pairs = {(a, d): program.variable() for a in producer for d in reader}
    for d, variable in reader.items():
        program.row([(variable, -1.0), *((pairs[a, d], 1.0) for a in producer)], 0.0, 0.0)
    for a, variable in producer.items():
        program.row([(variable, -1.0), *((pairs[a, d], 1.0) for d in reader)], 0.0, 0.0)
    return pairs


def _need(model: _Model, index: int, source: int, readers: Iterable[tuple[int, int]]) -> None:
    """A copy is made wherever one reader of the tensor, whose variables are given, needs it."""
    program = model.program
    wanted: dict[int, list[int]] = {}
    for device, variable in readers:
        for destination in model.problem.destinations(source, device):
            wanted.setdefault(destination, []).append(variable)
    for destination, variables in wanted.items():
        key = (index, source, destination)
        if key not in model.copies:
            model.copies[key] = [program.variable()]
        copy = model.copies[key][0]
        program.row([(copy, 1.0), *((v, -1.0) for v in variables)], 0.0, np.inf)


def _terms(model: _Model, figure: Figure, unit: float) -> _Terms:
    """A figure as a sum over variables."""
    tensors = model.problem.tensors
    terms = [
        (variable, figure.groups[group][device] / unit)
        for group, variables in enumerate(model.runs)
        for device, variable in variables.items()
    ]
    for (index, source, destination), variables in model.copies.items():
        price = figure.ways[source, destination].price(tensors[index].bytes) / unit
        terms += [(variable, price) for variable in variables if price]
    return terms


def _minimize_busiest(model: _Model) -> None:
    """Minimize a variable that is at least the time of every device and link."""
    problem, program = model.problem, model.program
    figure = problem.figures[SECONDS]
    work: dict[str, _Terms] = {name: [] for name in problem.devices}
    for group, variables in enumerate(model.runs):
        for device, variable in variables.items():
            term = (variable, figure.groups[group][device] / model.unit)
            work[problem.devices[device]].append(term)
    for (index, source, destination), copies in model.copies.items():
        way = figure.ways[source, destination]
        price = way.price(problem.tensors[index].bytes) / model.unit
        name = resource(problem, source, destination)
        work.setdefault(name, []).extend((variable, price) for variable in copies if price)
    slowest = program.variable(high=sum(price for terms in work.values() for _, price in terms))
    program.cost[slowest] = 1.0
    for terms in work.values():
        program.row([*((v, -price) for v, price in terms), (slowest, 1.0)], 0.0, np.inf)


def _limit_memory(model: _Model, device: int, most: int) -> None:
    """Keep a device's peak within a limit, during the run of each group."""
    problem = model.problem
    scale = float(max(most, 1))
    held: dict[int, float] = {}
    for group, variables in enumerate(model.runs):
        if device in variables and problem.weights[group]:
            held[variables[device]] = problem.weights[group] / scale
    for (index, source, destination), copies in model.copies.items():
        tensor = problem.tensors[index]
        if is_held(problem, device, tensor, source, destination):
            for variable in copies:
                size = tensor.bytes / scale
                held[variable] = held.get(variable, 0.0) + size
    steps: list[dict[int, float]] = [{} for _ in problem.groups]
    for tensor in problem.tensors:
        if tensor.source == HOST or device not in model.runs[tensor.source]:
            continue
        variable = model.runs[tensor.source][device]
        first, last = lifetime(tensor, len(steps))
        for step in steps[first : last + 1]:
            step[variable] = step.get(variable, 0.0) + tensor.bytes / scale
    total = model.program.variable(high=1.0)
    model.program.row([*held.items(), (total, -1.0)], -np.inf, 0.0)
    for step in _hardest(steps):
        model.program.row([(total, 1.0), *step.items()], -np.inf, most / scale)


def _hardest(steps: Sequence[dict[int, float]]) -> list[dict[int, float]]:
    """Steps without those that the next one includes; at least one."""
    found = [
        step
        for step, following in zip(steps, [*steps[1:], {}], strict=True)
        if not all(following.get(variable, 0.0) >= size for variable, size in step.items())
    ]
    return found or [{}]


def _start(model: _Model, placement: Placement) -> dict[int, float]:
    """The values of the whole variables that stand for a placement."""
    return {
        variable: float(device == chosen)
        for variables, chosen in zip(model.runs, placement, strict=True)
        for device, variable in variables.items()
    }


def _read(model: _Model, highs: highspy.Highs) -> Placement | None:
    """The placement that was found; ``None`` if there is none."""
    import highspy

    if highs.getModelStatus() == highspy.HighsModelStatus.kInfeasible:
        return None
    solution = highs.getSolution()
    if not solution.value_valid:
        return None
    values = solution.col_value
    return tuple(
        max(variables, key=lambda device: values[variables[device]]) for variables in model.runs
    )
