import ml_dtypes
import numpy as np
import pytest
from harness import Case, check, floats, whole

from hybridc import onnx_backend
from tests.models import make_model, node

NAN, INF = np.nan, np.inf
FLOATS = floats(3, 5)
POSITIVE = floats(3, 5, low=0.05)
WIDE = np.linspace(-12, 12, 97, dtype=np.float32)
EDGES = np.array([-11.78, -1.01, -0.99, 0.3, 2.0, 11.5])
TINY = np.array([1e-9, -3e-9, 2.5e-9])
SPECIAL = np.array([NAN, INF, -INF, 0.0, -0.0, 1.5, -2.5], np.float32)
FIRST, SECOND = floats(2, 1, 4), floats(3, 1, seed=1)
INTS, NONZERO = whole(4, 5), whole(5, seed=1, low=1)
SIGNS = whole(4, 5, seed=2) * 2 + 1
FLAGS, OTHERS = floats(3, 4) > 0, floats(4, seed=1) > 0


def scalar(value, dtype="float32"):
    return np.array(value, dtype)


BINARY = [
    *(
        Case(op, [FIRST, SECOND])
        for op in ("Add", "Sub", "Mul", "Div", "Max", "Min", "Sum", "Mean")
    ),
    *(Case(op, [FIRST, SECOND]) for op in ("Greater", "GreaterOrEqual", "Less", "LessOrEqual")),
    *(Case(op, [INTS, NONZERO]) for op in ("Add", "Sub", "Mul", "Div", "Max", "Min")),
    *(Case(op, [floats(), floats(1, 1)], constants=[1]) for op in ("Add", "Mul", "Equal")),
    *(Case("Add", [floats(1, 1), floats()], constants=[i]) for i in (0, 1)),
    Case("Add", [floats(2, 3), floats(1)], constants=[1]),
    Case("Sub", [floats(1), floats(2, 3)], constants=[0]),
    Case("Add", [floats(0, 3), floats(1, 3)]),
    Case("Add", [floats(3, dtype="float64"), floats(1, dtype="float64")], constants=[1]),
    Case("Add", [floats(3, dtype="float16"), floats(1, dtype="float16")]),
    Case("Add", [whole(3, dtype="int64"), scalar(2**40, "int64")], constants=[1]),
    Case("Div", [whole(9, dtype="int64"), scalar(-2, "int64")], constants=[1]),
    Case("Div", [whole(9, dtype="uint8", low=0), scalar(4, "uint8")], constants=[1]),
    Case("Div", [INTS, SIGNS]),
    Case("Max", [floats(2, 3), floats(3), floats(1, 1)]),
    Case("Min", [whole(2, 3, dtype="int64")]),
    Case("Sum", [floats(2, 1), floats(3), floats()]),
    Case("Mean", [floats(2, 1), floats(3), floats()]),
    Case("Pow", [POSITIVE, floats(5)]),
    *(Case("Pow", [FLOATS, scalar(e)], constants=[1]) for e in (1, 2, 3, -1, 0)),
    Case("Pow", [POSITIVE, scalar(0.5)], constants=[1]),
    Case("Pow", [FLOATS, scalar(2, "int64")], constants=[1]),
    Case("Pow", [FLOATS, whole(5, dtype="int64", low=0, high=4)]),
    Case("Pow", [whole(6), whole(6, low=0, high=5)]),
    Case("Pow", [whole(6, dtype="int64"), floats(6, low=0.0)], reference=True),
    Case("Mod", [INTS, SIGNS]),
    Case("Mod", [INTS, SIGNS], {"fmod": 1}),
    Case("Mod", [whole(6, dtype="uint8", low=0), scalar(4, "uint8")]),
    Case("Mod", [floats(4, 5) * 9, floats(5, seed=1)], {"fmod": 1}),
    Case("Mod", [floats(4, 5) * 9, floats(5, seed=1)], {"fmod": 0}, opset=13, reference=True),
    Case("Equal", [whole(3, 4, low=0, high=2), whole(4, low=0, high=2)]),
    Case("Equal", [FLAGS, OTHERS]),
    Case("Equal", [floats(3), floats(3)], opset=11),
    *(Case(op, [FLAGS, OTHERS]) for op in ("And", "Or", "Xor")),
    Case("Not", [FLAGS]),
    *(
        Case(op, [whole(3, 4, dtype=dtype, low=0), whole(4, dtype=dtype, low=0)], opset=18)
        for op in ("BitwiseAnd", "BitwiseOr", "BitwiseXor")
        for dtype in ("int32", "uint8")
    ),
    Case("BitwiseNot", [whole(3, dtype="int16")], opset=18),
    *(
        Case(
            "BitShift",
            [whole(4, dtype=dtype, low=1), whole(4, dtype=dtype, low=0)],
            {"direction": d},
        )
        for dtype in ("uint8", "uint32", "uint64")
        for d in ("LEFT", "RIGHT")
    ),
    Case("Where", [FLAGS, floats(3, 1), floats()]),
    Case("Where", [OTHERS, whole(3, 4, dtype="int64"), scalar(7, "int64")], constants=[2]),
    Case("Where", [FLAGS, FLAGS, OTHERS], reference=True),
    *(
        Case(op, [whole(9, dtype=dtype, low=0), scalar(4, dtype)], constants=[1])
        for op in ("Less", "Greater", "Max")
        for dtype in ("uint32", "uint64")
    ),
]

