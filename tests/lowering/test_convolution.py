import pytest
from harness import Case, check, floats


def conv(data, weight, attributes=None, bias=False, op="Conv", constants=(1, 2), **options):
    groups = (attributes or {}).get("group", 1)
    channels = weight[0] if op == "Conv" else weight[1] * groups
    arrays = [floats(*data), floats(*weight, seed=1)]
    arrays += [floats(channels, seed=2)] if bias else []
    given = [i for i in constants if i < len(arrays)]
    return Case(op, arrays, attributes or {}, constants=given, **options)


CONVOLUTIONS = [
    conv((1, 4, 8, 9), (6, 4, 3, 3), {"pads": [1, 1, 1, 1]}, bias=True),
    conv((2, 3, 8, 9), (5, 3, 3, 2), {"pads": [1, 0, 2, 1], "strides": [2, 1]}),
    conv((1, 3, 9, 9), (5, 3, 3, 3), {"dilations": [2, 1], "strides": [1, 2]}, bias=True),
    conv((1, 6, 8, 8), (6, 1, 3, 3), {"group": 6, "pads": [1, 1, 1, 1]}, bias=True),
    conv((1, 6, 8, 8), (12, 1, 3, 3), {"group": 6, "strides": [2, 2]}),
    conv((1, 6, 8, 8), (4, 3, 3, 3), {"group": 2}, bias=True),
    conv((1, 3, 8, 7), (4, 3, 3, 2), {"auto_pad": "SAME_UPPER", "strides": [2, 3]}),
    conv((1, 3, 8, 7), (4, 3, 3, 2), {"auto_pad": "SAME_LOWER", "strides": [2, 3]}),
    conv((1, 3, 8, 7), (4, 3, 4, 2), {"auto_pad": "SAME_LOWER"}),
    conv((1, 3, 8, 7), (4, 3, 3, 2), {"auto_pad": "VALID", "kernel_shape": [3, 2]}),
    conv((2, 3, 9), (4, 3, 3), {"pads": [2, 0], "strides": [2]}, bias=True),
    conv((2, 4, 9), (4, 2, 3), {"group": 2, "dilations": [2]}),
    conv((1, 2, 5, 6, 7), (3, 2, 2, 3, 3), {"pads": [0, 1, 1, 1, 1, 1]}, bias=True),
    conv((1, 4, 5, 6, 7), (4, 1, 2, 3, 3), {"group": 4, "strides": [1, 2, 1]}),
    conv((1, 3, 5, 5), (4, 3, 1, 1), bias=True, constants=()),
    conv((1, 4, 8, 9), (6, 4, 3, 3), bias=True, symbolic={0: {0: "n", 2: "h", 3: "w"}}),
    conv(
        (1, 4, 8, 9),
        (6, 4, 3, 3),
        {"strides": [2, 2], "pads": [1, 1, 1, 1]},
        symbolic={0: {0: "n", 2: "h", 3: "w"}},
    ),
    conv((2, 3, 9), (4, 3, 3), {"strides": [2]}, symbolic={0: {2: "t"}}),
    conv((1, 3, 8, 7), (4, 3, 3, 3), {"auto_pad": "SAME_UPPER"}, symbolic={0: {2: "h"}}),
    *(
        Case("Conv", [floats(1, 3, 5, 5, dtype=d), floats(2, 3, 3, 3, dtype=d)], reference=True)
        for d in ("float64", "float16")
    ),
]


def transposed(data, weight, attributes=None, **options):
    return conv(data, weight, attributes, op="ConvTranspose", **options)


TRANSPOSED = [
    transposed((1, 4, 5, 6), (4, 3, 3, 3), bias=True),
    transposed((2, 4, 5, 6), (4, 3, 2, 2), {"strides": [2, 2]}, bias=True),
    transposed((1, 4, 5, 6), (4, 3, 3, 3), {"strides": [2, 3], "pads": [1, 0, 0, 1]}),
    transposed(
        (1, 4, 5, 6), (4, 3, 3, 4), {"strides": [2, 3], "output_padding": [1, 2]}, bias=True
    ),
    transposed((1, 4, 5, 6), (4, 2, 3, 3), {"group": 2, "strides": [2, 2], "pads": [1, 1, 1, 1]}),
    transposed((1, 4, 5, 6), (4, 1, 4, 4), {"group": 4, "strides": [2, 2], "pads": [1, 1, 1, 1]}),
    transposed((1, 4, 5, 6), (4, 3, 3, 2), {"dilations": [2, 3]}, bias=True),
    transposed((1, 4, 5, 6), (4, 3, 3, 2), {"dilations": [2, 3], "strides": [3, 2]}),
    transposed((1, 4, 5, 6), (4, 3, 2, 2), {"strides": [3, 3]}),
    transposed((1, 4, 5, 6), (4, 3, 3, 3), {"strides": [2, 2], "output_shape": [10, 12]}),
    transposed((1, 4, 5, 6), (4, 3, 3, 3), {"strides": [2, 2], "output_shape": [12, 14]}),
    *(
        transposed((1, 4, 5, 6), (4, 3, 3, 4), {"strides": [2, 3], "auto_pad": mode, **more})
        for mode in ("SAME_UPPER", "SAME_LOWER")
        for more in ({}, {"output_shape": [10, 18]})
    ),
    transposed((1, 4, 5, 6), (4, 3, 3, 3), {"strides": [2, 2], "auto_pad": "VALID"}),
    transposed((2, 4, 5), (4, 3, 3), {"strides": [2], "pads": [1, 1]}, bias=True),
    transposed((1, 2, 3, 4, 3), (2, 3, 2, 3, 2), {"strides": [2, 1, 2]}, bias=True),
    transposed((1, 4, 5, 6), (4, 3, 3, 3), {"strides": [2, 2]}, constants=()),
    transposed((1, 4, 5, 6), (4, 3, 2, 2), {"strides": [2, 2]}, symbolic={0: {2: "h", 3: "w"}}),
    transposed(
        (1, 4, 5, 6),
        (4, 3, 3, 3),
        {"strides": [2, 2], "pads": [1, 1, 1, 1], "output_padding": [1, 1]},
        symbolic={0: {0: "n", 2: "h", 3: "w"}},
    ),
]


@pytest.mark.parametrize("case", [*CONVOLUTIONS, *TRANSPOSED], ids=str)
def test_convolution(case):
    check(case)
