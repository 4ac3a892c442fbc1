"""Large graphs: cut into blocks, and solve each by itself.

What passes between blocks is copied for nothing in that, so the sum over the blocks is at most what
any placement costs: a lower bound. Their placements side by side are a placement of the whole, near
the bound if few tensors cross from block to block. Time and memory grow with the graph and no
faster. Blocks are pieces of the topological order, which few tensors cross in networks that are
deeper than wide.
"""

from __future__ import annotations

import dataclasses
import math
import time

from hybridc.placement.problem import HOST, Figure, Placement, Problem
from hybridc.placement.solvers.integer_program import IntegerProgram
from hybridc.placement.solvers.local_search import simple_bound

BLOCK = 400
"""Groups in a block: more lose less at the borders, and take HiGHS longer for each group."""


def solve_blocks(
    problem: Problem, start: Placement, seconds: float, size: int = BLOCK
) -> tuple[Placement, float]:
    """The best placement of each block, and a bound that no placement's sum is below.

    Limits are left out.

    Args:
        problem: The problem.
        start: A placement; blocks for which time runs out keep it, and count without copies.
        seconds: Time for all blocks.
        size: Groups in a block.
    """
    deadline = time.monotonic() + seconds
    placement: list[int] = []
    bounds = []
    for first in range(0, len(problem.groups), size):
        last = min(first + size, len(problem.groups))
        block, own = _block(problem, first, last), start[first:last]
        left = deadline - time.monotonic()
        found = IntegerProgram().solve(block, left, own) if left > 0 else None
        placement += found.placement if found else own
        bounds.append(max(found.bound if found else 0.0, simple_bound(block)))
    return tuple(placement), math.fsum(bounds) + problem.figure.once


def _block(problem: Problem, first: int, last: int) -> Problem:
    """The groups from ``first`` up to ``last``, with the tensors that they pass to each other."""
    tensors = []
    for tensor in problem.tensors:
        inside = first <= tensor.source < last
        readers = tuple(reader - first for reader in tensor.readers if first <= reader < last)
        # An input that several blocks read may need one copy only: the first block pays for it.
        starts_here = tensor.source == HOST and first <= min(tensor.readers, default=-1) < last
        if inside or starts_here:
            source = tensor.source - first if inside else HOST
            tensors.append(dataclasses.replace(tensor, source=source, readers=readers))
    figures = {
        name: Figure(figure.groups[first:last], figure.ways)
        for name, figure in problem.figures.items()
    }
    return dataclasses.replace(
        problem,
        groups=problem.groups[first:last],
        tensors=tuple(tensors),
        allowed=problem.allowed[first:last],
        weights=problem.weights[first:last],
        figures=figures,
        limits={},
        memory={},
    )
