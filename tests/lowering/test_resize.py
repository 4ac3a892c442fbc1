from dataclasses import replace

import numpy as np
import pytest
from harness import Case, check, floats, vector, whole

IMAGE = floats(1, 2, 5, 6)
TRANSFORMATIONS = ("half_pixel", "pytorch_half_pixel", "align_corners", "asymmetric")
NEAREST = ("round_prefer_floor", "round_prefer_ceil", "floor", "ceil")
REGION = np.array([0, 0, 0.2, -0.1, 1, 1, 0.7, 1.2], np.float32)


def numbers(*values):
    return np.array(values, np.float32)


def scaled(mode, *scales, data=IMAGE, opset=13, symbolic=None, **attributes):
    inputs = [data, None, numbers(*scales)]
    options = {"constants": [2], "symbolic": symbolic or {}, "opset": opset}
    return Case("Resize", inputs, {"mode": mode, **attributes}, **options)


def sized(mode, *sizes, data=IMAGE, opset=13, symbolic=None, **attributes):
    inputs = [data, None, None, vector(*sizes)]
    options = {"constants": [3], "symbolic": symbolic or {}, "opset": opset}
    return Case("Resize", inputs, {"mode": mode, **attributes}, **options)


COMBINATIONS = [
    *(
        scaled(
            "nearest", *scales, coordinate_transformation_mode=transformation, nearest_mode=nearest
        )
        for scales in ((1, 1, 2, 2), (1, 1, 0.7, 1.6))
        for transformation in TRANSFORMATIONS
        for nearest in NEAREST
    ),
    *(
        scaled(mode, *scales, coordinate_transformation_mode=transformation)
        for mode in ("linear", "cubic")
        for scales in ((1, 1, 2, 2), (1, 1, 0.7, 1.6), (1, 1, 3, 1))
        for transformation in TRANSFORMATIONS
    ),
    *(
        sized(mode, 1, 2, 9, 4, coordinate_transformation_mode=transformation)
        for mode in ("nearest", "linear", "cubic")
        for transformation in TRANSFORMATIONS
    ),
]

OTHERS = [
    scaled("cubic", 1, 1, 1.7, 2.2, cubic_coeff_a=-0.5, exclude_outside=1),
    scaled("cubic", 1, 1, 0.6, 0.8, exclude_outside=1),
    scaled("linear", 1, 1, 1, 1),
    sized("linear", 1, 2, 1, 1, coordinate_transformation_mode="pytorch_half_pixel"),
    sized("linear", 1, 2, 1, 1, coordinate_transformation_mode="align_corners"),
    *(
        scaled(
            mode, 1, 1, 1.5, 0.8, opset=19, coordinate_transformation_mode="half_pixel_symmetric"
        )
        for mode in ("nearest", "linear", "cubic")
    ),
    *(
        Case(
            "Resize",
            [IMAGE, REGION, None, vector(1, 2, 4, 7)],
            {
                "mode": mode,
                "coordinate_transformation_mode": "tf_crop_and_resize",
                "extrapolation_value": 9.5,
            },
            opset=13,
            constants=[1, 3],
        )
        for mode in ("nearest", "linear", "cubic")
    ),
    Case(
        "Resize",
        [IMAGE, np.zeros(0, np.float32), numbers(1, 1, 2, 1.5)],
        {"coordinate_transformation_mode": "tf_half_pixel_for_nn"},
        opset=11,
        constants=[1, 2],
    ),
    scaled("nearest", 2, 1.5, 2, 2),
    scaled("linear", 2, 2, data=floats(3, 4)),
    scaled("linear", 1, 1, 2, data=floats(1, 2, 5)),
    scaled("linear", 1, 1, 2, 1.5, 2, data=floats(1, 1, 3, 4, 2)),
    scaled("nearest", 1, 1, 2, 2, data=whole(1, 2, 3, 4)),
    scaled("nearest", 1, 1, 2, 2, data=whole(1, 2, 3, 4, dtype="uint8", low=0)),
    scaled("nearest", 2, 1.5, opset=18, axes=[2, 3]),
    scaled("nearest", 2, 1.5, opset=18, axes=[-1, -2]),
    sized("linear", 8, 9, opset=18, axes=[2, 3]),
    *(
        sized(mode, 11, 9, opset=18, axes=[2, 3], keep_aspect_ratio_policy=policy)
        for policy in ("not_larger", "not_smaller")
        for mode in ("nearest", "linear")
    ),
    Case(
        "Resize",
        [IMAGE, np.zeros(0, np.float32), numbers(1, 1, 2, 3)],
        opset=11,
        constants=[1, 2],
    ),
    Case(
        "Resize",
        [IMAGE, np.zeros(0, np.float32), np.zeros(0, np.float32), vector(1, 2, 9, 9)],
        {"mode": "linear"},
        opset=11,
        constants=[1, 2, 3],
    ),
]

