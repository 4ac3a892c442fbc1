"""ONNX's own tests: all pass but those on the lists, and those on a list do not pass."""

from __future__ import annotations

import pytest

from tests.conformance.suite import cases, expected_failures, run

pytestmark = pytest.mark.slow

NATIVE = expected_failures()
WITH_FALLBACK = expected_failures(fallback=True)


@pytest.mark.parametrize("name", sorted(cases()))
def test_native(name: str) -> None:
    check(name, name in NATIVE, fallback=False)


@pytest.mark.parametrize("name", sorted(NATIVE))
def test_with_fallback(name: str) -> None:
    """What fails without the fallback; the others do not need it."""
    check(name, name in WITH_FALLBACK, fallback=True)


def check(name: str, fails: bool, fallback: bool) -> None:
    if not fails:
        assert run(cases()[name], fallback) is None
        return
    try:
        fault = run(cases()[name], fallback)
    except Exception:
        return
    assert fault is not None, f"{name} passes: take it off the list of expected failures"


def test_the_lists_name_only_tests_that_exist() -> None:
    assert set(WITH_FALLBACK) <= set(NATIVE) <= set(cases())