UNARY = [
    *(
        Case(op, [FLOATS])
        for op in (
            *("Neg", "Abs", "Exp", "Sin", "Cos", "Tan", "Atan", "Sinh", "Cosh", "Tanh", "Asinh"),
            *("Erf", "Sigmoid", "Relu", "Ceil", "Floor", "Sign", "Softplus", "Softsign"),
        )
    ),
    *(
        Case(op, [WIDE])
        for op in ("Tanh", "Sigmoid", "Softplus", "Erf", "Elu", "Selu", "HardSwish")
    ),
    *(Case(op, [POSITIVE]) for op in ("Sqrt", "Log", "Reciprocal")),
    *(Case(op, [floats(3, 5) / 2.001]) for op in ("Asin", "Acos", "Atanh")),
    Case("Acosh", [POSITIVE + 1]),
    *(
        Case(op, [EDGES.astype(dtype)], tolerance=tolerance, reference=True)
        for op in ("Sinh", "Cosh")
        for dtype, tolerance in (("float16", 0), ("float32", 3e-7), ("float64", 1e-15))
    ),
    *(
        Case(op, [TINY.astype(dtype)], tolerance=tolerance, reference=True)
        for op in ("Sinh", "Atanh")
        for dtype, tolerance in (("float32", 3e-7), ("float64", 1e-15))
    ),
    Case("Sinh", [SPECIAL]),
    Case("Cosh", [SPECIAL]),
    Case("Atanh", [np.array([1, -1, 0.999, -0.25, 0.2499], np.float32)]),
    Case("Mish", [WIDE], opset=18),
    Case("Tanh", [FLOATS * np.float32(1e-3)], tolerance=3e-7, reference=True),
    *(Case(op, [floats(3, dtype="float16")]) for op in ("Sigmoid", "Tanh", "Relu", "Exp", "Erf")),
    *(Case(op, [floats(3, dtype="float64")]) for op in ("Exp", "Tanh", "Sqrt")),
    *(Case(op, [floats()]) for op in ("Exp", "Relu", "Neg")),
    *(Case(op, [floats(0, 2)]) for op in ("Exp", "Relu")),
    Case("Relu", [whole(5)]),
    *(Case(op, [whole(5, dtype="int64")]) for op in ("Neg", "Abs", "Sign")),
    Case("Sign", [whole(5, dtype="uint8", low=0)]),
    Case("Round", [np.array([0.5, 1.5, 2.5, -0.5, -1.5, 2.4, 2.6], np.float32)]),
    Case("Round", [np.array([0.5, 1.5, 2.5, -0.5], np.float64)]),
    Case("IsNaN", [SPECIAL]),
    Case("IsNaN", [SPECIAL.astype("float16")]),
    Case("IsInf", [SPECIAL]),
    Case("IsInf", [SPECIAL], {"detect_negative": 0}),
    Case("IsInf", [SPECIAL.astype("float64")], {"detect_positive": 0}),
    Case("Identity", [FLOATS]),
    Case("Dropout", [FLOATS], {"ratio": 0.3}, opset=7),
    Case("Dropout", [FLOATS], opset=12),
    Case("Dropout", [FLOATS], opset=13, outputs=2),
    Case("HardSigmoid", [WIDE]),
    Case("HardSigmoid", [WIDE], {"alpha": 0.1, "beta": 0.3}),
    Case("LeakyRelu", [WIDE]),
    Case("LeakyRelu", [WIDE], {"alpha": -0.2}),
    Case("Elu", [WIDE], {"alpha": 0.7}),
    Case("Selu", [WIDE], {"alpha": 2.0, "gamma": 0.5}),
    Case("Celu", [WIDE], {"alpha": 0.7}),
    Case("Gelu", [WIDE], opset=20),
    Case("Gelu", [WIDE], {"approximate": "tanh"}, opset=20),
    Case("ThresholdedRelu", [WIDE], {"alpha": 0.7}),
    Case("Shrink", [WIDE], {"bias": 0.2, "lambd": 1.5}),
    Case("PRelu", [floats(2, 3, 4, 4), floats(3, 1, 1)], constants=[1]),
    Case("PRelu", [floats(2, 3), floats(1)], constants=[1]),
    Case("PRelu", [floats(2, 3), floats(3)]),
]

