import numpy as np
import pytest
from harness import Case, check, floats, vector, whole

DATA = floats(2, 3, 4)
POSITIVE = floats(2, 3, 4, low=0.1)
REDUCTIONS = ("Sum", "Mean", "Max", "Min", "Prod", "L1", "L2", "LogSum", "LogSumExp", "SumSquare")
EMPTY = vector()


def data_of(name):
    return POSITIVE if name == "LogSum" else DATA


REDUCE = [
    *(Case(f"Reduce{name}", [data_of(name)], opset=11) for name in REDUCTIONS),
    *(
        Case(f"Reduce{name}", [data_of(name)], {"axes": [-1, 0], "keepdims": 0}, opset=11)
        for name in REDUCTIONS
    ),
    *(
        Case(f"Reduce{name}", [data_of(name), vector(-2)], opset=18, constants=[1])
        for name in REDUCTIONS
    ),
    *(
        Case(f"Reduce{name}", [data_of(name), EMPTY], {"keepdims": 0}, opset=18, constants=[1])
        for name in REDUCTIONS
    ),
    *(
        Case(
            f"Reduce{name}", [POSITIVE, EMPTY], {"noop_with_empty_axes": 1}, opset=18, constants=[1]
        )
        for name in ("Sum", "Mean", "Max", "Prod")
    ),
    Case("ReduceSum", [DATA, vector(1)], opset=13, constants=[1]),
    Case("ReduceSum", [DATA], opset=13),
    *(
        Case(f"Reduce{name}", [whole(3, 4, dtype=dtype)], {"axes": [1]}, opset=13)
        for name in ("Max", "Min", "Prod")
        for dtype in ("int32", "int64")
    ),
    Case("ReduceSum", [whole(3, 4), vector(0)], opset=13, constants=[1]),
    Case("ReduceMax", [whole(3, 4, dtype="uint8", low=0)], {"axes": [1]}, opset=13),
    Case("ReduceSum", [floats(3, 4, dtype="float64"), vector(0)], opset=13, constants=[1]),
    Case("ReduceSum", [floats(3, 400, dtype="float16"), vector(1)], constants=[1], reference=True),
    Case("ReduceMax", [floats(3, 4) > 0, vector(1)], opset=20, constants=[1]),
    Case("ReduceMin", [floats(3, 4) > 0, vector(1)], opset=20, constants=[1]),
    *(
        Case(f"Reduce{name}", [floats()], opset=13)
        for name in ("Sum", "Mean", "Max", "L2", "LogSumExp", "SumSquare")
    ),
    *(
        Case(f"Reduce{name}", [floats(2, 0, 3), vector(1)], opset=20, constants=[1], reference=True)
        for name in ("Sum", "Prod", "Max", "Min", "L1", "L2", "SumSquare", "LogSum", "LogSumExp")
    ),
    Case("ReduceLogSumExp", [floats(3, 4) * 100], {"axes": [1]}, opset=13),
]

TIES = np.array([[1, 3, 3, 0], [2, 2, 2, 2]], np.float32)
EXTREMA = [
    Case(op, [array], {"axis": axis, "keepdims": keep, "select_last_index": last})
    for op in ("ArgMax", "ArgMin")
    for array in (TIES, whole(3, 4, low=0, high=3))
    for axis, keep, last in ((0, 1, 0), (-1, 0, 1), (1, 1, 1), (1, 0, 0))
] + [Case("ArgMax", [floats(5)]), Case("ArgMax", [floats(2, 3, 4)], opset=11)]

CUMULATIVE = [
    Case("CumSum", [DATA, np.array(axis)], {"exclusive": e, "reverse": r}, constants=[1])
    for axis in (0, -1)
    for e in (0, 1)
    for r in (0, 1)
] + [Case("CumSum", [whole(5, dtype="int64"), np.array([0])], constants=[1])]

SOFTMAX = [
    *(Case(op, [DATA], opset=11) for op in ("Softmax", "LogSoftmax", "Hardmax")),
    *(Case(op, [DATA], {"axis": 0}, opset=9) for op in ("Softmax", "LogSoftmax", "Hardmax")),
    *(Case(op, [DATA], {"axis": -1}, opset=11) for op in ("Softmax", "LogSoftmax", "Hardmax")),
    *(Case(op, [DATA], opset=13) for op in ("Softmax", "LogSoftmax", "Hardmax")),
    *(Case(op, [DATA], {"axis": 1}, opset=13) for op in ("Softmax", "LogSoftmax", "Hardmax")),
    *(Case(op, [TIES], {"axis": 1}, opset=13) for op in ("Softmax", "LogSoftmax", "Hardmax")),
    Case("Softmax", [floats(5)], {"axis": 0}, opset=13),
    Case("Softmax", [DATA * 100], opset=13),
    Case("Softmax", [floats(2, 5, dtype="float64")], opset=13),
    Case("Softmax", [floats(2, 5, dtype="float16")], opset=13),
    Case("Softmax", [floats(2, 3, 4, 5)], {"axis": 1}, opset=7),
]

SYMBOLIC = [
    Case("ReduceMean", [DATA], {"axes": [1]}, opset=13, symbolic={0: {0: "n", 1: "m"}}),
    Case("Softmax", [DATA], {"axis": 1}, opset=13, symbolic={0: {0: "n", 1: "m"}}),
    Case("Softmax", [DATA], {"axis": 1}, opset=11, symbolic={0: {0: "n", 1: "m"}}),
    Case("ArgMax", [DATA], {"axis": -1}, symbolic={0: {0: "n", 2: "m"}}),
    Case("CumSum", [DATA, np.array(1)], constants=[1], symbolic={0: {0: "n", 1: "m"}}),
]


@pytest.mark.parametrize("case", [*REDUCE, *EXTREMA, *CUMULATIVE, *SOFTMAX, *SYMBOLIC], ids=str)
def test_reduction(case):
    check(case)