ANTIALIASED = [
    *(
        scaled(mode, *scales, opset=18, antialias=1, **attributes)
        for mode in ("linear", "cubic")
        for scales in ((1, 1, 0.6, 0.6), (1, 1, 0.3, 1.5), (1, 1, 2, 1.5))
        for attributes in ({}, {"exclude_outside": 1})
    ),
    *(sized(mode, 1, 2, 3, 4, opset=18, antialias=1) for mode in ("linear", "cubic")),
    scaled("cubic", 1, 1, 0.4, 0.7, opset=18, antialias=1, cubic_coeff_a=-0.5),
    sized("linear", 2, 3, data=floats(9, 11), opset=19, antialias=1),
    sized("cubic", 3, data=floats(2, 2, 17), opset=19, antialias=1, axes=[2]),
    sized("linear", 2, data=floats(2, 7, 3, dtype="float64"), opset=19, antialias=1, axes=[1]),
    sized("linear", 4, data=floats(2, 9, dtype="float16"), opset=19, antialias=1, axes=[1]),
    sized(
        *("linear", 2),
        data=floats(2, 7),
        opset=19,
        antialias=1,
        axes=[1],
        coordinate_transformation_mode="asymmetric",
    ),
    sized("linear", 2, 3, 4, data=floats(2, 7, 9, 8), opset=19, antialias=1, axes=[1, 2, 3]),
    sized(
        *("cubic", 4, 5),
        data=floats(2, 9, 11),
        opset=18,
        antialias=1,
        axes=[1, 2],
        keep_aspect_ratio_policy="not_larger",
        symbolic={0: {0: "n"}},
    ),
]
ANTIALIASED = [replace(case, reference=True) for case in ANTIALIASED]

AT_RUN_TIME = [
    replace(case, constants=[])
    for case in ANTIALIASED
    if case.inputs[0].dtype == np.float32 and case.constants
]

REGIONS = [
    Case(
        "Resize",
        [floats(1, 2, 12, 15), REGION, None, vector(1, 2, 4, 7)],
        {
            "mode": mode,
            "coordinate_transformation_mode": "tf_crop_and_resize",
            "extrapolation_value": 9.5,
            "antialias": 1,
        },
        opset=18,
        constants=[1, 3],
        reference=True,
    )
    for mode in ("linear", "cubic")
]

OLD = [
    *(
        Case("Resize", [IMAGE, numbers(*scales)], {"mode": mode}, opset=10, constants=[1])
        for mode in ("nearest", "linear")
        for scales in ((1, 1, 2, 2), (1, 1, 0.6, 1.7))
    ),
    *(
        Case("Upsample", [IMAGE, numbers(1, 1, 2, 3)], {"mode": mode}, opset=9, constants=[1])
        for mode in ("nearest", "linear")
    ),
    *(
        Case("Upsample", [IMAGE], {"mode": mode, "scales": [1.0, 1.0, 2.0, 1.5]}, opset=7)
        for mode in ("nearest", "linear")
    ),
]

SPATIAL = {0: {0: "n", 2: "h", 3: "w"}}
SYMBOLIC = [
    scaled(
        "nearest",
        *(1, 1, 2, 2),
        coordinate_transformation_mode="asymmetric",
        nearest_mode="floor",
        symbolic=SPATIAL,
    ),
    *(
        scaled(mode, 1, 1, 2, 3, coordinate_transformation_mode=transformation, symbolic=SPATIAL)
        for mode in ("nearest", "linear", "cubic")
        for transformation in TRANSFORMATIONS
    ),
    sized("linear", 1, 2, 9, 4, symbolic={0: {2: "h", 3: "w"}}),
    sized("nearest", 1, 2, 9, 4, symbolic={0: {2: "h", 3: "w"}}),
]


@pytest.mark.parametrize(
    "case", [*COMBINATIONS, *OTHERS, *ANTIALIASED, *AT_RUN_TIME, *REGIONS, *OLD, *SYMBOLIC], ids=str
)
def test_resize(case):
    check(case)
