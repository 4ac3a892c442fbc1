import numpy as np
import pytest
from harness import (
    Case,
    check,
    floats,
    lower_model,
    make_model,
    run_lowered,
    vector,
    whole,
)

DATA = floats(2, 3, 4)
END = 2**63 - 1


def constant_inputs(op, data, *others, **options):
    attributes = options.pop("attributes", {})
    constants = [i + 1 for i, other in enumerate(others) if other is not None]
    return Case(op, [data, *others], attributes, constants=constants, **options)


def reshape(data, *shape, **options):
    return constant_inputs("Reshape", data, vector(*shape), **options)


RESHAPES = [
    reshape(DATA, 6, 4),
    reshape(DATA, 0, -1),
    reshape(DATA, -1),
    reshape(DATA, 4, 0, 2),
    reshape(DATA, 2, 3, 2, 2, opset=7),
    reshape(floats(1), opset=13),
    reshape(floats(), 1, 1),
    reshape(floats(2, 0, 3), 0, 0, 1, 3),
    reshape(floats(0, 3), 3, 0, attributes={"allowzero": 1}),
    reshape(DATA, 0, -1, symbolic={0: {0: "n"}}),
    reshape(DATA, 0, 0, 2, -1, symbolic={0: {0: "n", 1: "m"}}),
    reshape(DATA, -1, 4, symbolic={0: {0: "n", 1: "m"}}),
    reshape(DATA, -1, 2, symbolic={0: {0: "n", 1: "m"}}),
    *(Case("Flatten", [DATA], {"axis": axis}, opset=11) for axis in (0, 1, 2, 3, -1)),
    Case("Flatten", [floats()], {"axis": 0}),
    Case("Flatten", [DATA], symbolic={0: {0: "n", 2: "m"}}),
    Case("Squeeze", [floats(1, 3, 1)], opset=11),
    Case("Squeeze", [floats(1, 3, 1)], {"axes": [-1]}, opset=11),
    constant_inputs("Squeeze", floats(1, 3, 1), vector(0, 2), opset=13),
    Case("Squeeze", [floats(1, 3, 1)], opset=13),
    Case("Squeeze", [floats(1, 3, 1)], {"axes": [0]}, opset=9, symbolic={0: {1: "n"}}),
    Case("Unsqueeze", [DATA], {"axes": [0, 4]}, opset=9),
    constant_inputs("Unsqueeze", DATA, vector(-1, 1), opset=13),
    constant_inputs("Unsqueeze", floats(), vector(0), opset=13),
    Case("Transpose", [DATA]),
    Case("Transpose", [DATA], {"perm": [2, 0, 1]}),
    Case("Transpose", [whole(2, 3, dtype="int64")], symbolic={0: {0: "n"}}),
    Case("Transpose", [floats()]),
]

JOINS = [
    Case("Concat", [DATA, floats(2, 5, 4)], {"axis": 1}),
    Case("Concat", [DATA, DATA, floats(2, 3, 1)], {"axis": -1}),
    Case("Concat", [DATA], {"axis": 0}),
    Case("Concat", [floats(2, 0), floats(2, 3)], {"axis": 1}),
    Case("Concat", [floats(2, 3) > 0, floats(1, 3) > 0], {"axis": 0}),
    Case("Concat", [DATA, DATA], {"axis": 1}, symbolic={0: {0: "n", 1: "a"}, 1: {0: "n"}}),
    Case("Split", [floats(6, 4)], opset=7, outputs=3),
    Case("Split", [floats(6, 4)], {"split": [1, 3], "axis": -1}, opset=11, outputs=2),
    constant_inputs("Split", floats(6, 4), vector(1, 2, 3), opset=13, outputs=3),
    constant_inputs("Split", floats(6, 4), vector(0, 6), opset=13, outputs=2),
    Case("Split", [floats(7, 4)], {"num_outputs": 3}, opset=18, outputs=3),
    Case("Split", [floats(6, 4)], {"axis": 1}, opset=13, outputs=2, symbolic={0: {0: "n"}}),
]


def slice_of(data, starts, ends, axes=None, steps=None, **options):
    others = [
        None if numbers is None else vector(*numbers) for numbers in (starts, ends, axes, steps)
    ]
    while others[-1] is None:
        others.pop()
    return constant_inputs("Slice", data, *others, **options)


SLICES = [
    Case("Slice", [floats(5, 6)], {"starts": [1, -3], "ends": [4, 100]}, opset=9),
    Case("Slice", [floats(5, 6)], {"starts": [-100], "ends": [-1], "axes": [1]}, opset=7),
    slice_of(floats(5, 6), [1, 0], [3, 6], opset=10),
    slice_of(floats(5, 6), [1], [END], [-1], [2]),
    slice_of(floats(5, 6), [-1, 4], [-END, 1], [1, 0], [-1, -2]),
    slice_of(floats(5, 6), [-2], [-END], [0], [-2]),
    slice_of(floats(5, 6), [3], [3], [0]),
    slice_of(floats(5, 6), [9], [20], [0]),
    slice_of(floats(5, 6), [20], [0], [0], [-3]),
    slice_of(floats(5, 6), [0], [-END], [0], [-1]),
    slice_of(whole(5, dtype="int64"), [0], [2]),
    slice_of(floats(5, 6), [1], [END], [0], symbolic={0: {0: "n"}}),
    slice_of(floats(5, 6), [0], [-2], [0], symbolic={0: {0: "n"}}),
    slice_of(floats(5, 6), [0], [9], [0], symbolic={0: {0: "n"}}),
    slice_of(floats(5, 6), [-2], [END], [0], symbolic={0: {0: "n"}}),
    slice_of(floats(5, 6), [-1], [-END], [0], [-1], symbolic={0: {0: "n"}}),
    slice_of(floats(5, 6), [0], [END], [0], [2], symbolic={0: {0: "n"}}),
]

