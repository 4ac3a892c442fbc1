"""Static int8: smooth, observe, find ranges, and leave out the few layers that cost most.

    model -> smooth -> observe -> ranges -> insert Q and DQ, but for layers that stay float

What is known after calibration is kept in one value, from which a model with any choice of layers
can be written without running a sample again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
import onnx

from hybridc.bundle.tensors import Array
from hybridc.errors import UsageError
from hybridc.precision.anchors import anchors_of, taking_part, tensors_of
from hybridc.precision.budget import cosine
from hybridc.precision.observe import observe
from hybridc.precision.qdq import insert_qdq
from hybridc.precision.ranges import MIN_MAX, Range, range_of
from hybridc.precision.rounding import round_to_steps, round_weights
from hybridc.precision.samples import Sample
from hybridc.precision.smooth import PRODUCTS, smooth
from hybridc.reference import open_session

SENSITIVE, MOST_KEPT = 4e-3, 0.1
"""A layer stays float if it alone turns an output by more than this (one minus the cosine), and is
among this share of the layers, those that cost most."""


@dataclass(frozen=True)
class Calibrated:
    """A model that is ready to be written in int8.

    Attributes:
        model: The model, smoothed.
        anchors: Names of its convolutions and matrix products of a constant weight, in order.
        ranges: Of the tensors that they and what works on images read and make.
        means: Of the second axis of the same tensors, where its size is fixed.
        halves: Whether weights of anchors that stay float are rounded to 16 bits.
        extremes: The lowest and the highest number that was seen, of the same tensors.
    """

    model: onnx.ModelProto
    anchors: tuple[str, ...]
    ranges: Mapping[str, Range]
    means: Mapping[str, Array]
    halves: bool = True
    extremes: Mapping[str, Range] = field(default_factory=dict)

    def quantized(
        self, anchors: Collection[str], slow: Collection[str] = (), wide: Collection[str] = ()
    ) -> onnx.ModelProto:
        """The model with some of its anchors in integers, and the weights of others in 16 bits.

        Args:
            anchors: Names of those in int8.
            slow: Names of those that stay float since int8 gains nothing; their weights are rounded
                to 8 bits.
            wide: Names of those in int16.
        """
        if not (anchors or wide):
            return self.model
        nodes = taking_part(self.model, [*anchors, *wide])
        joined = taking_part(self.model, wide) - set(anchors)
        model = insert_qdq(self.model, nodes, self.ranges, self.means, joined, self.extremes)
        if self.halves:
            round_weights(model, set(self.anchors) - {*anchors, *wide, *slow})
        round_to_steps(model, slow)
        return model

    def rounded(self) -> onnx.ModelProto:
        """The model with the weights of all anchors in 16 bits, and nothing in int8."""
        model = onnx.ModelProto()
        model.CopyFrom(self.model)
        round_weights(model, set(self.anchors))
        return model


def calibrate_model(model: onnx.ModelProto, samples: Iterable[Sample], method: str) -> Calibrated:
    """Find the ranges of a model's tensors.

    Args:
        model: A model with shapes and names.
        samples: Inputs, read twice where there are matrix products.
        method: One of ``METHODS`` of :mod:`hybridc.precision.ranges`.

    Raises:
        UsageError: It has no convolution or matrix product of a constant weight.
    """
    anchors = anchors_of(model)
    if not anchors:
        raise UsageError(
            "there is nothing to quantize: no convolution or matrix product of a constant weight"
        )
    products = [n for n in model.graph.node if n.name in set(anchors) and n.op_type in PRODUCTS]
    if products:
        seen = observe(model, [node.input[0] for node in products], samples)
        model = smooth(model, [node.name for node in products], seen.channels)
    tensors = tensors_of(model, taking_part(model, anchors))
    found = observe(model, tensors, samples)
    ranges, extremes = (
        _useful(model, {name: range_of(h, how) for name, h in found.histograms.items()})
        for how in (method, MIN_MAX)
    )
    return Calibrated(model, tuple(anchors), ranges, found.means, extremes=extremes)


def _useful(model: onnx.ModelProto, ranges: Mapping[str, Range]) -> dict[str, Range]:
    """Ranges without what the only reader of a tensor, an activation, does not tell apart."""
    readers: dict[str, list[onnx.NodeProto]] = {}
    for node in model.graph.node:
        for name in node.input:
            readers.setdefault(name, []).append(node)
    found = dict(ranges)
    for node in model.graph.node:
        name = node.output[0]
        own = readers.get(name, [])
        if name in found and len(own) == 1:
            low, high = _told_apart(own[0])
            found[name] = max(found[name][0], low), min(found[name][1], high)
    return found


def _told_apart(node: onnx.NodeProto) -> Range:
    """The numbers below and above which an activation is constant."""
    if node.op_type == "HardSwish":
        return -3.0, np.inf
    if node.op_type != "HardSigmoid":
        return -np.inf, np.inf
    attributes = {attribute.name: attribute.f for attribute in node.attribute}
    alpha, beta = attributes.get("alpha", 0.2), attributes.get("beta", 0.5)
    return (-beta / alpha, (1 - beta) / alpha) if alpha > 0 else (-np.inf, np.inf)


def sensitivities(calibrated: Calibrated, samples: Iterable[Sample]) -> dict[str, float]:
    """What each anchor in int8 costs alone: one minus the smallest cosine of the outputs."""
    kept = list(samples)
    original = open_session(calibrated.model.SerializeToString())
    before = [original(sample) for sample in kept]
    errors = {}
    for anchor in calibrated.anchors:
        changed = insert_qdq(calibrated.model, {anchor}, calibrated.ranges, calibrated.means)
        run = open_session(changed.SerializeToString())
        errors[anchor] = 1 - min(
            cosine(old, run(sample)) for old, sample in zip(before, kept, strict=True)
        )
    return errors


def sensitive(errors: Mapping[str, float]) -> list[str]:
    """The anchors that stay float by default, those that cost most first."""
    most = int(MOST_KEPT * len(errors))
    worst = sorted(errors, key=lambda name: -errors[name])[:most]
    chosen = [name for name in worst if not errors[name] <= SENSITIVE]
    return chosen if len(chosen) < len(errors) else []
