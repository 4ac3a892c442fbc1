"""Quantized operators, bit for bit against ONNX Runtime or exact integer arithmetic."""

import ml_dtypes
import numpy as np
import pytest
from harness import Case, check, floats, lower_model, make_model, run_lowered, whole
from onnx import TensorProto


def integers(*shape, dtype="uint8", seed=0):
    """All values of an integer type."""
    info = np.iinfo(dtype)
    return whole(*shape, dtype="int64", seed=seed, low=info.min, high=info.max + 1).astype(dtype)


def scales(*shape, seed=9, dtype="float32"):
    return np.asarray(floats(*shape, seed=seed, low=0.02) / 40, dtype)


def scale(value, dtype="float32"):
    return np.array(value, dtype)


HALVES = np.arange(-40, 40, 0.5, dtype="float32") * np.float32(0.1)
WIDE = floats(5, 4, 3) * np.float32(300)

TO_INTEGERS = [
    *(
        Case("QuantizeLinear", [data, scale(step), scale(zero, dtype)], opset=21, constants=const)
        for dtype in ("uint8", "int8", "uint16", "int16")
        for zero in (0, 100)
        for data, step in ((HALVES, 0.1), (WIDE, 1.7), (floats(1000) * 3, 0.013))
        for const in ((), (1, 2))
    ),
    Case("QuantizeLinear", [WIDE, scale(0.3)]),
    Case("QuantizeLinear", [WIDE, scales(4), integers(4)], {"axis": 1}, opset=13),
    Case("QuantizeLinear", [WIDE, scales(4), integers(4)], {"axis": -2}, opset=13),
    Case("QuantizeLinear", [WIDE, scales(4), integers(4)], opset=13, constants=[1, 2]),
    Case("QuantizeLinear", [WIDE, scales(3), integers(3, dtype="int8")], {"axis": 2}, opset=19),
    Case("QuantizeLinear", [WIDE, scales(5)], {"axis": 0}, opset=19),
    Case("QuantizeLinear", [floats(6), scales(1), integers(1)], opset=13),
    Case("QuantizeLinear", [WIDE, scales(5, 2, 3)], {"axis": 1, "block_size": 2}, opset=21),
    Case(
        "QuantizeLinear",
        [WIDE, scales(5, 2, 3), integers(5, 2, 3, dtype="int16")],
        {"axis": -2, "block_size": 3},
        opset=21,
        constants=[1, 2],
    ),
    Case("QuantizeLinear", [WIDE, scale(0.3)], {"output_dtype": TensorProto.INT8}, opset=21),
    Case("QuantizeLinear", [floats(9, dtype="float16"), scale(0.02, "float16")], opset=19),
    Case("QuantizeLinear", [np.array([np.inf, -np.inf, 1e30, -1e30], "float32"), scale(0.1)]),
    Case("QuantizeLinear", [WIDE, scale(0.7), scale(9, "uint8")], opset=10),
    Case("QuantizeLinear", [WIDE, scale(0.7)], symbolic={0: {0: "n", 2: "w"}}),
]

FROM_INTEGERS = [
    *(
        Case("DequantizeLinear", [integers(40, dtype=dtype), scale(0.3), scale(77, dtype)], opset=o)
        for dtype, o in (("uint8", 10), ("int8", 13), ("uint16", 21), ("int16", 21))
    ),
    Case("DequantizeLinear", [integers(2, 3), scales(3), integers(3)], {"axis": 1}, opset=13),
    Case("DequantizeLinear", [integers(2, 3), scales(2), integers(2)], {"axis": -2}, opset=13),
    Case("DequantizeLinear", [integers(2, 3), scales(3)], opset=13, constants=[1]),
    Case("DequantizeLinear", [whole(7, high=1 << 30), scale(0.3)], opset=13),
    Case("DequantizeLinear", [integers(2, 3), scale(0.3, "float16")], opset=19),
    Case("DequantizeLinear", [integers(5, 4), scales(5, 2)], {"block_size": 2}, opset=21),
    Case(
        "DequantizeLinear",
        [integers(5, 4), scales(2, 4), integers(2, 4)],
        {"axis": 0, "block_size": 3},
        opset=21,
    ),
    Case("DequantizeLinear", [integers(5, 4), scale(0.3)], symbolic={0: {0: "n"}}),
]

DYNAMIC = [
    Case("DynamicQuantizeLinear", [data.astype("float32")], opset=11, outputs=3)
    for data in (WIDE, abs(WIDE), -abs(WIDE), np.zeros((3, 2)), np.full(5, 3.0), floats(999))
]

ZERO = scale(9, "uint8")
PRODUCTS = [
    *(
        Case(
            "MatMulInteger",
            [integers(5, 70, dtype=a), integers(70, 6, dtype=b, seed=1), *zeros],
            opset=10,
            constants=constants,
            reference=b == "int8" and not constants,  # ONNX Runtime's kernel may saturate
        )
        for a in ("uint8", "int8")
        for b in ("uint8", "int8")
        for zeros in ([], [scale(3, a), scale(7, b)])
        for constants in ((), tuple(range(1, 2 + len(zeros))))
    ),
    Case("MatMulInteger", [integers(2, 5, 7), integers(7, 6), ZERO], opset=10),
    Case(
        "MatMulInteger", [integers(2, 5, 7), integers(2, 7, 6), None, scale(9, "uint8")], opset=10
    ),
    Case(
        "MatMulInteger", [integers(4, 7), integers(7, 6), scale(9, "uint8"), integers(6)], opset=10
    ),
    Case("MatMulInteger", [integers(4, 7), integers(7, 6)], opset=10, symbolic={0: {0: "n"}}),
]


