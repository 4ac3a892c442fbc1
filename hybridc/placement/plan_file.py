"""A plan as a JSON file: printed by ``hybridc plan``, edited by hand, kept in the bundle.

It holds all that the decision rests on: work of groups, profiles, links, rules. So a plan can be
explained, and asked what other hardware would change, without the model.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hybridc.bundle.manifest import CrossingSpec, build_record
from hybridc.cost_models.device import DeviceProfile, check_profile
from hybridc.cost_models.group_work import GroupWork
from hybridc.errors import UsageError
from hybridc.placement.rules import RuleTexts

SCHEMA = "1.0"

PLAN = "plan.json"
"""Name of the plan in a bundle."""


@dataclass(frozen=True)
class PlanDevice:
    """A device of a plan.

    Attributes:
        name: Its name.
        kind: Kind of its target.
        specification: What is built for.
        profile: Its figures; ``None`` where they are not known.
        is_fallback: Whether it only runs what no other can.
        is_remote: Whether it is on a server.
    """

    name: str
    kind: str
    specification: str
    profile: DeviceProfile | None
    is_fallback: bool
    is_remote: bool = False


@dataclass(frozen=True)
class PlanLink:
    """One way of a link that was given."""

    source: str
    destination: str
    latency_seconds: float
    bytes_per_second: float
    dollars_per_gigabyte: float = 0.0


@dataclass(frozen=True)
class PlanCost:
    """What a group costs on one device.

    Attributes:
        device: The device.
        seconds: Time of one run.
        source: Where the time comes from.
        confidence: One minus the relative error to be expected.
        moved: What moving the group there alone would add to the objective; ``None`` where it may
            not run there.
        copies: Share of that which copies are.
    """

    device: str
    seconds: float
    source: str
    confidence: float
    moved: float | None
    copies: float | None


@dataclass(frozen=True)
class PlanGroup:
    """A group with its device.

    Attributes:
        name: Its anchor's name.
        device: Where it runs; edit this.
        placed: Where it was placed; leave this, so that an edit can be told.
        nodes: Names of its nodes.
        why: ``only device``, ``unsupported``, ``pinned``, ``rule``, ``memory``, ``limit``,
            ``cost``, ``order`` (no costs known: the first device that can) or ``plan`` (edited).
        reason: The same in words.
        refused: Why targets refused its nodes, by device.
        excluded: Rules that keep it off devices, by device.
        costs: What it costs on each device that may run it.
        work: What it does; ``None`` where hardware is not known.
    """

    name: str
    device: str
    placed: str
    nodes: tuple[str, ...]
    why: str
    reason: str
    refused: Mapping[str, str]
    excluded: Mapping[str, str]
    costs: tuple[PlanCost, ...]
    work: GroupWork | None


@dataclass(frozen=True)
class PlanTensor:
    """A tensor that groups pass on, by index of the groups; source -1 is the caller."""

    name: str
    bytes: int
    source: int
    readers: tuple[int, ...]
    is_output: bool


@dataclass(frozen=True)
class PlanTransfer:
    """A tensor that is copied: from a device or ``input``, to a device or ``output``."""

    tensor: str
    source: str
    destination: str
    bytes: int
    seconds: float


@dataclass(frozen=True)
class Prediction:
    """What the cost model says about a plan.

    Attributes:
        objective: What was minimized.
        value: What came out: seconds, joules or dollars; for throughput, seconds of the slowest
            stage.
        bound: No plan is below this.
        gap: How far above the bound the plan may be, relative to its value.
        solver: What found it.
        latency_seconds: Time of one run, parts and copies one after another.
        runs_per_second: Rate of a pipeline with all devices and links at work.
        joules: Energy of one run; ``None`` where it is not known.
        dollars: Price of the time that devices are busy in one run.
        busy_seconds: Time of each device and link in one run.
        memory_bytes: Peak on each device, as far as it is known before building.
        confidence: Confidence of the groups' times, each weighted with its time.
        alternatives: What the objective would be for other plans: all groups on one device as far
            as they may, and each on the fastest device as runtimes without costs do (``greedy``).
    """

    objective: str
    value: float
    bound: float
    gap: float
    solver: str
    latency_seconds: float
    runs_per_second: float
    joules: float | None
    dollars: float
    busy_seconds: Mapping[str, float]
    memory_bytes: Mapping[str, int]
    confidence: float
    alternatives: Mapping[str, float]


@dataclass(frozen=True)
class PlanFile:
    """A whole plan.

    Attributes:
        schema: Version of this description.
        hybridc: Version of hybridc.
        model: File name of the model.
        model_sha256: Checksum of the model and its external data.
        shapes: The ``--shape`` options.
        bindings: The ``--bind`` options.
        rules: The rules, as they were given.
        sizes: Value of each dynamic dimension that costs are counted at.
        devices: The devices.
        links: The links that were given.
        groups: The groups in topological order.
        tensors: What they pass on.
        transfers: What is copied.
        prediction: Figures; ``None`` where hardware is not known.
        notes: What a reader should know.
        audit: What crosses to and from a server, and why it may.
        merged: Nodes of the model's file that simplifying took away, and the node that what they
            computed goes to.
    """

    schema: str
    hybridc: str
    model: str
    model_sha256: str
    shapes: tuple[str, ...]
    bindings: tuple[str, ...]
    rules: RuleTexts
    sizes: Mapping[str, int]
    devices: tuple[PlanDevice, ...]
    links: tuple[PlanLink, ...]
    groups: tuple[PlanGroup, ...]
    tensors: tuple[PlanTensor, ...]
    transfers: tuple[PlanTransfer, ...]
    prediction: Prediction | None
    notes: tuple[str, ...]
    audit: tuple[CrossingSpec, ...] = ()
    merged: Mapping[str, str] = field(default_factory=dict)

    @property
    def remote(self) -> str | None:
        """Name of the device on a server, if there is one."""
        return next((device.name for device in self.devices if device.is_remote), None)

    def device_of_nodes(self) -> dict[str, str]:
        """The device of each node."""
        return {node: group.device for group in self.groups for node in group.nodes}


def plan_to_json(plan: PlanFile) -> str:
    """The plan as text."""
    return json.dumps(dataclasses.asdict(plan), indent=1, ensure_ascii=False) + "\n"


def plan_from_json(text: str | bytes, where: str) -> PlanFile:
    """Read a plan.

    Raises:
        UsageError: It is none, is of a newer schema, or names a device that it does not have.
    """
    try:
        data: Any = json.loads(text)
        if not isinstance(data, dict) or "groups" not in data:
            raise ValueError("it has no groups")
        if str(data.get("schema", "")).partition(".")[0] != SCHEMA.partition(".")[0]:
            raise ValueError(f"its schema is {data.get('schema')!r}, and this reads {SCHEMA}")
        plan: PlanFile = build_record(PlanFile, data, "plan")
        _check(plan)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise UsageError(f"{where} is no plan: {error}") from error
    return plan


def _check(plan: PlanFile) -> None:
    """What the types do not say: names, indices, and figures that make sense."""
    names = [device.name for device in plan.devices]
    for group in plan.groups:
        if group.device not in names:
            raise ValueError(
                f"group {group.name!r} is on device {group.device!r}; the devices are "
                f"{', '.join(names)}"
            )
    for device in plan.devices:
        if device.profile is not None:
            check_profile(device.profile)
    for index, tensor in enumerate(plan.tensors):
        ends = (tensor.source, *tensor.readers)
        fits = tensor.source >= -1 and all(a < b for a, b in itertools.pairwise(ends))
        if not fits or max(ends) >= len(plan.groups) or tensor.bytes < 0:
            raise ValueError(f"tensors[{index}] does not fit the groups")
    seconds = [cost.seconds for group in plan.groups for cost in group.costs]
    seconds += [link.latency_seconds for link in plan.links]
    if not all(0 <= value < math.inf for value in seconds):
        raise ValueError("a time is below zero")
    if not all(0 < link.bytes_per_second < math.inf for link in plan.links):
        raise ValueError("a bandwidth is not above zero")
