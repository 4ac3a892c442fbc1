"""The problem of placement, in numbers only: what solvers get and what every plan is judged by.

Groups of nodes run on devices. A tensor is copied to each place (a memory) in which it is read and
was not computed, once for each, however many read it there. Beside that each device that reads it
takes it, once, however many groups do so there: that is all that passing on within one memory
costs. The model's inputs start in the host's memory, and its outputs end there.

                      ,--> llvm:0 takes it --> group, group
    tensor on cuda:0 --copy to the host--+--> llvm:1 takes it --> group
                                         `--> the caller

The latency of a plan is the sum over its groups and copies, and what any run takes besides, which
may be more if it uses several devices: the time of a run whose parts wait for each other. The
loader's executor runs branches on different devices at the same time, so for plans with such
branches it is an upper bound. In a pipeline all devices and links work at once on different inputs,
and the busiest decides.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

LATENCY = "latency"
THROUGHPUT = "throughput"
ENERGY = "energy"
COST = "cost"
OBJECTIVES = (LATENCY, THROUGHPUT, ENERGY, COST)

SECONDS = "seconds"
JOULES = "joules"
DOLLARS = "dollars"
FIGURE_OF = {LATENCY: SECONDS, THROUGHPUT: SECONDS, ENERGY: JOULES, COST: DOLLARS}
"""What an objective adds up; throughput adds up for each device and link by itself."""

HOST = -1
"""Where the model's inputs are and its outputs go, as if it were a device."""

Placement = tuple[int, ...]
"""Index of the device of each group."""


class Infeasible(Exception):
    """No placement keeps the limits, or none was found in the time.

    Attributes:
        proven: Whether there is none.
    """

    def __init__(self, proven: bool = True) -> None:
        super().__init__()
        self.proven = proven


@dataclass(frozen=True)
class Tensor:
    """A tensor that groups pass on.

    Attributes:
        name: ONNX name.
        bytes: Its size.
        source: Group that computes it; ``HOST`` for an input of the model.
        readers: Groups that read it, each once.
        is_output: Whether the caller reads it.
    """

    name: str
    bytes: int
    source: int
    readers: tuple[int, ...]
    is_output: bool = False


@dataclass(frozen=True)
class Way:
    """What a copy costs in one figure: ``fixed + per_byte * bytes``."""

    fixed: float
    per_byte: float

    def price(self, count: int) -> float:
        """Price of a copy of so many bytes."""
        return self.fixed + self.per_byte * count


@dataclass(frozen=True)
class Figure:
    """One thing to add up: seconds, joules or dollars.

    Attributes:
        groups: Price of each group on each device.
        ways: Price of a copy by source device (or ``HOST``) and destination, see
            :meth:`Problem.destinations`; all figures of a problem have the same ways.
        once: Price of a run, wherever its groups are.
        split: Further price of a run that uses more than one device.
    """

    groups: tuple[tuple[float, ...], ...]
    ways: Mapping[tuple[int, int], Way]
    once: float = 0.0
    split: float = 0.0

    def of_run(self, placement: Sequence[int]) -> float:
        """Price of a run beside its groups and copies."""
        return self.once + (self.split if len(set(placement)) > 1 else 0.0)


@dataclass(frozen=True)
class Problem:
    """Everything that decides about a placement.

    Attributes:
        devices: Names.
        places: Which memory each device computes in; 0 is the host's.
        groups: Names, in topological order.
        tensors: What groups pass on.
        allowed: Devices that may run each group.
        figures: What can be added up, by name.
        objective: One of ``OBJECTIVES``.
        limits: Most that a figure may add up to.
        memory: Most bytes at a time by device.
        weights: Bytes of each group's weights.
    """

    devices: tuple[str, ...]
    places: tuple[int, ...]
    groups: tuple[str, ...]
    tensors: tuple[Tensor, ...]
    allowed: tuple[frozenset[int], ...]
    figures: Mapping[str, Figure]
    objective: str = LATENCY
    limits: Mapping[str, float] = field(default_factory=dict)
    memory: Mapping[int, int] = field(default_factory=dict)
    weights: tuple[int, ...] = ()

    @property
    def figure(self) -> Figure:
        """What the objective adds up."""
        return self.figures[FIGURE_OF[self.objective]]

    @property
    def is_sum(self) -> bool:
        """Whether the objective adds up over everything, and nothing else counts."""
        return self.objective != THROUGHPUT and not self.limits and not self.memory

    def place(self, device: int) -> int:
        """The memory that a device, or the caller, works in."""
        return place_of(self.places, device)

    def destinations(self, source: int, reader: int) -> tuple[int, ...]:
        """Where a tensor has to go to be read; each is paid for once, whoever shares it.

        Returns:
            The reader's place, if the tensor is not there; and the reader itself, if it takes
            tensors of this source at a price.
        """
        return self._destinations[source, reader]

    @functools.cached_property
    def _destinations(self) -> Mapping[tuple[int, int], tuple[int, ...]]:
        ways = self.figure.ways
        found = {}
        for source, reader in itertools.product((HOST, *range(len(self.devices))), repeat=2):
            place, taker = self.place(reader), taker_of(self.places, reader)
            moved = (place,) if self.place(source) != place else ()
            taken = (taker,) if source != reader and (source, taker) in ways else ()
            found[source, reader] = (*moved, *taken)
        return found

    def copies(self, placement: Sequence[int]) -> Iterator[tuple[Tensor, int, int]]:
        """Each copy of a placement: the tensor, the device it comes from, and the destination."""
        for tensor in self.tensors:
            for source, destination in self.copies_of(tensor, placement):
                yield tensor, source, destination

    def copies_of(self, tensor: Tensor, placement: Sequence[int]) -> list[tuple[int, int]]:
        """Source and destination of each copy of one tensor."""
        source = HOST if tensor.source == HOST else placement[tensor.source]
        readers = [placement[reader] for reader in tensor.readers]
        if tensor.is_output:
            readers.append(HOST)
        return [(source, q) for q in self.needed(source, readers)]

    def needed(self, source: int, readers: Iterable[int]) -> list[int]:
        """All destinations of a tensor that some devices, or the caller, read."""
        return sorted({q for reader in readers for q in self.destinations(source, reader)})