CLIPS = [
    Case("Clip", [WIDE], {"min": -1.0, "max": 2.5}, opset=7),
    Case("Clip", [WIDE], opset=6),
    Case("Clip", [WIDE], {"max": 2.5}, opset=10),
    Case("Clip", [WIDE, scalar(-1), scalar(2)], opset=11, constants=[1, 2]),
    Case("Clip", [WIDE, scalar(-1), scalar(2)], opset=13),
    Case("Clip", [WIDE, None, scalar(2)], constants=[2]),
    Case("Clip", [WIDE, scalar(-1)], constants=[1]),
    Case("Clip", [WIDE]),
    Case("Clip", [WIDE, scalar(2), scalar(-1)], constants=[1, 2]),
    Case("Clip", [whole(9), scalar(-3, "int32"), scalar(3, "int32")], opset=12, constants=[1, 2]),
    Case("Clip", [whole(9, dtype="int64"), None, scalar(3, "int64")], constants=[2]),
    Case("Clip", [whole(9, dtype="uint64", low=0), scalar(2, "uint64")], constants=[1]),
]

NUMBERS = np.array([-2.7, -1.0, -0.3, 0.0, 0.4, 1.0, 99.9], np.float32)
TYPES = {"float16": 10, "float64": 11, "int8": 3, "int32": 6, "int64": 7, "bool": 9}

CASTS = [
    *(Case("Cast", [NUMBERS], {"to": number}, opset=13) for number in TYPES.values()),
    *(Case("Cast", [whole(5)], {"to": to}) for to in (1, 7, 9, 10, 2)),
    *(Case("Cast", [FLAGS], {"to": to}) for to in (1, 6, 9)),
    Case("Cast", [floats(3, dtype="float16")], {"to": 1}),
    Case("Cast", [whole(5, dtype="int64", low=0)], {"to": 2}),
    Case("CastLike", [NUMBERS, whole(1, dtype="int64")], opset=15, reference=True),
    Case("Cast", [floats(3)], {"to": 16}, reference=True),
    Case("Cast", [floats(3).astype(ml_dtypes.bfloat16)], {"to": 1}, reference=True),
]

SYMBOLIC = [
    Case("Add", [floats(2, 3), floats(3)], symbolic={0: {0: "n"}}),
    Case("Mul", [floats(2, 3), floats(2, 1)], symbolic={0: {0: "n", 1: "m"}, 1: {0: "n"}}),
    Case("Sigmoid", [floats(2, 3)], symbolic={0: {0: "n", 1: "m"}}),
    Case("Where", [FLAGS, floats(3, 4), floats()], symbolic={0: {0: "n"}, 1: {0: "n"}}),
]


@pytest.mark.parametrize("case", [*BINARY, *UNARY, *CLIPS, *CASTS, *SYMBOLIC], ids=str)
def test_elementwise(case):
    check(case)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_remainder_of_zero_has_the_divisors_sign(dtype):
    dividends, divisors = np.array([6, 6, -6, -6], dtype), np.array([3, -3, 3, -3], dtype)
    model = make_model([node("Mod", "x y", "z")], {"x": (4,), "y": (4,)}, {"z": (4,)}, dtype=dtype)
    (result,) = onnx_backend.prepare(model, fallback=False).run([dividends, divisors])
    np.testing.assert_array_equal(np.signbit(result), np.signbit(np.mod(dividends, divisors)))
    np.testing.assert_array_equal(result, 0)
