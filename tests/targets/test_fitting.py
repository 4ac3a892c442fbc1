"""Rules that refuse are left out; rules that fail say so."""

from __future__ import annotations

from typing import Any

import pytest
from hybridc.targets.fitting import Misfit, RuleFault, if_it_fits


def failing(error: Exception) -> Any:
    def attempt() -> None:
        raise error

    return attempt


def test_what_fits_is_made() -> None:
    assert if_it_fits(lambda: 3) == 3


@pytest.mark.parametrize("error", [Misfit("no"), RuntimeError(), ValueError(), ZeroDivisionError()])
def test_a_refusal_is_quiet(error: Exception) -> None:
    assert if_it_fits(failing(error)) is None


def test_a_fault_is_seen_and_stops_nothing() -> None:
    with pytest.warns(RuleFault, match="please report it: TypeError"):
        assert if_it_fits(failing(TypeError("None has no extent"))) is None


def test_other_errors_are_not_caught() -> None:
    with pytest.raises(KeyError):
        if_it_fits(failing(KeyError()))
