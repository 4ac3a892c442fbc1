import numpy as np
import pytest
from harness import Case, check, floats, vector, whole

CASTS = [
    Case("BitCast", [floats(2, 3)], {"to": 6}, 26, reference=True),
    Case("BitCast", [whole(5, dtype="int64")], {"to": 11}, 26, reference=True),
    Case("BitCast", [whole(5, dtype="int8")], {"to": 2}, 26, reference=True),
    Case("BitCast", [floats(2, 3, dtype="float16")], {"to": 5}, 26, reference=True),
    Case("BitCast", [np.array([True, False])], {"to": 2}, 26, reference=True),
    Case("BitCast", [floats(3)], {"to": 1}, 26, reference=True),
]

PRODUCTS = [
    Case(
        "CumProd",
        [data, np.array(axis)],
        {"exclusive": exclusive, "reverse": reverse},
        26,
        [1],
        reference=True,
    )
    for data, axis in ((floats(2, 3, 4), 1), (floats(5), 0), (whole(3, 4, low=1, high=3), -1))
    for exclusive, reverse in ((0, 0), (0, 1), (1, 0), (1, 1))
] + [
    Case(
        "CumProd", [floats(2, 3), np.array(0)], {}, 26, [1], symbolic={0: {0: "n"}}, reference=True
    )
]

CACHE, PIECE = floats(2, 3, 6, 4), floats(2, 3, 2, 4, seed=1)
SCATTERS = [
    Case("TensorScatter", [CACHE, PIECE, vector(1, 4)], {}, 24, reference=True),
    Case("TensorScatter", [CACHE, PIECE], {}, 24, reference=True),
    Case("TensorScatter", [CACHE, PIECE, vector(5, 2)], {"mode": "circular"}, 24, reference=True),
    Case(
        "TensorScatter",
        [floats(2, 6, 4), floats(2, 2, 4), vector(0, 3)],
        {"axis": 1},
        24,
        reference=True,
    ),
]


@pytest.mark.parametrize("case", [*CASTS, *PRODUCTS, *SCATTERS], ids=str)
def test_recent(case):
    check(case)