PADS = [
    Case("Pad", [floats(3, 4)], {"pads": [1, 0, 2, 1], "value": 1.5}, opset=7),
    Case("Pad", [floats(3, 4)], {"pads": [0, -1, 0, 2], "mode": "edge"}, opset=7),
    constant_inputs("Pad", floats(3, 4), vector(1, 0, 2, 1), np.array(1.5, np.float32)),
    constant_inputs("Pad", floats(3, 4), vector(-1, 2, 0, -2)),
    Case("Pad", [floats(3, 4), vector(1, 0, 2, 1), floats()], constants=[1]),
    *(
        constant_inputs(
            "Pad", floats(3, 4), vector(2, 1, 1, 3), attributes={"mode": mode}, opset=19
        )
        for mode in ("reflect", "edge", "wrap")
    ),
    constant_inputs("Pad", floats(3, 6), vector(0, -1, 0, 2), attributes={"mode": "reflect"}),
    constant_inputs("Pad", floats(3, 4), vector(1, 2), None, vector(-1), opset=18),
    constant_inputs("Pad", whole(3, 4), vector(1, 0, 2, 1), np.array(7, np.int32)),
    constant_inputs("Pad", floats(3, 4), vector(1, 0, 2, 1), symbolic={0: {0: "n", 1: "m"}}),
    constant_inputs(
        "Pad",
        floats(5, 4),
        vector(2, 0, 1, 1),
        attributes={"mode": "reflect"},
        symbolic={0: {0: "n", 1: "m"}},
    ),
]

SPACE = [
    Case("DepthToSpace", [floats(2, 8, 2, 3)], {"blocksize": 2}, opset=11),
    Case("DepthToSpace", [floats(2, 8, 2, 3)], {"blocksize": 2, "mode": "CRD"}),
    Case("DepthToSpace", [floats(1, 9, 2, 3)], {"blocksize": 3}, symbolic={0: {2: "h", 3: "w"}}),
    Case("SpaceToDepth", [floats(2, 3, 4, 6)], {"blocksize": 2}),
    constant_inputs("Expand", floats(3, 1), vector(2, 1, 4)),
    constant_inputs("Expand", floats(3, 1), vector(1)),
    constant_inputs("Expand", floats(), vector(2, 3)),
    constant_inputs("Expand", floats(3, 1), vector(1, 4), symbolic={0: {0: "n"}}),
    constant_inputs("Tile", floats(2, 3), vector(2, 3)),
    constant_inputs("Tile", floats(2, 3), vector(1, 0)),
    constant_inputs("Tile", floats(2, 3), vector(1, 2), symbolic={0: {0: "n", 1: "m"}}),
    *(
        Case(
            "ReverseSequence",
            [floats(4, 4, 2), vector(1, 2, 3, 4)],
            {"time_axis": time, "batch_axis": 1 - time},
        )
        for time in (0, 1)
    ),
    *(Case("Trilu", [floats(2, 3, 4)], {"upper": upper}) for upper in (0, 1)),
    *(
        constant_inputs("Trilu", floats(3, 4), np.array(k), attributes={"upper": upper})
        for k in (-1, 2)
        for upper in (0, 1)
    ),
]


def top_k(data, count, **options):
    return constant_inputs("TopK", data, vector(count), outputs=2, **options)


TOPS = [
    top_k(floats(3, 5), 2),
    top_k(floats(3, 5), 2, attributes={"axis": 0, "largest": 0}),
    top_k(whole(4, 9, low=0, high=3), 5),
    top_k(whole(4, 9, dtype="int64", low=0, high=3), 5, attributes={"largest": 0}),
    top_k(floats(2, 5, dtype="float64"), 5, attributes={"axis": 1}),
    Case("TopK", [floats(2, 5)], {"k": 3}, opset=9, outputs=2),
]


@pytest.mark.parametrize("case", [*RESHAPES, *JOINS, *SLICES, *PADS, *SPACE, *TOPS], ids=str)
def test_movement(case):
    check(case)


@pytest.mark.parametrize("largest", [0, 1])
def test_the_greatest_integers_are_sorted_as_such(largest):
    data = np.array([5, 2**63 + 1, 0, 2**64 - 1, 2**63 - 1, 2**63], np.uint64)
    case = top_k(data, 4, attributes={"largest": largest})
    values, places = run_lowered(lower_model(make_model(case)), [data])
    order = np.argsort(data)[::-1] if largest else np.argsort(data)
    np.testing.assert_array_equal(places, order[:4])
    np.testing.assert_array_equal(values, data[order[:4]])
    assert values.dtype == np.uint64
