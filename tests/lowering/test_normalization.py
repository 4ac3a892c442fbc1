from dataclasses import replace

import pytest
from harness import Case, check, floats

IMAGE = floats(2, 4, 5, 6)
SCALE, BIAS, MEAN = (floats(4, seed=i) for i in range(3))
VARIANCE = floats(4, low=0.1)


def batch(shape, constants, attributes=None, opset=15, dtype="float32"):
    statistics = [array.astype(dtype) for array in (SCALE, BIAS, MEAN, VARIANCE)]
    arrays = [floats(*shape, dtype=dtype), *statistics]
    return Case("BatchNormalization", arrays, attributes or {}, opset=opset, constants=constants)


BATCH = [
    batch((2, 4, 5, 6), [1, 2, 3, 4]),
    batch((2, 4, 5, 6), []),
    batch((2, 4, 5, 6), [1, 2], {"epsilon": 0.1}),
    batch((2, 4), [1, 2, 3, 4], opset=9),
    batch((2, 4, 3), [1, 2, 3, 4], opset=7),
    batch((2, 4, 3, 2, 2), [1, 2, 3, 4], opset=14),
    batch((2, 4, 3), [1, 2, 3, 4], dtype="float64"),
]

TRAINING = [
    replace(batch(shape, constants, {"training_mode": 1, **more}, opset, dtype), outputs=3)
    for shape, constants, more, opset, dtype in (
        ((2, 4, 5, 6), [], {}, 15, "float32"),
        ((2, 4, 5, 6), [1, 2, 3, 4], {"momentum": 0.3, "epsilon": 0.1}, 14, "float32"),
        ((3, 4), [], {}, 15, "float32"),
        ((3, 4, 2, 3, 2), [1], {"momentum": 1.0}, 15, "float64"),
        ((8, 4, 3), [], {}, 15, "float16"),
    )
]
TRAINING = [
    *(replace(case, reference=True) for case in TRAINING),
    replace(batch((2, 4, 5), [], {"training_mode": 1}), reference=True),
    replace(TRAINING[0], symbolic={0: {0: "n", 2: "h"}}),
]

LAYERS = [
    Case("LayerNormalization", [floats(2, 3, 8) + 50, floats(8), floats(8, seed=1)], constants=[1]),
    Case("LayerNormalization", [floats(2, 3, 8), floats(8)], {"epsilon": 0.1}),
    Case("LayerNormalization", [floats(2, 3, 8), floats(3, 8)], {"axis": 1}),
    Case("LayerNormalization", [floats(2, 3, 8), floats(2, 3, 8)], {"axis": -3}),
    Case("LayerNormalization", [floats(2, 3, 8), floats(8)], outputs=3),
    Case("LayerNormalization", [floats(2, 8, dtype="float16"), floats(8, dtype="float16")]),
    Case("LayerNormalization", [floats(2, 3, 8), floats(8)], symbolic={0: {0: "n", 1: "m"}}),
    Case("RMSNormalization", [floats(2, 3, 8), floats(8)], opset=23, reference=True),
    Case("RMSNormalization", [floats(2, 3, 8), floats(3, 8)], {"axis": 1}, opset=23),
]

OTHERS = [
    Case("InstanceNormalization", [IMAGE + 20, SCALE, BIAS], constants=[1, 2]),
    Case("InstanceNormalization", [floats(2, 4, 7), SCALE, BIAS], {"epsilon": 0.2}),
    Case("InstanceNormalization", [IMAGE, SCALE, BIAS], symbolic={0: {2: "h", 3: "w"}}),
    Case(
        "GroupNormalization",
        [IMAGE, floats(2), floats(2, seed=1)],
        {"num_groups": 2},
        opset=18,
        reference=True,
    ),
    Case("GroupNormalization", [IMAGE, SCALE, BIAS], {"num_groups": 2}, opset=21, reference=True),
    Case("GroupNormalization", [IMAGE, SCALE, BIAS], {"num_groups": 4, "epsilon": 0.1}, opset=21),
    *(
        Case("LpNormalization", [floats(3, 4, 2)], {"axis": axis, "p": p})
        for axis in (-1, 0, 1)
        for p in (1, 2)
    ),
    Case("LpNormalization", [floats(3, 4) * 0]),
    *(Case("LRN", [floats(2, 7, 3, 3) * 5], {"size": size}) for size in (1, 3, 5)),
    Case("LRN", [floats(7, 7, 3, 3) * 5], {"size": 4, "alpha": 0.3}, reference=True),
    Case("LRN", [floats(2, 7, 3, 3) * 5], {"size": 5, "alpha": 0.3, "beta": 0.6, "bias": 2.0}),
    Case("LRN", [floats(2, 7, 3, 3) * 5], {"size": 15, "alpha": 0.3}),
    Case("LRN", [floats(2, 7, 3, 3)], {"size": 5}, symbolic={0: {0: "n", 2: "h", 3: "w"}}),
    Case("MeanVarianceNormalization", [IMAGE + 9]),
    Case("MeanVarianceNormalization", [IMAGE], {"axes": [0, -1]}, reference=True),
]


@pytest.mark.parametrize("case", [*BATCH, *TRAINING, *LAYERS, *OTHERS], ids=str)
def test_normalization(case):
    check(case)
