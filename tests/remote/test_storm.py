"""A short storm of faults: no result is wrong, and with a local plan none is missing."""

from __future__ import annotations

import pytest

from tests.remote.http_server import HttpServer
from tests.remote.server import Server
from tests.remote.storm import storm

CALLS = 120


@pytest.mark.parametrize("kind", [Server, HttpServer])
def test_no_result_is_wrong_or_lost(hybrid, kind):
    toll = storm(hybrid, kind, CALLS, seed=4, local=True)
    assert (toll.right, toll.wrong, toll.errors) == (CALLS, 0, 0)
    assert toll.runs["cut1"] > 0  # the server did answer between its faults
    assert len(toll.episodes) > 4


def test_without_a_local_plan_no_result_is_wrong(hybrid):
    toll = storm(hybrid, Server, CALLS // 2, seed=5, local=False)
    assert toll.wrong == 0
    assert toll.right + toll.errors == CALLS // 2
    assert min(toll.right, toll.errors) > 0
