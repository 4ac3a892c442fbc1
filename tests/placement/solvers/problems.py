"""Random problems: small enough to try every placement, and large ones."""

import dataclasses
import itertools
import math
import random

from hypothesis import strategies as st

from hybridc.placement.problem import (
    DOLLARS,
    HOST,
    JOULES,
    SECONDS,
    Figure,
    Problem,
    Tensor,
    Way,
    objective,
    taker_of,
)

PLACES = {
    1: [(0,), (1,)],
    2: [(0, 0), (0, 1), (1, 0), (1, 2)],
    3: [(0, 0, 1), (0, 1, 2), (0, 1, 1)],
    4: [(0, 0, 1, 2), (0, 1, 2, 2), (0, 1, 2, 3)],
}


def make_keys(places, source):
    """Every copy that can occur, and takers that are paid for: all of them, some, or none."""
    ends = [HOST, *range(len(places))]
    share = source.choice((0.0, 0.5, 1.0))
    copies = [(a, place) for a in ends for place in range(max(places) + 1)]
    takers = [(a, taker_of(places, b)) for a in ends for b in ends if source.random() < share]
    return copies + takers


def make_ways(keys, source):
    """A price for each way."""
    return {
        key: Way(source.choice((0, 1, 2, 5)) / 7, source.choice((0, 1, 3)) / 11) for key in keys
    }


def make_tensors(count, source):
    """Tensors of a random acyclic graph in topological order; some read by many."""
    tensors = []
    for number in range(count):
        later = range(number + 1, count)
        readers = source.sample(later, source.randint(0, min(3, len(later))))
        is_output = not readers or source.random() < 0.2
        size = source.choice((0, 1, 2, 7))
        tensors.append(Tensor(f"t{number}", size, number, tuple(sorted(readers)), is_output))
    readers = source.sample(range(count), source.randint(1, min(count, 3)))
    return (*tensors, Tensor("x", source.randint(0, 5), HOST, tuple(sorted(readers))))


def make_problem(seed, devices, groups, objective_name="latency", forbid=0.2, split=0.0):
    source = random.Random(seed)
    places = source.choice(PLACES[devices])
    tensors = make_tensors(groups, source)
    allowed = []
    for _ in range(groups):
        some = {d for d in range(devices) if source.random() >= forbid}
        allowed.append(frozenset(some or {source.randrange(devices)}))
    figures = {}
    keys = make_keys(places, source)
    for name in (SECONDS, JOULES, DOLLARS):
        rows = [[source.randint(0, 20) / 3 for _ in range(devices)] for _ in range(groups)]
        kept = [
            tuple(p if d in a else math.inf for d, p in enumerate(row))
            for row, a in zip(rows, allowed, strict=True)
        ]
        once = 2.5 * (seed % 3)
        figures[name] = Figure(tuple(kept), make_ways(keys, source), once, split)
    return Problem(
        devices=tuple(f"d{i}" for i in range(devices)),
        places=places,
        groups=tuple(f"g{i}" for i in range(groups)),
        tensors=tensors,
        allowed=tuple(allowed),
        figures=figures,
        objective=objective_name,
        weights=tuple(source.randint(0, 9) for _ in range(groups)),
    )


def problems(devices=(1, 2, 3), largest=6, objectives=("latency",), splits=(0.0,)):
    """Problems as a hypothesis strategy."""
    return st.builds(
        make_problem,
        st.integers(0, 2**32),
        st.sampled_from(devices),
        st.integers(1, largest),
        st.sampled_from(objectives),
        st.sampled_from((0.0, 0.2)),
        st.sampled_from(splits),
    )


def placements(problem):
    return itertools.product(*(sorted(allowed) for allowed in problem.allowed))


def brute_force(problem):
    """The least objective of all placements; infinite if none keeps the limits."""
    return min(objective(problem, placement) for placement in placements(problem))


def make_large(groups, devices, seed=0, places=None, takers=()):
    """A deep network of short branches, as real models are, over devices with a memory each.

    Or over devices in some places; and some, or the caller, may take tensors at a price.
    """
    source = random.Random(seed)
    readers = {g: set() for g in range(groups)}
    for group in range(1, groups):
        for _ in range(source.choice((1, 1, 1, 2))):
            readers[max(0, group - source.choice((1, 1, 1, 2, 4)))].add(group)
    tensors = [
        Tensor(f"t{g}", source.randint(0, 7), g, tuple(sorted(r)), not r)
        for g, r in readers.items()
    ]
    prices = tuple(tuple(source.uniform(0, 7) for _ in range(devices)) for _ in range(groups))
    places = places or tuple(range(devices))
    ends = (HOST, *range(devices))
    own = [taker_of(places, reader) for reader in takers]
    keys = [(a, q) for a in ends for q in (*range(max(places) + 1), *own)]
    figure = Figure(prices, make_ways(keys, random.Random(1)))
    return dataclasses.replace(
        make_problem(seed, devices, 2),
        places=places,
        groups=tuple(map(str, range(groups))),
        tensors=(*tensors, Tensor("x", 3, HOST, (0,))),
        allowed=(frozenset(range(devices)),) * groups,
        figures={SECONDS: figure},
        weights=(1,) * groups,
    )
