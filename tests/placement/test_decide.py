"""What a decision by cost rests on."""

from types import SimpleNamespace

import pytest
from hybridc.cost_models.cost import CALIBRATED, LEARNED, MEASURED, Cost

from hybridc.placement.decide import is_measured

SECONDS = {"large": 9.0, "small": 0.5, "view": 100.0}


class Hardware:
    """Two devices; says of each pair of a group and a device where its figure comes from."""

    names = ("a", "b")

    def __init__(self, sources):
        self.sources = sources

    def estimate(self, work, device):
        source = self.sources.get((work.name, device), MEASURED)
        return Cost(SECONDS[work.name], 0, source, 0.5)


@pytest.mark.parametrize(
    ("sources", "allowed", "expected"),
    [
        ({}, "ab", True),
        ({("small", "a"): LEARNED}, "ab", True),
        ({("small", "a"): LEARNED, ("small", "b"): CALIBRATED}, "ab", True),
        ({("large", "a"): LEARNED}, "ab", False),
        ({("large", "b"): LEARNED}, "ab", False),
        ({("large", "b"): LEARNED, ("small", "b"): LEARNED}, "a", True),
        ({("view", "a"): CALIBRATED}, "ab", True),
    ],
)
def test_a_small_group_that_was_not_measured_changes_nothing(sources, allowed, expected):
    """A group whose times spread too much is estimated, and the rest is as well known as ever."""
    works = [SimpleNamespace(name=name, is_view=name == "view") for name in SECONDS]
    graph = SimpleNamespace(groups=[SimpleNamespace(work=work) for work in works])
    devices = frozenset("ab".index(name) for name in allowed)
    problem = SimpleNamespace(allowed=[devices] * len(works))
    assert is_measured(problem, graph, Hardware(sources)) is expected
