"""ONNX's own tests: all pass but those on the list, and those on the list do not pass."""

from __future__ import annotations

import pytest

from tests.conformance.suite import cases, expected_failures, run

pytestmark = pytest.mark.slow

EXPECTED = expected_failures()


@pytest.mark.parametrize("name", sorted(cases()))
def test_onnx_suite(name: str) -> None:
    if name not in EXPECTED:
        assert run(cases()[name]) is None
        return
    try:
        fault = run(cases()[name])
    except Exception:
        return
    assert fault is not None, f"{name} passes: take it off the list of expected failures"


def test_the_list_names_only_tests_that_exist() -> None:
    assert set(EXPECTED) <= set(cases())
