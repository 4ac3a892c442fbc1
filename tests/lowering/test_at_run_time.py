"""Shapes, bounds, axes and counts that are inputs of the model."""

import numpy as np
import pytest
from harness import Case, check, floats, vector, whole

DATA = floats(3, 4, 5)


def scalar(number, dtype="int64"):
    """A tensor of rank 0."""
    return np.array(number, dtype)


RESHAPES = [
    Case("Reshape", [DATA, vector(12, 5)]),
    Case("Reshape", [DATA, vector(2, -1, 3)]),
    Case("Reshape", [DATA, vector(0, 0, -1)]),
    Case("Reshape", [DATA, vector(-1)], symbolic={0: {0: "n"}}),
    Case("Reshape", [DATA, vector(0, -1)], symbolic={0: {0: "n", 2: "m"}}),
    Case("Reshape", [floats(0, 3), vector(3, 0)], {"allowzero": 1}),
    Case("Squeeze", [floats(1, 3, 1, 4), vector(0, -2)]),
    Case("Squeeze", [floats(1, 3), vector(0)], symbolic={0: {1: "n"}}),
    Case("Unsqueeze", [DATA, vector(0, -1)]),
    Case("Unsqueeze", [DATA, vector(2)], symbolic={0: {1: "n"}}),
    Case("Unsqueeze", [floats(), vector(0)]),
    Case("Expand", [floats(3, 1), vector(2, 1, 4)]),
    Case("Expand", [floats(3, 1), vector(1, 1)]),
    Case("Expand", [floats(2, 3, 4), vector(3, 1)]),
    Case("Expand", [floats(1, 3), vector(4, 3)], symbolic={0: {0: "n"}}),
    Case("Expand", [floats(3), vector(0, 3)], reference=True),
    Case("Tile", [floats(2, 3), vector(2, 3)]),
    Case("Tile", [floats(2, 3), vector(1, 0)]),
    Case("Tile", [floats(0, 3), vector(2, 2)]),
    Case("Tile", [floats(2, 3), vector(3, 2)], symbolic={0: {0: "n"}}),
    Case("ConstantOfShape", [vector(2, 3)]),
    Case("ConstantOfShape", [vector(0, 3)]),
    Case("OneHot", [vector(1, 2, -1), scalar(4), floats(2)], {"axis": 0}),
    Case("OneHot", [vector(1, 2, -1), vector(4), floats(2)], {"axis": -1}),
]

RANGES = [
    Case("Range", [scalar(n, dtype) for n in numbers])
    for dtype, numbers in (
        ("int64", (0, 7, 2)),
        ("int32", (10, -3, -4)),
        ("int64", (3, 3, 1)),
        ("int64", (5, 3, 1)),
        ("float32", (0.5, 3.1, 0.7)),
        ("float32", (3.0, 0.5, -0.5)),
    )
] + [Case("Range", [scalar(0), scalar(9), scalar(2)], constants=[0, 2])]

SLICES = (
    [
        Case("Slice", [DATA, vector(1, -3), vector(3, 9), vector(0, 2)], constants=known)
        for known in ((), (3,), (1, 2))
    ]
    + [
        Case("Slice", [DATA, vector(-1), vector(-9), vector(1), vector(-2)], constants=known)
        for known in ((), (3, 4))
    ]
    + [
        Case("Slice", [DATA, vector(0, 1), vector(2, 3)]),
        Case("Slice", [DATA, vector(3), vector(1), vector(1)]),
        Case("Slice", [DATA, vector(-9), vector(2**62), vector(-1)]),
        Case("Slice", [DATA, vector(2), vector(-(2**62)), vector(2), vector(-1)]),
        Case("Slice", [floats(9, 4), vector(2), vector(-1)], symbolic={0: {0: "n"}}),
        Case("Slice", [DATA, whole(1), whole(1) + 20, whole(1) * 0], constants=[3]),
    ]
)

PADS = [
    Case("Pad", [DATA, vector(1, 0, 2, 0, 3, 1)], {"mode": mode}, 19)
    for mode in ("constant", "reflect", "edge", "wrap")
] + [
    Case("Pad", [DATA, vector(-1, 0, 2, 0, -2, 1)], {"mode": "constant"}),
    Case("Pad", [DATA, vector(1, 0, 2, 0, 3, 1), scalar(7, "float32")]),
    Case("Pad", [DATA, vector(1, 2, 0, 1), None, vector(-1, 1)], {"mode": "edge"}, 18),
    Case("Pad", [DATA, vector(1, 2, 0, 1), scalar(2, "float32"), vector(0, 2)], {}, 18, [1, 2]),
    Case("Pad", [DATA, vector(1, 0, 2, 0, 3, 1)], symbolic={0: {0: "n"}}),
]