def qlinear_matmul(
    left, right, per_column=False, constants=(), opset=10, result="uint8", reference=False
):
    columns = (right.shape[-1],) if per_column else ()
    return Case(
        "QLinearMatMul",
        [
            left,
            scale(0.021),
            scale(3, left.dtype),
            right,
            scales(*columns),
            np.full(columns, 5, right.dtype),
            scale(1.3),
            scale(4, result),
        ],
        opset=opset,
        constants=constants,
        reference=reference,
    )


QLINEAR_PRODUCTS = [
    qlinear_matmul(integers(5, 70), integers(70, 6)),
    qlinear_matmul(integers(5, 70), integers(70, 6, dtype="int8"), constants=(1, 2, 3, 4, 5, 6, 7)),
    qlinear_matmul(integers(5, 70), integers(70, 6, dtype="int8"), True, (1, 2, 3, 4, 5, 6, 7)),
    qlinear_matmul(integers(2, 5, 70), integers(70, 6, dtype="int8"), True, reference=True),
    qlinear_matmul(
        integers(5, 70, dtype="int8"), integers(70, 6, dtype="int8"), result="int8", opset=21
    ),
]


def convolution(op, data, weight, attributes=None, zeros=True, constants=()):
    inputs = [data, weight]
    if zeros:
        inputs += [scale(11, data.dtype), scale(5 if weight.dtype == "uint8" else 0, weight.dtype)]
    return Case(op, inputs, attributes or {}, opset=10, constants=constants)


CONVOLUTIONS = [
    convolution("ConvInteger", integers(1, 3, 6, 7), integers(4, 3, 3, 3)),
    convolution("ConvInteger", integers(1, 3, 6, 7), integers(4, 3, 3, 3), zeros=False),
    convolution("ConvInteger", integers(2, 3, 6, 7), integers(4, 3, 3, 3), {"pads": [1, 0, 2, 1]}),
    convolution(
        "ConvInteger", integers(1, 4, 8, 7), integers(6, 2, 3, 2), {"group": 2, "strides": [2, 1]}
    ),
    convolution("ConvInteger", integers(1, 3, 9), integers(4, 3, 3), {"dilations": [2]}),
    convolution("ConvInteger", integers(1, 3, 6, 7), integers(4, 3, 3, 3), constants=(1, 2, 3)),
]


def qlinear_conv(data, weight, attributes=None, per_channel=False, bias=False, constants=(), y=9):
    count = (weight.shape[0],) if per_channel else ()
    zeros = 0 if per_channel or weight.dtype == "int8" else 3
    inputs = [
        data,
        scale(0.017),
        scale(7, data.dtype),
        weight,
        scales(*count),
        np.full(count, zeros, weight.dtype),
        scale(0.9),
        scale(y, data.dtype),
    ]
    if bias:
        inputs.append(whole(weight.shape[0], low=-9000, high=9000))
    return Case("QLinearConv", inputs, attributes or {}, opset=10, constants=constants)


ALL = (1, 2, 3, 4, 5, 6, 7)
QLINEAR_CONVOLUTIONS = [
    qlinear_conv(integers(1, 3, 6, 7), integers(4, 3, 3, 3)),
    qlinear_conv(integers(1, 3, 6, 7), integers(4, 3, 3, 3), bias=True, constants=(*ALL, 8)),
    qlinear_conv(
        integers(2, 4, 6, 7),
        integers(4, 1, 3, 3, dtype="int8"),
        {"group": 4, "pads": [1, 1, 1, 1]},
        per_channel=True,
        bias=True,
        constants=(*ALL, 8),
    ),
    qlinear_conv(integers(1, 3, 6, 7, dtype="int8"), integers(4, 3, 3, 3, dtype="int8"), y=-3),
    qlinear_conv(integers(1, 3, 17), integers(4, 3, 5), {"auto_pad": "SAME_UPPER"}),
]

EVERY = [
    *TO_INTEGERS,
    *FROM_INTEGERS,
    *DYNAMIC,
    *PRODUCTS,
    *QLINEAR_PRODUCTS,
    *CONVOLUTIONS,
    *QLINEAR_CONVOLUTIONS,
]


@pytest.mark.parametrize("case", EVERY, ids=str)
def test_operator(case):
    check(case)


def test_products_do_not_saturate():
    """Pairs of 255 * 127 pass 16 bits, where kernels without VNNI saturate."""
    left, right = np.full((1, 8), 255, np.uint8), np.full((8, 1), 127, np.int8)
    lowered = lower_model(make_model(Case("MatMulInteger", [left, right], opset=10)))
    np.testing.assert_array_equal(run_lowered(lowered, [left, right])[0], [[8 * 255 * 127]])


@pytest.mark.parametrize("name", ["int4", "uint4", "int2", "uint2"])
def test_constants_below_a_byte(name):
    dtype = getattr(ml_dtypes, name)
    low, high = int(ml_dtypes.iinfo(dtype).min), int(ml_dtypes.iinfo(dtype).max)
    data = whole(6, 4, low=low, high=high + 1).astype(dtype)
    step = scales(2, 4)
    zero = np.full((2, 4), 1).astype(dtype)
    case = Case(
        "DequantizeLinear", [data, step, zero], {"axis": 0, "block_size": 3}, 25, constants=[0, 2]
    )
    result = run_lowered(lower_model(make_model(case)), [step])[0]
    expected = (data.astype("float32") - 1) * np.repeat(step, 3, 0)
    np.testing.assert_array_equal(result, expected)
