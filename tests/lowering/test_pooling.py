import pytest
from harness import Case, check, floats, whole

IMAGE = floats(2, 3, 9, 8)

WINDOWS = [
    {"kernel_shape": [2, 2]},
    {"kernel_shape": [3, 2], "strides": [2, 3]},
    {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 1, 1]},
    {"kernel_shape": [3, 4], "strides": [2, 1], "pads": [0, 1, 2, 3]},
    {"kernel_shape": [3, 3], "strides": [2, 2], "auto_pad": "SAME_UPPER"},
    {"kernel_shape": [2, 3], "strides": [2, 2], "auto_pad": "SAME_LOWER"},
    {"kernel_shape": [2, 3], "strides": [2, 2], "auto_pad": "VALID"},
]
ROUNDED_UP = [
    {"kernel_shape": [2, 3], "strides": [2, 2], "ceil_mode": 1},
    {"kernel_shape": [3, 3], "strides": [2, 3], "pads": [1, 1, 1, 1], "ceil_mode": 1},
    {"kernel_shape": [2, 2], "strides": [4, 5], "pads": [1, 1, 1, 1], "ceil_mode": 1},
    {"kernel_shape": [1, 1], "strides": [3, 3], "ceil_mode": 1},
    {"kernel_shape": [3, 4], "strides": [2, 3], "ceil_mode": 1, "auto_pad": "SAME_UPPER"},
]
DILATED = [
    {"kernel_shape": [3, 2], "dilations": [2, 3]},
    {"kernel_shape": [2, 3], "dilations": [3, 2], "strides": [2, 2], "pads": [1, 2, 1, 2]},
    {"kernel_shape": [3, 2], "dilations": [2, 2], "strides": [3, 2], "ceil_mode": 1},
]

MAXIMA = [
    *(Case("MaxPool", [IMAGE], window, opset=12) for window in WINDOWS + ROUNDED_UP + DILATED),
    Case("MaxPool", [-abs(IMAGE)], WINDOWS[2], opset=8),
    Case("MaxPool", [floats(2, 3, 9)], {"kernel_shape": [3], "strides": [2], "pads": [1, 0]}),
    Case("MaxPool", [floats(1, 2, 5, 6, 7)], {"kernel_shape": [2, 3, 2], "strides": [2, 1, 2]}),
    Case("MaxPool", [whole(1, 2, 6, 6, dtype="int8")], WINDOWS[2], opset=12),
    Case("MaxPool", [whole(1, 2, 6, 6, dtype="uint8", low=0)], WINDOWS[2], opset=12),
    Case("MaxPool", [floats(1, 2, 6, 6, dtype="float64")], WINDOWS[2]),
    Case("MaxPool", [IMAGE], WINDOWS[2], symbolic={0: {0: "n", 2: "h", 3: "w"}}),
]

AVERAGES = [
    *(
        Case("AveragePool", [IMAGE], {**window, "count_include_pad": include}, opset=opset)
        for window in WINDOWS
        for include in (0, 1)
        for opset in (11,)
    ),
    *(
        Case("AveragePool", [IMAGE], {**window, "count_include_pad": include}, opset=19)
        for window in ROUNDED_UP + DILATED
        for include in (0, 1)
    ),
    Case("AveragePool", [IMAGE], WINDOWS[2], opset=7),
    Case("AveragePool", [floats(2, 3, 9)], {"kernel_shape": [3], "pads": [1, 0]}),
    Case("AveragePool", [floats(1, 2, 5, 6, 7)], {"kernel_shape": [2, 3, 2], "pads": [1] * 6}),
    Case("AveragePool", [floats(1, 2, 6, 6, dtype="float16")], WINDOWS[2], reference=True),
    Case("AveragePool", [IMAGE], WINDOWS[2], symbolic={0: {0: "n", 2: "h", 3: "w"}}),
    Case("AveragePool", [IMAGE], WINDOWS[1], symbolic={0: {2: "h", 3: "w"}}),
]

NORMS = [
    *(Case("LpPool", [IMAGE], {**window, "p": p}) for window in WINDOWS[:4] for p in (1, 2, 3)),
    *(Case("LpPool", [IMAGE], window, opset=18) for window in ROUNDED_UP[:2] + DILATED[:2]),
]

GLOBAL = [
    *(
        Case(f"Global{kind}Pool", [floats(*shape)])
        for kind in ("Average", "Max", "Lp")
        for shape in ((2, 3, 4, 5), (2, 3, 7), (1, 2, 3, 2, 2))
    ),
    Case("GlobalLpPool", [IMAGE], {"p": 1}),
    Case("GlobalLpPool", [IMAGE], {"p": 3}),
    Case("GlobalAveragePool", [IMAGE], symbolic={0: {0: "n", 2: "h", 3: "w"}}),
    Case("GlobalMaxPool", [IMAGE], symbolic={0: {0: "n", 2: "h", 3: "w"}}),
]


@pytest.mark.parametrize("case", [*MAXIMA, *AVERAGES, *NORMS, *GLOBAL], ids=str)
def test_pooling(case):
    check(case)
