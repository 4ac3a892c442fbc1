"""What a benchmark of accuracy is made of: a model, samples for calibration, cases to judge."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
Feeds = Mapping[str, Array]


@dataclass(frozen=True)
class Case:
    """One input that was not used for calibration.

    Attributes:
        feeds: Inputs by name.
        truth: What is right, where the task knows it.
    """

    feeds: Feeds
    truth: str = ""


@dataclass(frozen=True)
class Figure:
    """A number and the bound that it should keep.

    Attributes:
        name: What it is.
        value: The number.
        bound: Its bound; ``None`` if it is only reported.
        at_least: Whether larger is better.
    """

    name: str
    value: float
    bound: float | None = None
    at_least: bool = True

    @property
    def is_kept(self) -> bool:
        """Whether the bound is kept."""
        if self.bound is None:
            return True
        return self.value >= self.bound if self.at_least else self.value <= self.bound


Judge = Callable[[Sequence[Case], Sequence[Array], Sequence[Array]], list[Figure]]


@dataclass(frozen=True)
class Task:
    """A real model on real input.

    Attributes:
        model: Name in ``tools/models.json``.
        shapes: Options ``--shape``.
        calibration: A number of samples to calibrate with.
        cases: A number of other inputs.
        judge: Figures of an output in lower precision beside the original's, over all cases.
        count: Cases that the figures are asked for.
    """

    model: str
    shapes: tuple[str, ...]
    calibration: Callable[[int], Iterator[Feeds]]
    cases: Callable[[int], Iterator[Case]]
    judge: Judge
    count: int


def smallest_cosine(old: Sequence[Array], new: Sequence[Array]) -> float:
    """The smallest cosine between vectors of the same place, one for each case."""
    return min(
        float(left.ravel() @ right.ravel() / (np.linalg.norm(left) * np.linalg.norm(right)))
        for left, right in zip(old, new, strict=True)
    )


def english() -> str:
    """English text that is on every machine with Python: the pages of its language reference."""
    from pydoc_data.topics import topics

    return " ".join(" ".join(topics.values()).split())
