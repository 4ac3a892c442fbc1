import numpy as np
import onnx
import pytest
from harness import Case, assert_same, check, floats, lower_model, make_model, run_lowered, whole

SPARSE = (floats(3, 4, 5) > 1) * floats(3, 4, 5, seed=1)
FLAGS = np.array([True, False, False, True, True])

ROWS = [
    Case("NonZero", [SPARSE]),
    Case("NonZero", [SPARSE > 0]),
    Case("NonZero", [whole(7, low=0, high=2, dtype="int64")]),
    Case("NonZero", [np.zeros((2, 3), np.float32)]),
    Case("NonZero", [np.zeros((0, 3), np.float32)]),
    Case("NonZero", [np.array([np.nan, 0.0, -0.0, 1.0], np.float32)]),
    Case("NonZero", [SPARSE], symbolic={0: {0: "n", 2: "m"}}),
    Case("NonZero", [np.array(3.0, np.float32)], reference=True),
    *(
        Case("Compress", [floats(5, 3), FLAGS], {"axis": 0}, constants=constants)
        for constants in ((), (1,))
    ),
    Case("Compress", [floats(3, 6), FLAGS], {"axis": -1}),
    Case("Compress", [floats(3, 6), FLAGS]),
    Case("Compress", [floats(5, 2), np.zeros(5, bool)], {"axis": 0}),
]

REPEATED = whole(40, dtype="int64", low=-3, high=4)
UNIQUES = [
    Case("Unique", [data], {"sorted": ordered} | axis, outputs=4)
    for ordered in (0, 1)
    for data, axis in (
        (REPEATED, {}),
        (REPEATED.astype(np.float32), {}),
        (whole(4, 5, dtype="float32", low=0, high=3), {}),
        (whole(9, 2, dtype="int8", low=0, high=2), {"axis": 0}),
        (whole(2, 9, 2, dtype="float64", low=0, high=2), {"axis": 1}),
        (whole(3, 8, dtype="int64", low=0, high=2), {"axis": -1}),
        (np.array([5.0], np.float32), {}),
        (np.array([], np.float32), {}),
    )
] + [
    Case("Unique", [REPEATED]),
    Case("Unique", [REPEATED], symbolic={0: {0: "n"}}, outputs=2),
    Case("Unique", [np.arange(100, 0, -1)], outputs=3),
]


def boxes(pictures, count, seed=0):
    """Corners of random boxes, in any order of the corners."""
    centers = floats(pictures, count, 2, seed=seed)
    radii = floats(pictures, count, 2, seed=seed + 1) * 0.4
    return np.concatenate([centers - radii, centers + radii], 2)


def suppression(pictures, classes, count, *numbers, known=True, **attributes):
    """A case with the limit, the overlap and perhaps the score threshold in ``numbers``."""
    scores = np.round(floats(pictures, classes, count, seed=5), 1)
    types = (np.int64, np.float32, np.float32)
    given = [np.array([n], t) for n, t in zip(numbers, types[: len(numbers)], strict=True)]
    return Case(
        "NonMaxSuppression",
        [boxes(pictures, count), scores, *given],
        attributes,
        opset=11,
        constants=range(2, 2 + len(given)) if known else (),
    )


SUPPRESSIONS = [
    suppression(2, 3, 30, 10, 0.3, 0.1),
    suppression(1, 2, 30, 4, 0.0, known=False),
    suppression(1, 1, 30, 1000, 0.5, -5.0),
    suppression(1, 1, 30, 0, 0.5, 0.5),
    suppression(1, 1, 30),
    suppression(1, 1, 30, 5, 0.5, 50.0),
    suppression(2, 1, 20, 20, 0.2, 0.0, center_point_box=1),
]

DETERMINANTS = [
    Case("Det", [floats(3, 3)]),
    Case("Det", [floats(2, 4, 5, 5)]),
    Case("Det", [np.array([[0, 2], [3, 4]], np.float32)]),
    Case("Det", [np.ones((2, 2), np.float32)]),
    Case("Det", [floats(6, 1, 1)], symbolic={0: {0: "n"}}),
]


@pytest.mark.parametrize("case", [*ROWS, *UNIQUES, *SUPPRESSIONS, *DETERMINANTS], ids=str)
def test_data_dependent(case):
    check(case)


def test_nan_are_one_group_at_the_end():
    data = np.array([np.nan, 1.0, np.nan, 0.0], np.float32)
    case = Case("Unique", [data], outputs=4)
    got = run_lowered(lower_model(make_model(case)), [data])
    wanted = np.unique(data, True, True, True)
    for left, right in zip(got, wanted, strict=True):
        assert_same(left, np.asarray(right), 0)


def test_rows_of_a_run_time_size_feed_other_operators():
    model = onnx.parser.parse_model("""
        <ir_version: 8, opset_import: ["": 17]>
        rows (float[4, 6] x, float[4, 6] bias) => (float[N] y, int64[] count) {
            sum = Add(x, bias)
            places = NonZero(x)
            turned = Transpose(places)
            picked = GatherND(sum, turned)
            y = Relu(picked)
            shape = Shape(y)
            count = Size(y)
        }
    """)
    lowered = lower_model(onnx.shape_inference.infer_shapes(model))
    for threshold in (0.0, 1.0, 3.0):
        x = floats(4, 6) * (floats(4, 6) > threshold)
        y, count = run_lowered(lowered, [x, floats(4, 6, seed=2)])
        wanted = np.maximum((x + floats(4, 6, seed=2))[np.nonzero(x)], 0)
        assert_same(y, wanted, 1e-6)
        assert count == wanted.size
