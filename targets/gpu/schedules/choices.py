"""What a product's cut is chosen for, and in which order ways to cut it are tried."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from hybridc.targets.tuning import Candidate, Figures, Problem, Tuning, figures, require
from tvm import DataType, tirx


def product_problem(kind: str, node: Any, shape: Sequence[int], **others: int) -> Problem:
    """What a product's cut is chosen for.

    Args:
        kind: Kind of the kernel.
        node: The product's block before it is brought into its form. How many elements its factors
            have tells convolutions of one form apart by stride and kernel.
        shape: Extents of b, m, n and k.
        others: More sizes.
    """
    batch, rows, columns, depth = shape
    first, second = (region.source for region in node.reads)
    return Problem(
        kind,
        figures(
            batch=batch,
            rows=rows,
            columns=columns,
            depth=depth,
            bits=int(DataType(str(first.dtype)).bits),
            first_elements=_elements(first),
            second_elements=_elements(second),
            **others,
        ),
    )


def _elements(buffer: Any) -> int:
    return math.prod(int(dim) for dim in buffer.shape if isinstance(dim, tirx.IntImm))


def in_order(
    problem: Problem, candidates: Mapping[Figures, Candidate], tuning: Tuning
) -> list[Candidate]:
    """Candidates by estimate, best first, but for one that was measured to be the best.

    Raises:
        UsageError: The measured one is none of them.
    """
    choice = tuning.choice(problem)
    if choice is None:
        return list(candidates.values())
    chosen = require(problem, choice, candidates)
    return [chosen, *(other for name, other in candidates.items() if name != choice)]
