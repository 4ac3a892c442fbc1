"""Choose the plans that an edge bundle holds: one without the server, and the best for many links.

A placement is best for one speed of the link. So the problem is solved for bandwidths from 1 Mbit/s
to 10 Gbit/s and for the link that was given; most of them share a handful of placements. Those kept
are the best for the link that was given, the one that runs all on the server if the rules allow it,
and then, one by one, the one that lowers the worst regret over all bandwidths the most:

    regret(link) = (time of the best plan that is kept) / (time of the best plan there is)

All on the server is kept whatever it is predicted to take: it costs no byte here, and where the
predictions are off, the loader is no slower than the better of all here and all there.

The time of a plan counts a call per remote part, since the tensors of a part travel together:

    seconds = edge + server + calls * round trip + bytes / bandwidth

Where plans are to cost little, the cheapest of these and of those that the solver finds by price
is kept beside the one without the server: see :mod:`hybridc.remote.price`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from hybridc.bundle.manifest import CrossingSpec, LinkSpec, PriceSpec
from hybridc.compiler import spec_of
from hybridc.cost_models.link import Route
from hybridc.errors import BudgetError, UnsupportedError
from hybridc.frontend.shapes import Range
from hybridc.placement.decide import Costs, Decision, Request, decide
from hybridc.placement.fallback import Placed, fallback_device, place_and_lower
from hybridc.placement.plan import Plan, make_plan
from hybridc.placement.problem import LATENCY, SECONDS
from hybridc.placement.rules import NodeRule, PrivateRule
from hybridc.remote.audit import audit
from hybridc.remote.price import (
    Usage,
    break_even,
    cheapest_decisions,
    dollars_per_hour,
    prices_of,
    with_placement,
)
from hybridc.runtime.remote_encoding import encoded_bytes, encodings_of, shrink

BANDWIDTHS = tuple(1e6 / 8 * 10 ** (step / 3) for step in range(13))
"""Bytes per second that placements are solved for: 1 Mbit/s to 10 Gbit/s, three to the decade."""

ENOUGH = 1.02
"""Worst regret at which no further plan is kept."""


class NothingForServer(UnsupportedError):
    """No plan gives the server any work."""


@dataclass(frozen=True)
class Candidate:
    """A placement with its figures.

    Attributes:
        decision: The placement.
        plan: Its parts.
        edge_seconds: Predicted time here.
        server_seconds: Predicted time on the server.
        round_trips: Calls to the server.
        bytes: What is sent and received.
        crossings: What that is.
        price: What it costs, where that counts.
    """

    decision: Decision
    plan: Plan
    edge_seconds: float
    server_seconds: float
    round_trips: int
    bytes: int
    crossings: tuple[CrossingSpec, ...]
    price: PriceSpec | None = None

    def seconds(self, link: LinkSpec) -> float:
        """Time of one run over a link."""
        waiting = self.round_trips * link.round_trip_seconds + self.bytes / link.bytes_per_second
        return self.edge_seconds + self.server_seconds + waiting

    @property
    def device_of_nodes(self) -> dict[str, str]:
        """The device of each node by name."""
        pairs = zip(self.decision.groups, self.decision.devices_of_groups(), strict=True)
        return {str(node.name): device.name for group, device in pairs for node in group.nodes}


@dataclass(frozen=True)
class Chosen:
    """The plans of an edge bundle.

    Attributes:
        local: The one without the server; ``None`` if there can be none.
        why_not_local: The reason for that.
        remote: Those with it, the best for the link first.
        link: The link that was given.
    """

    local: Candidate | None
    why_not_local: str
    remote: tuple[Candidate, ...]
    link: LinkSpec

    @property
    def cheapest(self) -> Candidate:
        """The one of the lowest price, where prices count."""
        return min(self.all, key=lambda own: own.price.dollars_per_hour if own.price else 0.0)

    @property
    def all(self) -> tuple[Candidate, ...]:
        """All of them, the local one first."""
        return (*((self.local,) if self.local else ()), *self.remote)


def link_of(request: Request) -> LinkSpec:
    """The link between the first device and the server, as one figure for both ways."""
    there, back = _ways(request)
    rate = 2 / (1 / there.bytes_per_second + 1 / back.bytes_per_second)
    return LinkSpec(there.latency_seconds + back.latency_seconds, rate)


def _ways(request: Request) -> tuple[Route, Route]:
    assert request.hardware is not None
    ends = (request.devices[0].name, str(request.remote))
    return request.hardware.links[ends], request.hardware.links[ends[::-1]]


def choose_plans(
    graph: ir.Graph,
    request: Request,
    first: Placed,
    most: int,
    encoding: str | None = None,
    rate: float | None = None,
) -> Chosen:
    """The plans worth keeping.

    Args:
        graph: The model after the passes.
        request: What the placement was asked for, with the link that was given.
        first: The placement for that link.
        most: How many plans with a server to keep at most.
        encoding: Element type in which large tensors cross; ``None`` for their own.
        rate: Runs per second, where plans are to cost little and not to be fast.

    Raises:
        UsageError: They are to cost little, and nothing has a price.
        NothingForServer: No plan gives the server any work.
    """
    link = link_of(request)
    links = [LinkSpec(link.round_trip_seconds, rate) for rate in BANDWIDTHS]
    asked = [_faster(own, shrink(encoding)) for own in (link, *links)] if encoding else links
    local, why_not = _local(graph, request, first)
    decisions = [first.decision, *_decisions(graph, request, first, asked)]
    if rate is not None:
        decisions = _by_price(request, decisions, rate, encoding)
    found = _candidates(graph, request, decisions, encoding)
    remote = [candidate for candidate in found.values() if candidate.round_trips]
    if not remote:
        raise _nothing_for_the_server(request, first.decision)
    if rate is not None:
        return _cheapest(Chosen(local, why_not, tuple(remote), link), request, rate)
    everything = _everything_there(graph, request, first)
    if everything is not None and everything.placement not in found:
        remote.append(_candidate(graph, request, everything, encoding))
    kept = _keep(remote, local, [link, *links], most, everything)
    return Chosen(local, why_not, kept, link)


def _candidates(
    graph: ir.Graph, request: Request, decisions: Sequence[Decision], encoding: str | None
) -> dict[tuple[int, ...], Candidate]:
    """What each placement would be as a plan, in their order."""
    found: dict[tuple[int, ...], Candidate] = {}
    for decision in decisions:
        if decision.placement not in found:
            found[decision.placement] = _candidate(graph, request, decision, encoding)
    return found


def _by_price(
    request: Request, decisions: Sequence[Decision], rate: float, encoding: str | None
) -> list[Decision]:
    """Placements as those of the first decision's problem, with those that the prices suggest."""
    first, prices = decisions[0], prices_of(request, *_ways(request))
    times = shrink(encoding) if encoding else 1
    priced = cheapest_decisions(first, prices, rate, str(request.remote), times, request.seconds)
    others = (decision.costs.solution for decision in decisions[1:] if decision.costs)
    return [first, *priced, *(with_placement(first, solution) for solution in others)]