REDUCTIONS = [
    Case(op, [DATA, vector(*axes)], {"keepdims": keep}, opset=18)
    for op, axes in (
        ("ReduceSum", (1,)),
        ("ReduceMean", (0, -1)),
        ("ReduceMax", (0, 1, 2)),
        ("ReduceProd", (2,)),
        ("ReduceLogSumExp", (-2,)),
        ("ReduceL2", (2, 0)),
    )
    for keep in (0, 1)
] + [
    Case("ReduceSum", [DATA, np.zeros(0, np.int64)]),
    Case("ReduceSum", [DATA, np.zeros(0, np.int64)], {"noop_with_empty_axes": 1}),
    Case("ReduceSum", [floats(2, 0, 3), vector(1)]),
    Case("ReduceSum", [floats(2, 0, 3), vector(0)], {"keepdims": 0}),
    Case("ReduceProd", [floats(2, 0), vector(1)], {"keepdims": 0}, 18, reference=True),
    Case("ReduceMin", [floats(3, 4), vector(0)], opset=18, symbolic={0: {0: "n"}}),
]

SCANS = [
    Case("CumSum", [DATA, scalar(axis)], {"exclusive": exclusive, "reverse": backwards})
    for axis, exclusive, backwards in ((0, 0, 0), (-2, 1, 0), (2, 0, 1), (1, 1, 1))
] + [
    Case("CumSum", [whole(3, 4, dtype="int64"), scalar(1)], symbolic={0: {0: "n"}}),
    Case("Trilu", [DATA, scalar(1)]),
    Case("Trilu", [DATA, scalar(-1)], {"upper": 0}),
]

PIECES = [
    Case("Split", [floats(2, 6), vector(1, 3, 2)], {"axis": 1}, outputs=3),
    Case("Split", [floats(6), vector(0, 6)], outputs=2),
    Case("TopK", [floats(3, 8), vector(3)], outputs=2),
    Case("TopK", [floats(3, 8), vector(2)], {"axis": 0, "largest": 0}, outputs=2),
]


PICTURE = floats(1, 2, 4, 6)
NONE, SCALES = None, np.array([1, 1, 1.5, 0.7], np.float32)
SIZES = vector(1, 2, 7, 3)
RESIZES = (
    [
        Case("Resize", [PICTURE, NONE, scales, sizes], {"mode": mode, **more}, opset=opset)
        for mode in ("nearest", "linear", "cubic")
        for scales, sizes, more, opset in (
            (SCALES, None, {}, 13),
            (SCALES, None, {"coordinate_transformation_mode": "asymmetric"}, 13),
            (None, SIZES, {}, 13),
            (None, vector(7, 3), {"axes": [2, 3]}, 19),
        )
    ]
    + [
        Case(
            "Resize",
            [PICTURE, None, None, vector(7, 10)],
            {"axes": [2, 3], "keep_aspect_ratio_policy": policy},
            opset=19,
        )
        for policy in ("not_larger", "not_smaller")
    ]
    + [
        Case(
            "Resize",
            [PICTURE, np.array([0, 0, 0.4, 0.6, 1, 1, 0.9, 1.2], np.float32), None, SIZES],
            {
                "mode": "linear",
                "coordinate_transformation_mode": "tf_crop_and_resize",
                "extrapolation_value": 9.0,
            },
            opset=13,
        ),
        Case("Resize", [PICTURE, SCALES], opset=10),
        Case(
            "Upsample", [PICTURE, np.array([1, 1, 2, 3], np.float32)], {"mode": "linear"}, opset=9
        ),
        Case("Resize", [PICTURE, NONE, SCALES], {"mode": "linear"}, 13, symbolic={0: {2: "h"}}),
    ]
)


@pytest.mark.parametrize(
    "case", [*RESHAPES, *RANGES, *SLICES, *PADS, *REDUCTIONS, *SCANS, *PIECES, *RESIZES], ids=str
)
def test_at_run_time(case):
    check(case)
