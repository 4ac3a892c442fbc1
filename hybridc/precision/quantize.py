"""A model in another precision, as a valid ONNX model that ONNX Runtime runs, too.

    int8           convolutions and matrix products with constant weights on 8-bit integers:
                   QuantizeLinear and DequantizeLinear around them, with ranges out of samples
    int8-dynamic   matrix products only; the ranges are measured anew in each run
    int8-weights   weights of matrix products in 8 bits, in blocks with a scale each
    int4-weights   the same in 4 bits
    fp16           floats in 16 bits, but for operators that need more

The work is done by onnxruntime.quantization; what is decided here is which nodes take part.
Around a convolution, sums of two images, pools and concatenations take part too, so that what goes
from one convolution to the next is 8 bits wide. Other element-wise work stays float: it is done in
registers, and a step between would only cost accuracy and time. The result of a matrix product is
left in float, since what follows it in a transformer (softmax, normalization) needs it.
"""

from __future__ import annotations

import contextlib
import logging
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import onnx
import onnx_ir as ir

from hybridc.errors import UsageError
from hybridc.precision.samples import Sample, Samples

STATIC, DYNAMIC, INT8_WEIGHTS, INT4_WEIGHTS, FP16, FP32 = (
    "int8", "int8-dynamic", "int8-weights", "int4-weights", "fp16", "fp32",
)  # fmt: skip

PRECISIONS = (FP32, FP16, STATIC, DYNAMIC, INT8_WEIGHTS, INT4_WEIGHTS)
METHODS = ("min-max", "percentile", "entropy")

PER_CHANNEL_SINCE = 13
"""Opset from which a scale may belong to one channel."""

_ANCHORS = ("Conv", "MatMul", "Gemm")
_IMAGES = ("Add", "AveragePool", "Concat", "GlobalAveragePool", "MaxPool", "Resize")
_WEIGHT_OF = {"Conv": 1, "MatMul": 1, "Gemm": 1}


@dataclass(frozen=True)
class Calibration:
    """How ranges are found.

    Attributes:
        samples: Inputs to run.
        method: One of ``METHODS``.
        keep: Names of nodes that stay in float.
    """

    samples: Samples
    method: str = METHODS[0]
    keep: frozenset[str] = frozenset()


class _Reader:
    """Gives ONNX Runtime's calibrator one sample after the other; it asks for ranges of one."""

    def __init__(self, samples: Samples) -> None:
        self._count = samples.count
        self._rest = iter(samples)
        self._left = 0

    def __len__(self) -> int:
        return self._count

    def set_range(self, start_index: int, end_index: int) -> None:
        """Allow the next samples to be read."""
        self._left = end_index - start_index

    def get_next(self) -> Sample | None:
        """The next sample, or nothing at the end of the range."""
        if not self._left:
            return None
        self._left -= 1
        return dict(next(self._rest))


def quantize_static(model: onnx.ModelProto, calibration: Calibration) -> onnx.ModelProto:
    """Convolutions and matrix products on 8-bit integers.

    Raises:
        UsageError: There are none.
    """
    from onnxruntime import quantization as ort

    nodes = [name for name in quantizable(model) if name not in calibration.keep]
    if not nodes:
        raise UsageError(
            "there is nothing to quantize: no convolution or matrix product of a constant weight"
        )
    methods = {
        "min-max": ort.CalibrationMethod.MinMax,
        "percentile": ort.CalibrationMethod.Percentile,
        "entropy": ort.CalibrationMethod.Entropy,
    }
    with _workplace(model) as (source, target):
        ort.quantize_static(
            source,
            target,
            _Reader(calibration.samples),
            quant_format=ort.QuantFormat.QDQ,
            nodes_to_quantize=nodes,
            per_channel=opset_of(model) >= PER_CHANNEL_SINCE,
            activation_type=ort.QuantType.QUInt8,
            weight_type=ort.QuantType.QInt8,
            calibrate_method=methods[calibration.method],
            extra_options={
                "CalibStridedMinMax": 1,
                "MatMulConstBOnly": True,
                "OpTypesToExcludeOutputQuantization": ["MatMul", "Gemm"],
            },
        )
        return onnx.load(target)


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


def convert_to_half(model: onnx.ModelProto) -> onnx.ModelProto:
    """Floats in 16 bits, but for inputs, outputs, and operators that need more."""
    from onnxruntime.transformers.float16 import convert_float_to_float16

    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    half = ir.from_proto(convert_float_to_float16(copy, keep_io_types=True))
    half.graph.sort()  # the casts behind inputs come last
    return ir.to_proto(half)


def quantizable(model: onnx.ModelProto) -> list[str]:
    """Names of the nodes that int8 changes, in order."""
    weights = {tensor.name for tensor in model.graph.initializer}
    ranks = _ranks(model)
    anchors = [
        node
        for node in model.graph.node
        if node.op_type in _ANCHORS and not node.domain
        if node.input[_WEIGHT_OF[node.op_type]] in weights
    ]
    images = [
        node
        for node in model.graph.node
        if node.op_type in _IMAGES and not node.domain and ranks.get(node.output[0]) == 4
        if not weights.intersection(node.input[:2])
    ]
    convolves = any(node.op_type == "Conv" for node in anchors)
    chosen = {node.name for node in (*anchors, *(images if convolves else ()))}
    return [node.name for node in model.graph.node if node.name in chosen]


def anchors_of(model: onnx.ModelProto) -> list[str]:
    """Names of the convolutions and matrix products among what int8 changes."""
    names = set(quantizable(model))
    return [n.name for n in model.graph.node if n.name in names and n.op_type in _ANCHORS]


def _ranks(model: onnx.ModelProto) -> dict[str, int]:
    values = (*model.graph.value_info, *model.graph.output, *model.graph.input)
    return {
        value.name: len(value.type.tensor_type.shape.dim)
        for value in values
        if value.type.tensor_type.HasField("shape")
    }


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