def _cheapest(chosen: Chosen, request: Request, rate: float) -> Chosen:
    """The plan without the server and the cheapest with it, each with its price."""
    prices, remote = prices_of(request, *_ways(request)), str(request.remote)
    base = _usage(chosen.local, remote) if chosen.local else None

    def priced(candidate: Candidate) -> Candidate:
        usage = _usage(candidate, remote)
        equal = break_even(usage, base, prices) if base and usage.requests else ()
        price = PriceSpec(rate, dollars_per_hour(usage, prices, rate), equal)
        return dataclasses.replace(candidate, price=price)

    def rank(candidate: Candidate) -> tuple[float, float]:
        assert candidate.price is not None
        return candidate.price.dollars_per_hour, candidate.seconds(chosen.link)

    best = min(map(priced, chosen.remote), key=rank)
    return dataclasses.replace(
        chosen, local=priced(chosen.local) if chosen.local else None, remote=(best,)
    )


def _usage(candidate: Candidate, remote: str) -> Usage:
    """What a run of a plan takes of what has a price."""
    sent = sum(c.bytes for c in candidate.crossings if c.destination == remote)
    return Usage(
        candidate.edge_seconds,
        candidate.server_seconds,
        candidate.round_trips,
        sent,
        candidate.bytes - sent,
    )


