"""A lower bound for large graphs: cut into blocks, and solve each by itself.

What passes between blocks is copied for nothing, so the sum over the blocks is at most what any
placement costs. Time and memory grow with the graph and no faster. Blocks are pieces of the
topological order, which few tensors cross in networks that are deeper than wide.
"""

from __future__ import annotations

import dataclasses
import math
import time

from hybridc.placement.problem import HOST, Figure, Problem
from hybridc.placement.solvers.integer_program import IntegerProgram
from hybridc.placement.solvers.local_search import simple_bound

BLOCK = 200
"""Groups in a block."""


def block_bound(problem: Problem, seconds: float, size: int = BLOCK) -> float:
    """No placement's sum is below this; blocks for which time runs out count without copies."""
    deadline = time.monotonic() + seconds
    bounds = []
    for first in range(0, len(problem.groups), size):
        block = _block(problem, first, min(first + size, len(problem.groups)))
        left = deadline - time.monotonic()
        bounds.append(IntegerProgram().solve(block, left).bound if left > 0 else 0.0)
        bounds[-1] = max(bounds[-1], simple_bound(block))
    return math.fsum(bounds)


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
