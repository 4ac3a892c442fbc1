import numpy as np
import pytest
from harness import Case, check, floats, vector, whole
from onnx import numpy_helper

DATA = floats(5, 4, 3)

GATHERS = [
    Case("Gather", [DATA, vector(0, -1, 3)]),
    Case("Gather", [DATA, vector(0, -1, 3)], constants=[1]),
    Case("Gather", [DATA, np.array([[0, 1], [2, -4]])], {"axis": 1}, constants=[1]),
    Case("Gather", [DATA, np.array(-2)], {"axis": -1}, constants=[1]),
    Case("Gather", [DATA, np.array(1)], {"axis": 1}),
    Case("Gather", [DATA, np.array([[2]], np.int32)], constants=[1]),
    Case("Gather", [whole(5, dtype="int64"), vector(4, 4)], opset=7),
    Case("Gather", [floats(9, 4), vector(1, 8, -9)], constants=[0]),
    Case("Gather", [DATA, np.array(-1)], constants=[1], symbolic={0: {0: "n"}}),
    Case("Gather", [DATA, vector(0, -1)], symbolic={0: {0: "n"}, 1: {0: "m"}}),
    Case("GatherElements", [floats(3, 3), np.array([[1, -2, 0], [2, 0, -3]])], {"axis": 0}),
    Case("GatherElements", [floats(3, 4), np.array([[1, 2], [-1, 0], [3, 3]])], {"axis": -1}),
    Case("GatherND", [DATA, np.array([[0, 1], [-1, -1]])]),
    Case("GatherND", [DATA, np.array([[[0, 1, 2]], [[4, 3, -1]]])]),
    Case("GatherND", [DATA, np.array([[1], [0], [3], [-1], [2]])], {"batch_dims": 1}),
    Case("GatherND", [DATA, np.array([[4]])], constants=[1]),
]

SCATTERS = [
    Case(
        "ScatterElements",
        [floats(3, 3), np.array([[1, 0, 2], [0, 2, -2]]), floats(2, 3)],
        {"reduction": reduction},
        opset=18,
    )
    for reduction in ("none", "add", "mul", "max", "min")
] + [
    Case("ScatterElements", [floats(2, 5), np.array([[1, -2]]), floats(1, 2)], {"axis": 1}),
    Case("Scatter", [floats(2, 5), np.array([[1, 3]]), floats(1, 2)], {"axis": 1}, opset=9),
    Case("ScatterND", [floats(6), np.array([[4], [-6]]), floats(2)]),
    Case("ScatterND", [DATA, np.array([[0], [3]]), floats(2, 4, 3)]),
    Case("ScatterND", [DATA, np.array([[0, -1], [3, 1]]), floats(2, 3)]),
    Case("ScatterND", [DATA, np.array([[0, 1], [0, 1]]), floats(2, 3)], {"reduction": "add"}),
    Case("Compress", [floats(3, 4), np.array([False, True, True])], {"axis": 0}, constants=[1]),
    Case("Compress", [floats(3, 4), np.array([True, False, True])], constants=[1]),
]


def value(array):
    return {"value": numpy_helper.from_array(np.asarray(array))}


CREATIONS = [
    Case("Constant", [], value(floats(2, 3))),
    Case("Constant", [], value(whole(2, dtype="int64"))),
    Case("Constant", [], {"value_float": 2.5}),
    Case("Constant", [], {"value_floats": [2.5, 1.0]}),
    Case("Constant", [], {"value_int": 3}),
    Case("Constant", [], {"value_ints": [3, 4, 5]}),
    Case("ConstantOfShape", [vector(2, 3)], constants=[0]),
    Case("ConstantOfShape", [vector(2, 3)], value(np.array([7], np.int64)), constants=[0]),
    Case("ConstantOfShape", [vector(4)], value(np.array([True])), constants=[0]),
    Case("ConstantOfShape", [np.zeros(0, np.int64)], constants=[0]),
    *(
        Case("Range", [np.array(n, dtype) for n in numbers], constants=[0, 1, 2])
        for dtype, numbers in (
            ("int64", (0, 7, 1)),
            ("int32", (10, -3, -4)),
            ("float32", (0.5, 3.1, 0.7)),
            ("int64", (3, 3, 1)),
        )
    ),
    *(
        Case(
            "OneHot", [np.array(indices), np.array(depth), floats(2)], {"axis": axis}, constants=[1]
        )
        for indices, depth, axis in (
            ([0, 2, -1, 7], 4, -1),
            ([[1, 2], [3, 0]], 5, 0),
            ([[1, 2], [3, 0]], 5, 1),
        )
    ),
    Case("OneHot", [floats(3) * 0 + 1, vector(3), vector(7, 8)], constants=[1, 2]),
    Case("EyeLike", [floats(3, 4)]),
    Case("EyeLike", [floats(3, 4)], {"k": -1, "dtype": 7}),
]


@pytest.mark.parametrize("case", [*GATHERS, *SCATTERS, *CREATIONS], ids=str)
def test_indexing(case):
    check(case)
