"""What values the tensors of a model take, collected while samples run through it.

The model runs in ONNX Runtime with the tensors to be observed as outputs. Of each one a histogram
is kept, with the exact extremes; for each position of the last axis the largest magnitude and the
mean square; and the mean of each position of the second axis, where convolutions have their
channels. That takes the same memory for any number of samples.

A histogram has a fixed number of bins between -limit and limit. Where a larger number comes, the
limit is doubled as often as needed, and each time two bins become one in the middle half. So no
sample has to be read twice and none is forgotten.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
import onnx

from hybridc.bundle.tensors import Array
from hybridc.errors import UsageError
from hybridc.precision.samples import Sample
from hybridc.reference import open_session

BINS = 8192
"""Bins of a histogram; a multiple of 4."""

MOST_COUNTED = 1 << 16
"""Elements of a tensor in one sample that are counted; of more, evenly spread ones are."""


@dataclass
class Histogram:
    """The distribution of a tensor's elements over all samples.

    Attributes:
        low: Smallest element.
        high: Largest element.
        limit: The bins lie between ``-limit`` and ``limit``; 0 until a number other than 0 came.
        counts: Elements of each bin.
    """

    low: float = np.inf
    high: float = -np.inf
    limit: float = 0.0
    counts: Array = field(default_factory=lambda: np.zeros(BINS, np.int64))

    def add(self, array: Array) -> None:
        """Take a tensor of finite numbers into account."""
        self.low = min(self.low, float(array.min()))
        self.high = max(self.high, float(array.max()))
        self._widen(max(-self.low, self.high))
        if self.limit:
            step = -(-array.size // MOST_COUNTED)
            chosen = array.reshape(-1)[::step].astype(np.float64)
            places = ((chosen / self.limit + 1) * (BINS / 2)).astype(np.int64)
            self.counts += np.bincount(np.minimum(places, BINS - 1), minlength=BINS)
        else:
            self.counts[BINS // 2] += array.size

    def centers(self) -> Array:
        """The number in the middle of each bin."""
        return (np.arange(BINS) + 0.5) * (2 * self.limit / BINS) - self.limit

    def _widen(self, magnitude: float) -> None:
        """Double the limit until it holds a magnitude."""
        if not self.limit:
            self.limit = magnitude
        while self.limit < magnitude:
            pairs = self.counts.reshape(-1, 2).sum(axis=1)
            self.counts = np.zeros(BINS, np.int64)
            self.counts[BINS // 4 : 3 * BINS // 4] = pairs
            self.limit *= 2


@dataclass(frozen=True)
class Channels:
    """What occurred at each position of a tensor's last axis.

    Attributes:
        largest: Largest magnitude.
        squares: Sum of squares.
        count: Elements at each position.
    """

    largest: Array
    squares: Array
    count: int

    @property
    def mean_squares(self) -> Array:
        """The mean square of each position."""
        means: Array = self.squares / self.count
        return means

    def merged(self, other: Channels | None) -> Channels:
        """Both together; this one if the other is none or of another size."""
        if other is None or other.largest.shape != self.largest.shape:
            return self
        largest: Array = np.maximum(self.largest, other.largest)
        return Channels(largest, self.squares + other.squares, self.count + other.count)


@dataclass
class Mean:
    """The mean of each position of a tensor's second axis.

    Attributes:
        sums: Sum of the elements of each.
        count: Elements of each.
    """

    sums: Array | float = 0.0
    count: int = 0

    def add(self, array: Array) -> None:
        """Take a tensor of two dimensions or more into account."""
        others = tuple(axis for axis in range(array.ndim) if axis != 1)
        self.sums = self.sums + array.sum(axis=others, dtype=np.float64)
        self.count += array.size // array.shape[1]

    @property
    def value(self) -> Array:
        """The means."""
        return np.asarray(self.sums / self.count)


@dataclass(frozen=True)
class Observations:
    """What was seen of a model's tensors, by name.

    Attributes:
        histograms: Of all elements.
        channels: Of the positions of the last axis.
        means: Of the positions of the second axis, where its size is the same in all samples.
    """

    histograms: Mapping[str, Histogram]
    channels: Mapping[str, Channels]
    means: Mapping[str, Array]


def observe(
    model: onnx.ModelProto, tensors: Iterable[str], samples: Iterable[Sample]
) -> Observations:
    """Run samples through a model and look at some of its float tensors.

    Raises:
        UsageError: One of them becomes infinite or NaN.
    """
    names = list(dict.fromkeys(tensors))
    inputs = {value.name for value in model.graph.input}
    run = open_session(with_outputs(model, [name for name in names if name not in inputs]))
    histograms = {name: Histogram() for name in names}
    channels: dict[str, Channels] = {}
    means: dict[tuple[str, int], Mean] = {}
    for sample in samples:
        found = {**sample, **run(sample)}
        for name in names:
            array = found[name].astype(np.float32, copy=False)
            if not array.size:
                continue
            if not np.isfinite(array).all():
                raise UsageError(f"{name!r} is infinite or NaN in a sample; no range holds that")
            histograms[name].add(array)
            channels[name] = _channels(array).merged(channels.get(name))
            if array.ndim >= 2:
                means.setdefault((name, array.shape[1]), Mean()).add(array)
    single = Counter(name for name, _ in means)
    fixed = {name: mean.value for (name, _), mean in means.items() if single[name] == 1}
    return Observations(histograms, channels, fixed)


def _channels(array: Array) -> Channels:
    rows = array.reshape(-1, array.shape[-1] if array.ndim else 1)
    squares = np.einsum("ij,ij->j", rows, rows, dtype=np.float64)
    return Channels(np.abs(rows).max(axis=0), squares, len(rows))


def with_outputs(model: onnx.ModelProto, names: Iterable[str]) -> bytes:
    """The model with more outputs."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    there = {value.name for value in copy.graph.output}
    copy.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names if name not in there)
    data: bytes = copy.SerializeToString()
    return data
