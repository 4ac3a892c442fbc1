"""Bounds on what a lower precision may cost, and how they are measured.

relative=0.02         largest error of any output, relative to that output's largest magnitude
cosine=0.99           smallest cosine between an output and the original's, over the samples
mean-cosine=0.99      the same, in the mean over the samples
top1=0.99             share of samples in which the largest element of the last axis is the same
module:function=0.1   a function (original outputs, new outputs) -> number, at most the bound;
                      it is called for each sample, and the mean over the samples counts
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from hybridc.bundle.tensors import Array
from hybridc.errors import UsageError
from hybridc.precision.samples import load_function

Outputs = Mapping[str, Array]
Measure = Callable[[Outputs, Outputs], float]
Fold = Callable[[list[float]], float]


@dataclass(frozen=True)
class Budget:
    """One bound.

    Attributes:
        metric: Its name, as it was given.
        bound: The number that must be kept.
        measure: The metric for one sample.
        fold: One number from those of all samples.
        at_least: Whether larger is better.
    """

    metric: str
    bound: float
    measure: Measure
    fold: Fold
    at_least: bool

    @property
    def is_of_worst(self) -> bool:
        """Whether the worst sample alone counts, so that one is enough to break the bound."""
        return self.fold in (min, max)

    def of(self, pairs: Iterable[tuple[Outputs, Outputs]]) -> float:
        """The metric over samples: pairs of the original's outputs and the new ones."""
        return self.fold([float(self.measure(old, new)) for old, new in pairs])

    def is_kept(self, value: float) -> bool:
        """Whether a measured value keeps the bound; NaN does not."""
        return value >= self.bound if self.at_least else value <= self.bound

    def __str__(self) -> str:
        return f"{self.metric} {'>=' if self.at_least else '<='} {self.bound:g}"


def parse_budget(option: str) -> Budget:
    """``--accuracy-budget METRIC=BOUND``.

    Raises:
        UsageError: The metric is unknown, or the bound is no number or out of the metric's range.
    """
    name, separator, text = option.rpartition("=")
    try:
        bound = float(text)
    except ValueError:
        bound = float("nan")
    if not separator or not np.isfinite(bound):
        raise UsageError(f"--accuracy-budget {option!r} is not of the form METRIC=NUMBER")
    if name in _METRICS:
        measure, fold, at_least = _METRICS[name]
        if bound < 0 or (at_least and bound > 1):
            raise UsageError(f"--accuracy-budget {option!r}: {text} is no value of {name}")
        return Budget(name, bound, measure, fold, at_least)
    module, colon, function = name.partition(":")
    if not colon:
        known = ", ".join(_METRICS)
        raise UsageError(
            f"--accuracy-budget {option!r}: the metric is none of {known}, nor module:function"
        )
    return Budget(name, bound, load_function(name, module, function), _mean, False)


def relative_error(old: Outputs, new: Outputs) -> float:
    """Largest difference of any output over that output's largest magnitude."""
    return max(relative_difference(old[name], new[name]) for name in old)


def relative_difference(old: Array, new: Array) -> float:
    """Largest difference over the largest magnitude of ``old``; infinite for other shapes."""
    if old.shape != new.shape:
        return float("inf")
    if old.size == 0:
        return 0.0
    wide, other = old.astype(np.float64), new.astype(np.float64)
    difference = float(np.max(np.abs(wide - other)))
    scale = float(np.max(np.abs(wide)))
    if difference == 0:
        return 0.0
    return difference / scale if scale else float("inf")


def cosine(old: Outputs, new: Outputs) -> float:
    """Smallest cosine between an output and its original."""
    return min(cosine_between(old[name], new[name]) for name in old)


def cosine_between(old: Array, new: Array) -> float:
    """Cosine of the angle between two tensors as vectors; 1 for two that are zero."""
    left, right = old.astype(np.float64).ravel(), new.astype(np.float64).ravel()
    if left.shape != right.shape:
        return float("nan")
    lengths = float(np.linalg.norm(left) * np.linalg.norm(right))
    if lengths == 0:
        return 1.0 if np.array_equal(left, right) else 0.0
    return float(left @ right) / lengths


def top1(old: Outputs, new: Outputs) -> float:
    """Share of positions at which the largest element of the last axis is the same."""
    shares = [
        float(np.mean(np.argmax(old[name], axis=-1) == np.argmax(new[name], axis=-1)))
        for name in old
        if old[name].ndim
    ]
    return min(shares, default=1.0)


def _mean(values: list[float]) -> float:
    return float(np.mean(values))


_METRICS: dict[str, tuple[Measure, Fold, bool]] = {
    "relative": (relative_error, max, False),
    "cosine": (cosine, min, True),
    "mean-cosine": (cosine, _mean, True),
    "top1": (top1, _mean, True),
}
