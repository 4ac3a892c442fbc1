"""What moving one group would change, all else held: what an explanation is made of."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hybridc.placement.problem import HOST, Problem, Tensor


@dataclass(frozen=True)
class Change:
    """A change of the sum that the objective is made of, in its unit.

    Attributes:
        own: Change of the group's own price.
        copies: Change of the price of copies, and of using several devices at all; above zero if
            moving causes more than it saves.
    """

    own: float
    copies: float

    @property
    def total(self) -> float:
        """Both together; below zero if the move would pay by itself."""
        return self.own + self.copies


def tensors_of(problem: Problem) -> list[list[Tensor]]:
    """The tensors that each group reads or computes."""
    found: list[list[Tensor]] = [[] for _ in problem.groups]
    for tensor in problem.tensors:
        ends = set(tensor.readers) | ({tensor.source} - {HOST})
        for group in ends:
            found[group].append(tensor)
    return found


def change_of_move(
    problem: Problem,
    placement: Sequence[int],
    group: int,
    device: int,
    tensors: Sequence[Tensor],
) -> Change:
    """What changes if a group moves to a device that may run it.

    Args:
        problem: The problem.
        placement: Where all groups are.
        group: The one that moves.
        device: Where to.
        tensors: The tensors that it reads or computes, see :func:`tensors_of`.
    """
    prices = problem.figure.groups[group]
    moved = list(placement)
    moved[group] = device
    run = problem.figure.of_run
    before = math.fsum(_price(problem, tensor, placement) for tensor in tensors) + run(placement)
    after = math.fsum(_price(problem, tensor, moved) for tensor in tensors) + run(moved)
    return Change(prices[device] - prices[placement[group]], after - before)


def _price(problem: Problem, tensor: Tensor, placement: Sequence[int]) -> float:
    copies = problem.copies_of(tensor, placement)
    ways = problem.figure.ways
    return math.fsum(ways[source, q].price(tensor.bytes) for source, q in copies)
