import numpy as np
import pytest
from harness import Case, check, floats

REAL, COMPLEX = floats(2, 10, 1), floats(2, 10, 2)


def scalar(number, dtype="int64"):
    """A tensor of rank 0."""
    return np.array(number, dtype)


TRANSFORMS = [
    Case("DFT", [REAL], {}, 17, reference=True),
    Case("DFT", [COMPLEX], {"inverse": 1}, 17, reference=True),
    Case("DFT", [REAL], {"onesided": 1}, 17, reference=True),
    Case("DFT", [floats(2, 3, 7, 2)], {"axis": 2}, 17, reference=True),
    Case("DFT", [floats(2, 3, 7, 1)], {"axis": -2, "onesided": 1}, 17, reference=True),
    Case("DFT", [REAL, scalar(16)], {}, 17, [1], reference=True),
    Case("DFT", [REAL, scalar(7)], {}, 17, [1], reference=True),
    Case("DFT", [COMPLEX, scalar(16)], {"inverse": 1}, 17, [1], reference=True),
    Case("DFT", [REAL], {}, 20, reference=True),
    Case("DFT", [floats(3, 4, 5, 2), None, scalar(0)], {}, 20, [2], reference=True),
    Case("DFT", [floats(3, 4, 5, 1), None, scalar(-3)], {"onesided": 1}, 20, [2], reference=True),
    Case("DFT", [COMPLEX], {"inverse": 1, "onesided": 1}, 20, reference=True),
    Case("DFT", [COMPLEX, scalar(13)], {"inverse": 1, "onesided": 1}, 20, [1], reference=True),
    Case("DFT", [COMPLEX, scalar(30)], {"inverse": 1, "onesided": 1}, 20, [1], reference=True),
    Case("DFT", [COMPLEX.astype("float64")], {}, 20, reference=True, tolerance=1e-12),
    Case("DFT", [floats(1, 1024, 2)], {}, 20, reference=True),
    Case("DFT", [floats(1, 1200, 1)], {"onesided": 1}, 20, reference=True),
    Case("DFT", [floats(1, 331, 1)], {}, 20, reference=True),
    Case("DFT", [floats(2, 600, 2)], {"inverse": 1}, 20, reference=True),
    Case("DFT", [floats(3, 8, 1)], symbolic={0: {0: "n"}}, opset=20, reference=True),
]

SIGNAL = floats(2, 60, 1)
SHORT_TIME = [
    Case("STFT", [SIGNAL, scalar(8), floats(16)], {}, 17, [1]),
    Case("STFT", [SIGNAL, scalar(7), None, scalar(16)], {"onesided": 0}, 17, [1, 3]),
    Case("STFT", [SIGNAL, scalar(8), floats(16), scalar(16)], {}, 17, [1, 2, 3]),
    Case(
        "STFT", [floats(1, 40, 2), scalar(5), floats(15)], {"onesided": 0}, 17, [1], reference=True
    ),
    Case(
        "STFT",
        [SIGNAL, scalar(8), floats(16)],
        {},
        17,
        [1],
        symbolic={0: {0: "n", 1: "samples"}},
    ),
]

WINDOWS = [
    Case(op, [scalar(size)], {"periodic": periodic, "output_datatype": dtype}, 17, known)
    for op in ("HannWindow", "HammingWindow", "BlackmanWindow")
    for size, periodic, dtype, known in ((10, 1, 1, []), (9, 0, 11, [0]))
]

MELS = [
    Case(
        "MelWeightMatrix",
        [
            scalar(8),
            scalar(16),
            scalar(8192),
            scalar(low, "float32"),
            scalar(high, "float32"),
        ],
        {},
        17,
        known,
        reference=True,
    )
    for low, high, known in ((0, 4096, [0, 1, 2, 3, 4]), (0, 4096, []), (300, 3000, [0, 1]))
]


@pytest.mark.parametrize("case", [*TRANSFORMS, *SHORT_TIME, *WINDOWS, *MELS], ids=str)
def test_signal(case):
    check(case)
