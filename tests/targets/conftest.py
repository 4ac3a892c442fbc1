"""What the tests of CPU schedules share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from hybridc.targets.llvm.cpu import Cpu


@pytest.fixture(params=["", "host"], ids=["portable", "host"])
def cpu(request: pytest.FixtureRequest) -> Cpu:
    """The portable level of this machine's architecture, and exactly this machine."""
    from hybridc.targets.llvm.cpu import parse_cpu

    return parse_cpu(request.param)
