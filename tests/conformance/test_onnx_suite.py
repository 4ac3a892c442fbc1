"""ONNX's own tests: all pass but those on the lists, and those on a list do not pass.

A quarter of them are functions written out in other operators, which have tests of their own. These
have many kernels each, and are tried with HYBRIDC_CONFORMANCE=all, as ``make nightly`` does.
"""

from __future__ import annotations

import os

import pytest

from tests.conformance.disputed import dispute
from tests.conformance.suite import cases, expected_failures, is_nearer, run

pytestmark = pytest.mark.slow

NATIVE = expected_failures()
WITH_FALLBACK = expected_failures(fallback=True)


EVERYTHING = os.environ.get("HYBRIDC_CONFORMANCE") == "all"


def is_tried(name: str) -> bool:
    return EVERYTHING or "_expanded" not in name


@pytest.mark.parametrize("name", sorted(filter(is_tried, cases())))
def test_native(name: str) -> None:
    check(name, name in NATIVE, fallback=False)


@pytest.mark.parametrize("name", sorted(filter(is_tried, NATIVE)))
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


def test_no_result_is_wrong() -> None:
    """Where ours differs from the suite's there is a reason why ours is the better one."""
    assert not [name for name, reason in NATIVE.items() if reason.startswith("WRONG")]


@pytest.mark.parametrize("name", sorted(filter(dispute, NATIVE)))
def test_ours_is_nearer_to_what_the_standard_defines(name: str) -> None:
    assert is_nearer(cases()[name])