def replaceable(chosen: Chosen) -> Chosen:
    """The plans that stay as they are while the server's part is replaced.

    Raises:
        UnsupportedError: There is none.
    """
    remote = tuple(candidate for candidate in chosen.remote if candidate.round_trips == 1)
    if not remote:
        raise UnsupportedError(
            "--remote-updates needs a plan that asks the server once, and each asks it more often; "
            "place the nodes between with --pin"
        )
    why_not = "it would hold the weights that --remote-updates may replace"
    return dataclasses.replace(chosen, local=None, why_not_local=why_not, remote=remote)


def _faster(link: LinkSpec, times: int) -> LinkSpec:
    """A link for which tensors of fewer bytes look like those that the placement knows."""
    return LinkSpec(link.round_trip_seconds, link.bytes_per_second * times)


def _keep(
    remote: Sequence[Candidate],
    local: Candidate | None,
    links: Sequence[LinkSpec],
    most: int,
    everything_there: Decision | None,
) -> tuple[Candidate, ...]:
    """The best for the first link, all there, and those that lower the worst regret the most."""
    everything = [*remote, *([local] if local else [])]
    kept = [min(remote, key=lambda candidate: candidate.seconds(links[0]))]
    if everything_there is not None and most > 1:
        found = (c for c in remote if c.decision.placement == everything_there.placement)
        kept += [candidate for candidate in found if candidate not in kept]
    always = [local] if local else []

    def worst(plans: Sequence[Candidate]) -> float:
        pairs = ((_fastest(plans, link), _fastest(everything, link)) for link in links)
        return max(own / best if best else 1.0 for own, best in pairs)

    while len(kept) < most and worst([*always, *kept]) > ENOUGH:
        others = [candidate for candidate in remote if candidate not in kept]
        if not others:
            break
        kept.append(min(others, key=lambda other: worst([*always, *kept, other])))
    return tuple(kept)


def _fastest(plans: Sequence[Candidate], link: LinkSpec) -> float:
    return min(plan.seconds(link) for plan in plans)


def _decisions(
    graph: ir.Graph, request: Request, first: Placed, links: Sequence[LinkSpec]
) -> Iterator[Decision]:
    """The best placement for each link; a link too slow for the limits on time has none."""
    assert request.hardware is not None
    refuge = fallback_device(request.devices)
    home, server = request.devices[0].name, str(request.remote)
    for link in links:
        route = Route(link.round_trip_seconds / 2, link.bytes_per_second)
        links_here = {**request.hardware.links, (home, server): route, (server, home): route}
        hardware = dataclasses.replace(request.hardware, links=links_here)
        asked = dataclasses.replace(request, hardware=hardware, objective=LATENCY)
        try:
            yield decide(graph, asked, first.decision.refused, refuge)
        except BudgetError:
            continue


def _local(graph: ir.Graph, request: Request, first: Placed) -> tuple[Candidate | None, str]:
    """The plan without the server, or why there is none."""
    forbid = NodeRule("forbid", "*", str(request.remote))
    rules = dataclasses.replace(request.rules, rules=(*request.rules.rules, forbid))
    asked = dataclasses.replace(request, rules=rules, objective=LATENCY)  # its machine is paid
    try:
        refuge = fallback_device(request.devices)
        decision = decide(graph, asked, first.decision.refused, refuge)
    except (BudgetError, UnsupportedError) as error:
        return None, str(error).splitlines()[0]
    return _candidate(graph, request, decision), ""


