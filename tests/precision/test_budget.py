"""Budgets: how they are read, and what the metrics are."""

from __future__ import annotations

import numpy as np
import pytest

from hybridc.errors import UsageError
from hybridc.precision.budget import parse_budget

OLD = {"y": np.array([[1.0, -4.0, 2.0], [0.0, 1.0, 3.0]], np.float32)}
NEW = {"y": np.array([[1.0, -4.0, 1.5], [0.0, 5.0, 3.0]], np.float32)}


@pytest.mark.parametrize(
    ("metric", "expected"),
    [
        ("relative", 1.0),
        ("top1", 0.5),
        ("cosine", 34 / np.sqrt(31 * 53.25)),
        ("mean-cosine", 34 / np.sqrt(31 * 53.25)),
    ],
)
def test_metrics(metric, expected):
    budget = parse_budget(f"{metric}=0.9")
    assert budget.of([(OLD, OLD)]) == (0 if metric == "relative" else pytest.approx(1))
    assert budget.of([(OLD, NEW)]) == pytest.approx(expected)


def test_the_worst_sample_counts_for_bounds_and_the_mean_for_shares():
    pairs = [(OLD, OLD), (OLD, NEW)]
    assert parse_budget("relative=1").of(pairs) == 1.0
    assert parse_budget("top1=1").of(pairs) == 0.75
    worst = parse_budget("cosine=1").of(pairs)
    assert parse_budget("mean-cosine=1").of(pairs) == pytest.approx((1 + worst) / 2)


def test_what_is_kept():
    assert parse_budget("cosine=0.99").is_kept(0.995)
    assert not parse_budget("cosine=0.99").is_kept(0.98)
    assert not parse_budget("cosine=0.99").is_kept(float("nan"))
    assert parse_budget("relative=0.1").is_kept(0.05)
    assert not parse_budget("relative=0.1").is_kept(float("nan"))
    assert not parse_budget("relative=0.1").is_kept(0.2)


def test_another_shape_is_an_infinite_error():
    assert parse_budget("relative=1").of([(OLD, {"y": OLD["y"][:1]})]) == float("inf")


def test_a_metric_of_the_user(tmp_path, monkeypatch):
    source = "def distance(old, new):\n    return abs(old['y'] - new['y']).sum()\n"
    (tmp_path / "given_metric.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    budget = parse_budget("given_metric:distance=0.5")
    assert budget.of([(OLD, OLD), (OLD, NEW)]) == 2.25
    assert not budget.is_kept(2.25)


@pytest.mark.parametrize(
    "option", ["cosine", "cosine=", "cosine=x", "cosine=1.5", "relative=-1", "speed=3", "top1=nan"]
)
def test_bad_budgets(option):
    with pytest.raises(UsageError, match="accuracy-budget"):
        parse_budget(option)