def place_of(places: Sequence[int], device: int) -> int:
    """The memory that a device, or the caller, works in."""
    return 0 if device == HOST else places[device]


def taker_of(places: Sequence[int], reader: int) -> int:
    """The destination that a device, or the caller, is itself; above those of all places."""
    return max(places) + 2 + reader


def reader_of(places: Sequence[int], destination: int) -> int | None:
    """The device, or the caller, that a destination is; ``None`` if it is a place."""
    count = max(places) + 1
    return None if destination < count else destination - count - 1


@dataclass(frozen=True)
class Solution:
    """What a solver found.

    Attributes:
        placement: Device of each group.
        bound: No placement has an objective below this.
        solver: Its name.
    """

    placement: Placement
    bound: float
    solver: str


def total(problem: Problem, name: str, placement: Sequence[int]) -> float:
    """What a figure adds up to over all groups and copies; infinite if a device is not allowed."""
    figure = problem.figures[name]
    groups = (figure.groups[group][device] for group, device in enumerate(placement))
    copies = (figure.ways[a, q].price(t.bytes) for t, a, q in problem.copies(placement))
    return math.fsum(groups) + math.fsum(copies) + figure.of_run(placement)


def busy(problem: Problem, placement: Sequence[int]) -> dict[str, float]:
    """Seconds that each device and each link works for one input.

    A link is called after the two memories that it joins; taking a tensor is the work of the device
    that does so.
    """
    figure = problem.figures[SECONDS]
    found = dict.fromkeys(problem.devices, 0.0)
    for group, device in enumerate(placement):
        found[problem.devices[device]] += figure.groups[group][device]
    for tensor, source, destination in problem.copies(placement):
        name = resource(problem, source, destination)
        found[name] = found.get(name, 0.0) + figure.ways[source, destination].price(tensor.bytes)
    return found


def resource(problem: Problem, source: int, destination: int) -> str:
    """What is busy with a copy: a device's name, or that of a link."""
    reader = reader_of(problem.places, destination)
    if reader is not None and reader != HOST:
        return problem.devices[reader]
    place = problem.place(HOST) if reader == HOST else destination
    return f"{place_name(problem, problem.place(source))}->{place_name(problem, place)}"


def place_name(problem: Problem, place: int) -> str:
    """A memory's name: ``host``, or that of the device that has it."""
    return "host" if place == 0 else problem.devices[problem.places.index(place)]


def peak_memory(problem: Problem, placement: Sequence[int], device: int) -> int:
    """Most bytes that a device holds at a time, when groups run in their order.

    It holds the weights of its groups, every copy that came in (the loader keeps those buffers),
    and each tensor that it computes until its last reader has run; outputs stay to the end. What
    passes inside of one part may need less, since memory is planned there.
    """
    held = sum(problem.weights[g] for g, d in enumerate(placement) if d == device)
    held += sum(
        tensor.bytes
        for tensor, source, destination in problem.copies(placement)
        if is_held(problem, device, tensor, source, destination)
    )
    changes = [0] * (len(placement) + 1)
    for tensor in problem.tensors:
        if tensor.source != HOST and placement[tensor.source] == device:
            first, last = lifetime(tensor, len(placement))
            changes[first] += tensor.bytes
            changes[last + 1] -= tensor.bytes
    alive, most = 0, 0
    for change in changes:
        alive += change
        most = max(most, alive)
    return held + most


def is_held(problem: Problem, device: int, tensor: Tensor, source: int, destination: int) -> bool:
    """Whether a copy takes memory of a device; results that go to the caller are the caller's."""
    if destination != problem.place(device) or problem.place(source) == destination:
        return False
    return not (tensor.is_output and destination == 0)


def lifetime(tensor: Tensor, groups: int) -> tuple[int, int]:
    """First and last group during whose run a computed tensor is there."""
    last = groups - 1 if tensor.is_output else max(tensor.readers, default=tensor.source)
    return tensor.source, last


def objective(problem: Problem, placement: Sequence[int]) -> float:
    """What a placement is judged by; infinite if it breaks a rule or a limit."""
    if not is_feasible(problem, placement):
        return math.inf
    if problem.objective == THROUGHPUT:
        return max(busy(problem, placement).values(), default=0.0)
    return total(problem, FIGURE_OF[problem.objective], placement)


def is_feasible(problem: Problem, placement: Sequence[int]) -> bool:
    """Whether a placement keeps all rules and limits."""
    if any(device not in problem.allowed[group] for group, device in enumerate(placement)):
        return False
    slack = 1 + 1e-9  # sums in another order differ in the last bits
    if any(total(problem, n, placement) > most * slack for n, most in problem.limits.items()):
        return False
    memory = problem.memory.items()
    return all(peak_memory(problem, placement, device) <= most for device, most in memory)
