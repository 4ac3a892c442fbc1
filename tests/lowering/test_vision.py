import numpy as np
import pytest
from harness import Case, check, floats, vector


def grid(*shape, seed=0):
    """Positions a little inside and outside of the picture, the edges among them."""
    numbers = floats(*shape, seed=seed) * 0.8
    numbers.reshape(-1)[:4] = [-1.0, 1.0, 0.0, -1.0]
    return numbers


PICTURE = floats(2, 3, 5, 4)
GRID_SAMPLES = [
    Case(
        "GridSample",
        [PICTURE, grid(2, 3, 6, 2)],
        {"mode": mode, "padding_mode": padding, "align_corners": aligned},
        opset=16,
    )
    for mode in ("bilinear", "nearest", "bicubic")
    for padding in ("zeros", "border", "reflection")
    for aligned in (0, 1)
] + [
    Case("GridSample", [PICTURE, grid(2, 3, 6, 2)], {"mode": "cubic"}, opset=20),
    Case("GridSample", [PICTURE, grid(2, 3, 6, 2) * 50], {"padding_mode": "reflection"}),
    Case("GridSample", [floats(1, 2, 1, 1), grid(1, 3, 3, 2)], {"align_corners": 1}),
    Case(
        "GridSample",
        [floats(1, 2, 1, 1), grid(1, 3, 3, 2)],
        {"align_corners": 1, "padding_mode": "border"},
    ),
    Case(
        "GridSample",
        [PICTURE, grid(2, 3, 6, 2)],
        symbolic={0: {0: "n", 2: "h", 3: "w"}, 1: {0: "n", 1: "p"}},
    ),
    *(
        Case(
            "GridSample",
            [floats(1, 2, 3, 4, 5), grid(1, 2, 3, 2, 3)],
            {"mode": mode, "padding_mode": padding, "align_corners": aligned},
            opset=20,
        )
        for mode in ("linear", "nearest")
        for padding, aligned in (("zeros", 0), ("border", 1), ("reflection", 0))
    ),
    Case("GridSample", [PICTURE.astype("float64"), grid(2, 3, 6, 2)], opset=22, reference=True),
]

AFFINE_GRIDS = [
    Case("AffineGrid", [floats(2, 2, 3), vector(2, 3, 4, 5)], {"align_corners": aligned}, 20, known)
    for aligned in (0, 1)
    for known in ((1,), ())
] + [
    Case("AffineGrid", [floats(1, 3, 4), vector(1, 3, 2, 4, 5)], {"align_corners": 1}, 20),
]

ROIS = np.array(
    [[0, 0, 9, 9], [0.5, 5, 4.5, 9.3], [6, 1, 8, 2], [-3, -2, 14, 12], [2, 2, 2, 2]], np.float32
)
REGIONS = [
    Case(
        "RoiAlign",
        [floats(2, 3, 10, 8), ROIS, vector(0, 1, 1, 0, 1)],
        {"mode": mode, "sampling_ratio": ratio, "output_height": 3, "output_width": 2} | more,
        opset=opset,
        reference=reference,
    )
    for mode in ("avg", "max")
    for ratio in (0, 2)
    for opset, more, reference in (
        (10, {"spatial_scale": 0.5}, False),
        (16, {}, False),
        (16, {"coordinate_transformation_mode": "output_half_pixel"}, False),
    )
] + [
    Case(
        "MaxRoiPool",
        [
            floats(2, 3, 10, 8),
            np.concatenate([np.array([[0], [1], [1], [0], [1]], np.float32), ROIS], 1),
        ],
        {"pooled_shape": [3, 2], "spatial_scale": scale},
    )
    for scale in (1.0, 0.3)
]

INDICES = np.array([[[[5, 7], [13, 15]]]])
UNPOOLS = [
    Case("MaxUnpool", [floats(1, 1, 2, 2), INDICES], {"kernel_shape": [2, 2], "strides": [2, 2]}),
    Case(
        "MaxUnpool",
        [floats(1, 1, 2, 2), INDICES, vector(1, 1, 5, 5)],
        {"kernel_shape": [2, 2], "strides": [2, 2]},
        constants=[2],
        reference=True,
    ),
    Case(
        "MaxUnpool",
        [floats(1, 1, 2, 2), INDICES, vector(1, 1, 4, 4)],
        {"kernel_shape": [2, 2], "strides": [2, 2]},
    ),
    Case(
        "MaxUnpool",
        [floats(1, 2, 3), np.array([[[0, 3, 4], [6, 9, 11]]])],
        {"kernel_shape": [2], "strides": [2]},
    ),
]

COLUMNS = [
    Case("Col2Im", [floats(1, 5, 5), vector(5, 5), vector(1, 5)], {}, 18, [1, 2]),
    Case("Col2Im", [floats(1, 9, 4), vector(5, 5), vector(3, 3)], {"strides": [2, 2]}, 18, [1, 2]),
    Case(
        "Col2Im",
        [floats(2, 10, 15), vector(5, 5), vector(1, 5)],
        {"pads": [0, 1, 0, 1]},
        18,
        [1, 2],
    ),
    Case(
        "Col2Im",
        [floats(1, 12, 5), vector(6, 6), vector(2, 2)],
        {"dilations": [1, 5]},
        18,
        [1, 2],
    ),
    Case("Col2Im", [floats(1, 10, 12), vector(3, 4, 5), vector(1, 1, 5)], {}, 18, [1, 2]),
    Case("Col2Im", [floats(1, 5, 5), vector(5, 5), vector(1, 5)], {}, 18, [2]),
    Case("Col2Im", [floats(1, 9, 4), vector(5, 5), vector(3, 3)], {"strides": [2, 2]}, 18),
]


def deformed(masked, attributes, group=1, offset_groups=1, bias=True):
    """A 3x2 DeformConv over 4 channels with random offsets."""
    places = (4, 6) if "strides" not in attributes else (3, 3)
    inputs = [
        floats(2, 4, 5, 6),
        floats(6, 4 // group, 3, 2),
        floats(2, offset_groups * 12, *places),
        floats(6) if bias else None,
        floats(2, offset_groups * 6, *places, seed=1) if masked else None,
    ]
    attributes = attributes | {"group": group, "offset_group": offset_groups}
    return Case(
        "DeformConv", inputs, attributes | {"kernel_shape": [3, 2]}, opset=19, reference=True
    )


DEFORMED = [
    deformed(True, {"pads": [1, 1, 0, 0]}),
    deformed(False, {"pads": [1, 1, 0, 0]}, bias=False),
    deformed(True, {"pads": [1, 0, 1, 0], "strides": [2, 2], "dilations": [1, 1]}, 2, 2),
]


@pytest.mark.parametrize(
    "case", [*GRID_SAMPLES, *AFFINE_GRIDS, *REGIONS, *UNPOOLS, *COLUMNS, *DEFORMED], ids=str
)
def test_vision(case):
    check(case)
