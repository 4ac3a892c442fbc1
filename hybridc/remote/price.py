"""What a plan costs at so many requests per second.

Machines are paid by the hour: the one here whatever the plan, the server as soon as a plan uses it,
and more of either kind where one does not keep up. Requests and bytes are paid each.

    dollars per hour = edge * max(1, rate * seconds here)
                     + server * max(1, rate * seconds there)         (if the plan uses it)
                     + 3600 * rate * (requests and bytes of one run)

So the difference between two plans is piecewise linear in the rate, with a bend where a machine is
busy all the time. The rates at which they cost the same are found exactly, one piece at a time.

The solver adds up over groups and copies, and ``max`` is no sum. It is asked four times: each end
counts by its seconds, as where it is busy all the time, or not at all, as where it has time to
spare. What it finds is judged by the formula above.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from hybridc.cost_models.link import GIGABYTE, Route
from hybridc.errors import UsageError
from hybridc.placement.decide import Decision, Request
from hybridc.placement.problem import (
    COST,
    DOLLARS,
    HOST,
    SECONDS,
    Figure,
    Infeasible,
    Problem,
    Solution,
    Way,
)
from hybridc.placement.solvers.choose import solve
from hybridc.runtime.parts import SESSION_KIND

HOUR = 3600

_TIE = 1e-9
"""Dollars that a second counts as, so that of two plans at one price the faster is taken."""


@dataclass(frozen=True)
class Prices:
    """What the two ends and the link between them cost, in dollars.

    Attributes:
        edge: An hour of the machine here.
        server: An hour of the server.
        request: A request to it.
        there: A byte that is sent to it.
        back: A byte that it sends.
    """

    edge: float
    server: float
    request: float
    there: float
    back: float


@dataclass(frozen=True)
class Usage:
    """What one run of a plan takes.

    Attributes:
        edge_seconds: Time of the machine here.
        server_seconds: Time of the server.
        requests: Requests to it; 0 if the plan does not use it.
        sent: Bytes to it.
        received: Bytes from it.
    """

    edge_seconds: float
    server_seconds: float
    requests: int
    sent: int
    received: int


def prices_of(request: Request, there: Route, back: Route) -> Prices:
    """Prices out of the profiles and the link.

    The machine here costs what its devices do together; the CPU counts once, though ONNX Runtime
    runs on it too.

    Raises:
        UsageError: Nothing has a price.
    """
    assert request.hardware is not None
    models, remote = request.hardware.models, str(request.remote)
    here = [d for d in request.devices if d.name != remote and d.kind != SESSION_KIND]
    hours = [models[device.name].profile.dollars_per_hour or 0.0 for device in here]
    server = models[remote].profile
    prices = Prices(
        sum(hours),
        server.dollars_per_hour or 0.0,
        server.dollars_per_request or 0.0,
        there.dollars_per_gigabyte / GIGABYTE,
        back.dollars_per_gigabyte / GIGABYTE,
    )
    if not any(dataclasses.astuple(prices)):
        raise UsageError(
            "--objective cost needs a price: dollars_per_hour or dollars_per_request in a profile, "
            f"or one of the link, as in --link {remote}=20mbit,15ms,0.09usd/GB"
        )
    return prices


def dollars_per_hour(usage: Usage, prices: Prices, rate: float) -> float:
    """Price of an hour at so many runs per second."""
    total = prices.edge * max(1, rate * usage.edge_seconds)
    if usage.requests:
        total += prices.server * max(1, rate * usage.server_seconds)
    each = usage.requests * prices.request + usage.sent * prices.there
    return total + HOUR * rate * (each + usage.received * prices.back)


def break_even(one: Usage, other: Usage, prices: Prices) -> tuple[float, ...]:
    """Rates above zero at which the cheaper of two plans becomes the dearer one."""

    def difference(rate: float) -> float:
        return dollars_per_hour(one, prices, rate) - dollars_per_hour(other, prices, rate)

    found, last = [], 0.0
    for low, high in itertools.pairwise(_bends(one, other)):
        start, end = difference(low), difference(high)
        slope = (end - start) / (high - low)
        for value in (start, end):
            if value * last < 0:
                found.append(low - start / slope)
            last = value or last
    is_last_piece = last * slope < 0
    return (*found, low - start / slope) if is_last_piece else tuple(found)


def _bends(one: Usage, other: Usage) -> list[float]:
    """Rates between which prices are linear; beyond the one before the last they stay so."""
    seconds = [t for u in (one, other) for t in (u.edge_seconds, u.server_seconds) if t > 0]
    bends = [0, *sorted({1 / value for value in seconds})]
    return [*bends, bends[-1] + 1]


def cheapest_decisions(
    decision: Decision, prices: Prices, rate: float, remote: str, shrink: int, seconds: float
) -> Iterator[Decision]:
    """Placements that may be the cheapest; what they cost is for the caller to find out.

    Args:
        decision: A placement of the same groups, with the problem that it solves.
        prices: Prices of the two ends.
        rate: Runs per second.
        remote: Name of the device on the server.
        shrink: How many times fewer bytes large tensors cross in.
        seconds: Time for the solver, each time.
    """
    costs = decision.costs
    assert costs is not None
    for edge, server in itertools.product((prices.edge, 0.0), (prices.server, 0.0)):
        counted = dataclasses.replace(prices, edge=edge, server=server)
        counted = dataclasses.replace(
            counted, there=counted.there / shrink, back=counted.back / shrink
        )
        figure = _figure(costs.problem, counted, remote)
        figures = {**costs.problem.figures, DOLLARS: figure}
        problem = dataclasses.replace(costs.problem, figures=figures, objective=COST)
        try:
            yield with_placement(decision, solve(problem, seconds))
        except Infeasible:
            continue  # no placement keeps the limits; the caller finds that out by itself


def with_placement(decision: Decision, solution: Solution) -> Decision:
    """The same decision with another placement; the bound stays that of the problem."""
    costs = decision.costs
    assert costs is not None
    known = dataclasses.replace(costs.solution, placement=solution.placement)
    known = dataclasses.replace(known, solver=solution.solver)
    return dataclasses.replace(
        decision,
        placement=solution.placement,
        costs=dataclasses.replace(costs, solution=known),
    )


def _figure(problem: Problem, prices: Prices, remote: str) -> Figure:
    """Dollars of a run: seconds at each end, requests, and bytes that cross."""
    seconds, number = problem.figures[SECONDS], problem.devices.index(remote)
    place = problem.places[number]
    rates = [
        (prices.server if device == number else prices.edge) / HOUR + _TIE
        for device in range(len(problem.devices))
    ]
    rows = tuple(
        tuple(t if math.isinf(t) else t * rate for t, rate in zip(row, rates, strict=True))
        for row in seconds.groups
    )
    ways = {}
    for (source, destination), way in seconds.ways.items():
        fixed, per_byte = way.fixed * _TIE, way.per_byte * _TIE
        if destination == place:
            fixed, per_byte = fixed + prices.request, per_byte + prices.there
        elif source == number:
            per_byte += prices.back
        elif source != HOST:
            fixed, per_byte = way.fixed * rates[source], way.per_byte * rates[source]
        ways[source, destination] = Way(fixed, per_byte)
    return Figure(rows, ways)
