"""Operators of com.microsoft against ONNX Runtime, which defines them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from harness import assert_same, floats, lower_model, run_lowered, whole
from onnx import helper, numpy_helper

from hybridc.errors import UnsupportedError
from hybridc.reference import precise_session


@dataclass(frozen=True)
class Fused:
    """One node of com.microsoft.

    Attributes:
        op: Operator type.
        inputs: Arrays in order; ``None`` for one left out.
        attributes: Attributes of the node.
        outputs: Names of the outputs asked for; an empty name leaves one out.
        constants: Which inputs are initializers.
        symbolic: Names for dimensions: input -> (axis -> name).
        domain: Domain of the node.
        tolerance: Allowed error over the largest expected magnitude.
    """

    op: str
    inputs: Sequence[Any]
    attributes: Mapping[str, Any] = field(default_factory=dict)
    outputs: Sequence[str] = ("y",)
    constants: Sequence[int] = ()
    symbolic: Mapping[int, Mapping[int, str]] = field(default_factory=dict)
    domain: str = "com.microsoft"
    tolerance: float = 1e-5

    def __str__(self):
        shapes = ",".join(
            "-" if a is None else f"{a.dtype.char}{list(a.shape)}".replace(" ", "")
            for a in self.inputs
        )
        attributes = ",".join(f"{k}={v}".replace(" ", "") for k, v in self.attributes.items())
        return f"{self.op}-{shapes}-{attributes}-{''.join(map(str, self.constants))}"


def model_of(case):
    names = ["" if array is None else f"x{i}" for i, array in enumerate(case.inputs)]
    node = helper.make_node(
        case.op, names, list(case.outputs), name="node", domain=case.domain, **case.attributes
    )
    inputs, initializers = [], []
    for i, array in enumerate(case.inputs):
        if array is None:
            continue
        if i in case.constants:
            initializers.append(numpy_helper.from_array(array, names[i]))
            continue
        dims = list(array.shape)
        for axis, name in case.symbolic.get(i, {}).items():
            dims[axis] = name
        kind = helper.np_dtype_to_tensor_dtype(array.dtype)
        inputs.append(helper.make_tensor_value_info(names[i], kind, dims))
    untyped = [onnx.ValueInfoProto(name=name) for name in case.outputs if name]
    graph = helper.make_graph([node], "one", inputs, untyped, initializers)
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8)


def run_reference(model, feed):
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = precise_session(model.SerializeToString(), options)
    return session.run(None, feed)


def integers(*shape, dtype="uint8", seed=0):
    info = np.iinfo(dtype)
    return whole(*shape, dtype="int64", seed=seed, low=info.min, high=info.max + 1).astype(dtype)


def weights(*shape, dtype="uint8", seed=0):
    """Integers of which no pair of products exceeds int16, in which ONNX Runtime may add them."""
    if dtype == "uint8":
        return integers(*shape, seed=seed)
    return whole(*shape, dtype="int64", seed=seed, low=-63, high=64).astype(dtype)


def scale(value, dtype="float32"):
    return np.array(value, dtype)


X = floats(2, 3, 8)

ACTIVATIONS = [
    Fused("Gelu", [X]),
    Fused("FastGelu", [X]),
    Fused("FastGelu", [X, floats(8, seed=1)], constants=[1]),
    Fused("BiasGelu", [X, floats(8, seed=1)], constants=[1]),
    Fused("QuickGelu", [X]),
    Fused("QuickGelu", [X], {"alpha": 1.1}),
]


def fused_matmul(left, right, **attributes):
    return Fused("FusedMatMul", [floats(*left), floats(*right, seed=1)], attributes)


PRODUCTS = [
    fused_matmul((3, 4), (4, 5), alpha=0.5),
    fused_matmul((4, 3), (4, 5), transA=1),
    fused_matmul((2, 3, 4), (2, 5, 4), transB=1, alpha=-2.0),
    fused_matmul((2, 4, 3), (2, 5, 4), transA=1, transB=1),
    fused_matmul((3, 2, 4), (2, 4, 5), transBatchA=1),
    fused_matmul((3, 2, 4), (4, 2, 5), transBatchA=1, transBatchB=1),
    fused_matmul((4, 2, 3), (4, 2, 5), transBatchA=1, transBatchB=1, transA=1),
    Fused("FusedMatMul", [floats(3, 4), floats(5, 4)], {"transB": 1}, constants=[1]),
    Fused(
        "FusedGemm",
        [floats(3, 4), floats(4, 5), floats(5)],
        {"activation": "LeakyRelu", "activation_alpha": 0.3, "alpha": 0.5},
    ),
    Fused("FusedGemm", [floats(3, 4), floats(4, 5), floats(5)], {"activation": "Relu"}),
    Fused(
        "FusedConv",
        [floats(1, 3, 6, 6), floats(4, 3, 3, 3), floats(4)],
        {"activation": "Relu", "kernel_shape": [3, 3], "pads": [1, 1, 1, 1]},
    ),
    Fused(
        "FusedConv",
        [floats(1, 3, 6, 6), floats(4, 3, 3, 3), floats(4), floats(1, 4, 4, 4)],
        {"activation": "Relu", "kernel_shape": [3, 3]},
    ),
    Fused(
        "FusedConv",
        [floats(1, 3, 6, 6), floats(4, 3, 3, 3), floats(4)],
        {"activation": "Clip", "activation_params": [-0.5, 0.75], "kernel_shape": [3, 3]},
    ),
    Fused(
        "FusedConv",
        [floats(1, 3, 6, 6), floats(4, 3, 3, 3)],
        {"activation": "HardSigmoid", "activation_params": [0.1, 0.4], "kernel_shape": [3, 3]},
    ),
]

NORMALIZATIONS = [
    Fused("SkipLayerNormalization", [X, floats(2, 3, 8, seed=1), floats(8), floats(8, seed=2)]),
    Fused(
        "SkipLayerNormalization",
        [X, floats(2, 3, 8, seed=1), floats(8), floats(8, seed=2), floats(8, seed=3)],
        {"epsilon": 1e-2},
        ("y", "", "", "sum"),
        (2, 3, 4),
    ),
    Fused("SkipLayerNormalization", [X, floats(1, 3, 8, seed=1), floats(8)]),
    Fused("SkipSimplifiedLayerNormalization", [X, floats(2, 3, 8, seed=1), floats(8)]),
    Fused(
        "SkipSimplifiedLayerNormalization",
        [X, floats(2, 3, 8, seed=1), floats(8), floats(8, seed=3)],
        {"epsilon": 1e-2},
        ("y", "", "", "sum"),
    ),
    Fused("SimplifiedLayerNormalization", [X, floats(8)], {"epsilon": 1e-3}, domain=""),
    Fused("SimplifiedLayerNormalization", [X, floats(3, 8)], {"axis": 1}, domain=""),
]

IDS = whole(2, 5, low=0, high=9)
TABLES = [floats(9, 8, seed=1), floats(7, 8, seed=2), floats(2, 8, seed=3), floats(8), floats(8)]
MASK = np.array([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]], np.int32)
EMBEDDINGS = [
    Fused(
        "EmbedLayerNormalization",
        [IDS, whole(2, 5, low=0, high=2), *TABLES, MASK],
        {"epsilon": 1e-3},
        ("y", "length"),
        (2, 3, 4, 5, 6),
    ),
    Fused(
        "EmbedLayerNormalization",
        [IDS, None, *TABLES[:2], None, *TABLES[3:], None, whole(2, 5, low=0, high=7)],
        {},
        ("y", "length", "sum"),
    ),
    Fused(
        "EmbedLayerNormalization",
        [IDS, None, *TABLES[:2], None, *TABLES[3:], None, whole(1, 5, low=0, high=7)],
        {},
        ("y", "length"),
    ),
]


def rotary(shape, half, places, **attributes):
    tables = floats(9, half, seed=1), floats(9, half, seed=2)
    return Fused("RotaryEmbedding", [floats(*shape), places, *tables], attributes)


ROTARY = [
    rotary((2, 3, 4, 6), 3, whole(2, 4, dtype="int64", low=0)),
    rotary((2, 3, 4, 6), 3, whole(2, 4, dtype="int64", low=0), interleaved=1),
    rotary((2, 4, 18), 3, whole(2, 4, dtype="int64", low=0)),
    rotary((2, 4, 18), 3, np.array([2], np.int64), interleaved=1),
    rotary((2, 3, 4, 8), 2, whole(2, 4, dtype="int64", low=0), num_heads=3, rotary_embedding_dim=4),
    rotary((2, 4, 24), 2, whole(2, 4, dtype="int64", low=0), num_heads=3, rotary_embedding_dim=4),
]


def n_bits(rows, columns, block, zeros=True, bias=False):
    blocks = -(-rows // block)
    inputs = [
        floats(3, rows),
        integers(columns, blocks, block // 2),
        floats(columns * blocks, seed=2),
        integers(columns * (-(-blocks // 2)), seed=3) if zeros else None,
    ]
    if bias:
        inputs += [None, floats(columns, seed=4)]
    attributes = {"K": rows, "N": columns, "bits": 4, "block_size": block}
    constants = [i for i in (1, 2, 3) if inputs[i] is not None]
    return Fused("MatMulNBits", inputs, attributes, constants=constants, tolerance=1e-4)


BLOCKS = [
    n_bits(64, 5, 32),
    n_bits(96, 5, 32),
    n_bits(80, 6, 16, zeros=False),
    n_bits(32, 4, 16, bias=True),
]


def attention(mask=None, past=False, bias=None, *, hidden=8, heads=2, symbolic=None, **attributes):
    inputs = [
        floats(2, 5, 6),
        floats(6, 3 * hidden, seed=1),
        floats(3 * hidden, seed=2),
        mask,
        floats(2, 2, heads, 3, hidden // heads, seed=3) if past else None,
        bias,
    ]
    while inputs[-1] is None:
        inputs.pop()
    outputs = ("y", "present") if past else ("y",)
    return Fused(
        "Attention",
        inputs,
        {"num_heads": heads, **attributes},
        outputs,
        (1, 2),
        symbolic or {},
    )


ATTENTIONS = [
    attention(),
    attention(MASK),
    attention(np.array([3, 5], np.int32)),
    attention(np.array([4, 5, 1, 0], np.int32)),
    attention(np.stack([np.tril(np.ones((5, 5), np.int32))] * 2)),
    attention(unidirectional=1),
    attention(MASK, unidirectional=1),
    attention(past=True, unidirectional=1),
    attention(np.concatenate([np.ones((2, 3), np.int32), MASK], 1), past=True),
    attention(bias=floats(1, 2, 5, 5, seed=4)),
    attention(bias=floats(2, 2, 5, 5, seed=4), scale=0.3),
    attention(MASK, mask_filter_value=-5.0),
    attention(symbolic={0: {0: "n", 1: "s"}}),
    attention(MASK, symbolic={0: {0: "n", 1: "s"}, 3: {0: "n", 1: "s"}}),
]


def multi_head(keys=5, bias=False, mask=None, extra=None, past=0, **attributes):
    inputs = [
        floats(2, 5, 8),
        floats(2, keys, 8, seed=1),
        floats(2, keys, 8, seed=2),
        floats(24, seed=3) if bias else None,
        mask,
        extra,
        floats(2, 2, past, 4, seed=4) if past else None,
        floats(2, 2, past, 4, seed=5) if past else None,
    ]
    while inputs[-1] is None:
        inputs.pop()
    outputs = ("y", "key", "value") if past else ("y",)
    return Fused("MultiHeadAttention", inputs, {"num_heads": 2, **attributes}, outputs)


MULTI_HEAD = [
    multi_head(),
    multi_head(keys=7, bias=True),
    multi_head(mask=MASK),
    multi_head(bias=True, extra=floats(2, 2, 5, 5)),
    multi_head(past=3, bias=True),
    multi_head(unidirectional=1, scale=0.25),
]

QUANTIZED_ATTENTION = [
    Fused(
        "QAttention",
        [
            integers(2, 5, 6),
            weights(6, 24, dtype=dtype, seed=1),
            floats(24),
            scale(0.01),
            scale(0.02),
            MASK,
            scale(120, "uint8"),
            scale(zero, dtype),
        ],
        {"num_heads": 2},
        constants=[1, 2, 3, 4, 6, 7],
    )
    for dtype, zero in (("uint8", 130), ("int8", 0))
]


def both(op, **attributes):
    """A binary quantized operator on all neighbors of a rounding."""
    return [
        Fused(
            op,
            [
                integers(40, 30, dtype=dtype),
                scale(0.013),
                scale(7, dtype),
                integers(*shape, dtype=dtype, seed=1),
                scale(0.021),
                scale(3, dtype),
                scale(0.029),
                scale(11, dtype),
            ],
            attributes,
            constants=constants,
        )
        for dtype in ("uint8", "int8")
        for shape in ((40, 30), (30,))
        for constants in ((), (1, 2, 4, 5, 6, 7))
    ]


def single(op, data, step=0.017, **attributes):
    dtype = str(data.dtype)
    inputs = [data, scale(0.043), scale(21, dtype), scale(step), scale(5, dtype)]
    return Fused(op, inputs, attributes, constants=[1, 2, 3, 4])


POOL = {"kernel_shape": [3, 2], "strides": [2, 1]}
QUANTIZED = [
    *both("QLinearAdd"),
    *both("QLinearMul"),
    *(
        single(op, integers(900, dtype=dtype))
        for op in ("QLinearSigmoid", "QLinearLeakyRelu")
        for dtype in ("uint8", "int8")
    ),
    single("QLinearLeakyRelu", integers(900), alpha=0.2),
    single("QLinearSoftmax", integers(20, 30), 1 / 256, opset=13, axis=-1),
    single("QLinearSoftmax", integers(20, 30, dtype="int8"), 0.02, opset=13, axis=1),
    single("QLinearAveragePool", integers(2, 3, 9, 8), **POOL),
    single("QLinearAveragePool", integers(2, 9, 8, 3), channels_last=1, **POOL),
    single(
        "QLinearAveragePool", integers(2, 3, 9, 8), count_include_pad=1, pads=[1, 0, 1, 1], **POOL
    ),
    single("QLinearGlobalAveragePool", integers(2, 30, 9, 8), channels_last=0),
    single("QLinearGlobalAveragePool", integers(2, 9, 8, 30, dtype="int8"), channels_last=1),
    Fused(
        "QLinearConcat",
        [
            scale(0.03),
            scale(9, "uint8"),
            *(integers(2, 300), scale(0.03), scale(9, "uint8")),
            *(integers(2, 200, seed=1), scale(0.05), scale(1, "uint8")),
        ],
        {"axis": 1},
        constants=[0, 1, 3, 4, 6, 7],
    ),
    Fused("NhwcMaxPool", [integers(2, 9, 8, 3)], {"kernel_shape": [3, 2], "strides": [2, 1]}),
    Fused("NhwcMaxPool", [integers(2, 9, 8, 3, dtype="int8")], {"kernel_shape": [2, 2]}),
    Fused("QuantizeLinear", [floats(4, 5) * 40, scale(0.3), scale(5, "int8")]),
    Fused("QuantizeLinear", [floats(4, 5) * 40, scale(0.3), scale(5, "uint16")]),
    Fused("DequantizeLinear", [integers(4, 5, dtype="int16"), scale(0.3), scale(5, "int16")]),
]


def gemm(result=True, dtype="uint8", columns=(), bias=True, **attributes):
    right = (6, 30) if attributes.get("transB") else (30, 6)
    inputs = [
        integers(7, 30),
        scale(0.011),
        scale(9, "uint8"),
        weights(*right, dtype=dtype, seed=1),
        np.asarray(floats(*columns, seed=2, low=0.5) / 50, "float32"),
        np.full(columns, 0 if columns else 3, dtype),
        whole(6, low=-999, high=999) if bias else None,
    ]
    if result:
        inputs += [scale(1.7), scale(4, "uint8")]
    constants = [i for i in range(1, len(inputs)) if inputs[i] is not None]
    return Fused("QGemm", inputs, attributes, constants=constants)


INTEGER_PRODUCTS = [
    gemm(),
    gemm(dtype="int8", columns=(6,), transB=1),
    gemm(result=False, alpha=0.5),
    gemm(bias=False, dtype="int8"),
    Fused(
        "MatMulIntegerToFloat",
        [
            integers(5, 30),
            weights(30, 6, dtype="int8"),
            scale(0.02),
            scale(0.03),
            scale(7, "uint8"),
            scale(1, "int8"),
            floats(6),
        ],
    ),
    Fused(
        "MatMulIntegerToFloat",
        [integers(5, 30), integers(30, 6), scale(0.02), np.abs(floats(6)), None, integers(6)],
        constants=[1, 3, 5],
    ),
    Fused(
        "DynamicQuantizeMatMul",
        [floats(5, 30), weights(30, 6, dtype="int8"), scale(0.03), scale(2, "int8"), floats(6)],
        constants=[1, 2, 3, 4],
    ),
    Fused("DynamicQuantizeMatMul", [floats(2, 5, 30), integers(30, 6), np.abs(floats(6))]),
]

EVERY = [
    *ACTIVATIONS,
    *PRODUCTS,
    *NORMALIZATIONS,
    *EMBEDDINGS,
    *ROTARY,
    *BLOCKS,
    *ATTENTIONS,
    *MULTI_HEAD,
    *QUANTIZED_ATTENTION,
    *QUANTIZED,
    *INTEGER_PRODUCTS,
]


@pytest.mark.parametrize("case", EVERY, ids=str)
def test_operator(case):
    model = model_of(case)
    feed = {
        f"x{i}": array
        for i, array in enumerate(case.inputs)
        if array is not None and i not in case.constants
    }
    expected = run_reference(model, feed)
    actual = run_lowered(lower_model(model), list(feed.values()))
    assert len(actual) == len(expected)
    for got, wanted in zip(actual, expected, strict=True):
        assert_same(got, np.asarray(wanted), case.tolerance)


def test_softmax_that_onnx_runtime_rounds_is_refused():
    case = single("QLinearSoftmax", integers(2, 3), 0.017, opset=13, axis=-1)
    with pytest.raises(UnsupportedError, match="one over a whole number"):
        lower_model(model_of(case))
