"""A model in another precision, as a valid ONNX model that ONNX Runtime runs, too.

    int8           convolutions and matrix products with constant weights on 8-bit integers:
                   QuantizeLinear and DequantizeLinear around them, with ranges out of samples
    int8-dynamic   matrix products only; the ranges are measured anew in each run
    int8-weights   weights of matrix products in 8 bits, in blocks with a scale each
    int4-weights   the same in 4 bits
    auto           as int8, or in int16, for as many layers as a budget allows: see search.py
    fp16, bf16     floats in 16 bits, but for operators that need more: see half.py

Around a convolution, sums of two images, pools and concatenations take part too, so that what goes
from one convolution to the next is 8 bits wide. Other element-wise work stays float: it is done in
registers, and a step between would only cost accuracy and time. The result of a matrix product is
left in float, since what follows it in a transformer (softmax, normalization) needs it.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import tempfile
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import onnx

from hybridc.precision.qdq import PER_CHANNEL_SINCE
from hybridc.precision.samples import Samples
from hybridc.precision.static import calibrate_model, sensitive, sensitivities

STATIC, DYNAMIC, INT8_WEIGHTS, INT4_WEIGHTS, FP16, BF16, FP32, AUTO = (
    "int8", "int8-dynamic", "int8-weights", "int4-weights", "fp16", "bf16", "fp32", "auto",
)  # fmt: skip

DEFAULT_METHOD = "percentile"

TRIED = 8
"""Samples on which the cost of single layers is measured."""


@dataclass(frozen=True)
class Calibration:
    """How ranges are found.

    Attributes:
        samples: Inputs to run.
        method: One of ``METHODS``.
    """

    samples: Samples
    method: str = DEFAULT_METHOD


@dataclass(frozen=True)
class Quantized:
    """A model in int8.

    Attributes:
        model: The model, in QDQ form.
        count: Its convolutions and matrix products on integers.
        kept: What those cost that stay float, one minus the cosine, by name.
        slow: Names of those that stay float since int8 gains nothing.
    """

    model: onnx.ModelProto
    count: int
    kept: Mapping[str, float]
    slow: tuple[str, ...] = ()


def quantize_static(
    model: onnx.ModelProto, calibration: Calibration, slow: Collection[str] = ()
) -> Quantized:
    """Convolutions and matrix products on 8-bit integers, but for those that cost too much.

    Args:
        model: A model with shapes and names.
        calibration: How ranges are found.
        slow: Names of layers that stay float, too, since int8 gains nothing; of no effect if there
            are no others.

    Raises:
        UsageError: There are none.
    """
    calibrated = calibrate_model(model, calibration.samples, calibration.method)
    few = itertools.islice(calibration.samples, TRIED)
    errors = sensitivities(calibrated, few)
    kept = {name: errors[name] for name in sensitive(errors)}
    able = [name for name in calibrated.anchors if name not in kept]
    chosen = [name for name in able if name not in slow] or able
    left = tuple(name for name in able if name not in chosen)
    return Quantized(calibrated.quantized(chosen, left), len(chosen), kept, left)


def quantize_dynamic(model: onnx.ModelProto) -> onnx.ModelProto:
    """Matrix products on 8-bit integers whose ranges are measured in each run."""
    from onnxruntime import quantization as ort

    with _workplace(model) as (source, target):
        ort.quantize_dynamic(
            source,
            target,
            op_types_to_quantize=["MatMul"],
            per_channel=opset_of(model) >= PER_CHANNEL_SINCE,
            weight_type=ort.QuantType.QInt8,
            extra_options={"MatMulConstBOnly": True},
        )
        return onnx.load(target)


def opset_of(model: onnx.ModelProto) -> int:
    """Version of the default domain."""
    return next((int(o.version) for o in model.opset_import if o.domain in ("", "ai.onnx")), 1)


@contextlib.contextmanager
def _workplace(model: onnx.ModelProto) -> Iterator[tuple[str, str]]:
    """A folder with the model in it and a place for the result; warnings are not for users."""
    level = logging.root.level
    logging.root.setLevel(logging.ERROR)
    try:
        with tempfile.TemporaryDirectory(prefix="hybridc-") as folder:
            source = str(Path(folder) / "model.onnx")
            onnx.save(model, source)
            yield source, str(Path(folder) / "quantized.onnx")
    finally:
        logging.root.setLevel(level)