def _everything_there(graph: ir.Graph, request: Request, first: Placed) -> Decision | None:
    """The placement of all on the server; ``None`` if it may not or cannot run all of it."""
    pin = NodeRule("pin", "*", str(request.remote))
    rules = dataclasses.replace(request.rules, rules=(*request.rules.rules, pin))
    asked = dataclasses.replace(request, rules=rules, objective=LATENCY)
    try:
        return decide(graph, asked, first.decision.refused, fallback_device(request.devices))
    except (BudgetError, UnsupportedError):
        return None


def _candidate(
    graph: ir.Graph, request: Request, decision: Decision, encoding: str | None = None
) -> Candidate:
    costs, remote = decision.costs, str(request.remote)
    assert costs is not None
    devices = decision.devices_of_groups()
    plan = make_plan(graph, decision.groups, devices, request.devices[0], remote)
    sizes = {tensor.name: tensor.bytes for tensor in costs.problem.tensors}
    crossings = _as_sent(graph, audit(graph, plan, request.rules, remote, sizes), encoding)
    edge, server = _times(costs, remote)
    return Candidate(
        decision,
        plan,
        edge,
        server,
        sum(part.device.name == remote for part in plan.parts),
        sum(crossing.bytes for crossing in crossings),
        crossings,
    )


def _as_sent(
    graph: ir.Graph, crossings: Sequence[CrossingSpec], encoding: str | None
) -> tuple[CrossingSpec, ...]:
    """What crosses, in the bytes that it is encoded in."""
    if encoding is None:
        return tuple(crossings)
    values = {value.name: value for node in graph for value in node.outputs}
    values |= {value.name: value for value in graph.inputs}
    found = []
    for crossing in crossings:
        spec = spec_of(values[crossing.tensor], {})
        if crossing.bytes and encodings_of([spec], encoding):
            count = encoded_bytes(spec, encoding, crossing.bytes)
            share = crossing.share * count / crossing.bytes
            reason = f"{crossing.reason}, as {encoding}"
            crossing = dataclasses.replace(crossing, bytes=count, share=share, reason=reason)
        found.append(crossing)
    return tuple(found)


def _times(costs: Costs, remote: str) -> tuple[float, float]:
    """Seconds here and on the server, without the link."""
    problem, placement = costs.problem, costs.solution.placement
    seconds, number = problem.figures[SECONDS], problem.devices.index(remote)
    times = [0.0, 0.0]
    for group, device in enumerate(placement):
        times[device == number] += seconds.groups[group][device]
    for tensor, source, destination in problem.copies(placement):
        if destination != problem.places[number] and source != number:
            times[0] += seconds.ways[source, destination].price(tensor.bytes)
    return times[0], times[1]


def _nothing_for_the_server(request: Request, decision: Decision) -> NothingForServer:
    """Why no plan uses the server: a rule, its target, or costs."""
    remote = str(request.remote)
    taken = [own.get(remote, []) for own in decision.exclusions.by_group]
    refused = [
        any(
            device.name == remote
            for node in group.nodes
            for device in decision.refused.get(node, ())
        )
        for group in decision.groups
    ]
    rules = dict.fromkeys(rule for own in taken for rule in own)
    if rules and all(own or away for own, away in zip(taken, refused, strict=True)):
        texts = " and ".join(map(str, rules))
        hint = ""
        if any(isinstance(rule, PrivateRule) for rule in rules):
            hint = "; name a tensor that may reach it with --release"
        return NothingForServer(f"{texts} leaves nothing that may run on {remote}{hint}")
    return NothingForServer(
        f"nothing is worth running on {remote} at any speed of the link, by the profiles; compile "
        "without --remote, give another --profile, or place nodes there with --pin"
    )


def lower(
    graph: ir.Graph,
    request: Request,
    candidate: Candidate,
    fallback: bool,
    ranges: Mapping[str, Range],
) -> Placed:
    """A candidate's parts in their targets' own form."""
    fixed = dataclasses.replace(request, fixed=candidate.device_of_nodes)
    return place_and_lower(graph, fixed, fallback, ranges)
