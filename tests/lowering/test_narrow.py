"""Floats of a byte or less and integers below a byte: every code, every operator that takes them.

Conversions are compared with ml_dtypes bit by bit, where ONNX's tables say the same; FLOAT8E8M0
with the table in Cast's description.
"""

import ml_dtypes
import numpy as np
import onnx
import pytest
from harness import Case, floats, lower_model, make_model, run_lowered, vector, whole
from onnx import TensorProto, helper

from hybridc.bundle.dtypes import NARROW, carried, restored
from hybridc.errors import UnsupportedError
from hybridc.lowering.ops.narrow import is_integer
from hybridc.lowering.ops.narrow_floats import E8M0, FORMATS

INTEGERS = [name for name in NARROW if is_integer(name)]
FLOATS = [name for name in NARROW if not is_integer(name)]
HALVES = np.arange(1 << 16, dtype=np.uint16)
SOURCES = {
    "float16": HALVES.view(np.float16),
    "bfloat16": HALVES.view(ml_dtypes.bfloat16),
    "float32": HALVES.view(np.float16).astype(np.float32),
    "float64": HALVES.view(np.float16).astype(np.float64),
}


def dtype_of(name):
    return np.dtype(getattr(ml_dtypes, name, name))


def number_of(name):
    return helper.np_dtype_to_tensor_dtype(dtype_of(name))


def all_numbers(name):
    """An array with every code of a narrow type."""
    carrier = NARROW[name]
    codes = np.arange(carrier.low, carrier.high + 1, dtype=np.int16).astype(carrier.dtype)
    return restored(codes, name)


def run(op, *arrays, opset=25, constants=(), **attributes):
    """The first result of a node."""
    given = [array for i, array in enumerate(arrays) if i not in constants and array is not None]
    model = make_model(Case(op, arrays, attributes, opset, constants))
    return run_lowered(lower_model(model), given)[0]


def cast(array, name, **attributes):
    return run("Cast", array, to=number_of(name), **attributes)


def assert_identical(got, wanted):
    """Equality of type and bits, but for the sign and payload of NaN."""
    assert got.dtype == wanted.dtype
    if got.dtype.name in INTEGERS:
        np.testing.assert_array_equal(carried(got), carried(wanted))
        return
    left, right = got.astype(np.float64), wanted.astype(np.float64)
    np.testing.assert_array_equal(left, right)
    np.testing.assert_array_equal(np.signbit(left[right == 0]), np.signbit(right[right == 0]))


@pytest.mark.parametrize("target", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("name", NARROW)
def test_decoding_every_code(name, target):
    numbers = all_numbers(name)
    wide = numbers.astype(np.float32)
    with np.errstate(over="ignore"):
        assert_identical(cast(numbers, target), wide.astype(dtype_of(target)))


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("saturate", [0, 1])
@pytest.mark.parametrize("name", FORMATS)
def test_encoding_every_half(name, saturate, source):
    numbers, form = SOURCES[source], FORMATS[name]
    with np.errstate(invalid="ignore"):
        wide = numbers.astype(np.float64)
    wanted = np.clip(wide, -form.largest, form.largest) if saturate else wide
    got = cast(numbers, name, saturate=saturate)
    is_nan = np.isnan(wide)
    assert_identical(got[~is_nan], wanted[~is_nan].astype(dtype_of(name)))
    if form.nan is None:
        np.testing.assert_array_equal(got[is_nan].astype(np.float32), 0)
    else:
        assert np.isnan(got[is_nan].astype(np.float32)).all()
    if form.nan is not None and not form.unsigned_zero:
        signs = got[is_nan].view(np.uint8) & form.sign != 0
        np.testing.assert_array_equal(signs, np.signbit(wide[is_nan]))


@pytest.mark.parametrize("source", ["float32", "float64"])
@pytest.mark.parametrize("name", FORMATS)
def test_rounding_beside_every_tie(name, source):
    """The next number on either side of a tie is not taken for the tie."""
    codes = np.arange(FORMATS[name].top + 1, dtype=np.uint8)
    exact = codes.view(dtype_of(name)).astype(source)
    ties = (exact[1:] + exact[:-1]) / 2
    below, above = (np.nextafter(ties, np.array(limit, source)) for limit in (-np.inf, np.inf))
    numbers = np.concatenate([exact, ties, below, above])
    even = codes[:-1] + codes[:-1] % 2
    wanted = np.concatenate([codes, even, codes[:-1], codes[1:]])
    np.testing.assert_array_equal(cast(numbers, name).view(np.uint8), wanted)
    kept = wanted > 0 if FORMATS[name].unsigned_zero else wanted >= 0
    signed = np.where(kept, wanted | FORMATS[name].sign, 0)
    np.testing.assert_array_equal(cast(-numbers, name).view(np.uint8), signed)


def powers(numbers, rounding):
    """The exponents of float64 numbers, rounded as the attribute round_mode says."""
    fraction, exponent = np.frexp(numbers)
    fraction, exponent = fraction * 2, exponent - 1
    least = {"up": np.nextafter(1, 2), "nearest": 1.5, "down": 2}[rounding]
    return exponent + (fraction >= least)


@pytest.mark.parametrize("saturate", [0, 1])
@pytest.mark.parametrize("rounding", ["up", "down", "nearest"])
def test_powers_of_two(rounding, saturate):
    with np.errstate(invalid="ignore"):
        finite = np.abs(HALVES.view(ml_dtypes.bfloat16).astype(np.float64))
    numbers = np.unique(finite[np.isfinite(finite) & (finite > 0)])
    codes = np.clip(powers(numbers, rounding) + 127, 0, 254)
    if not saturate:
        codes[(numbers < 2.0**-127) | (numbers > 2.0**127)] = 255
    for source in ("bfloat16", "float32", "float64"):
        options = {"round_mode": rounding, "saturate": saturate}
        got = cast(numbers.astype(dtype_of(source)), E8M0, **options)
        np.testing.assert_array_equal(got.view(np.uint8), codes)
        special = cast(np.array([0, np.inf, np.nan]).astype(dtype_of(source)), E8M0, **options)
        wanted = [0, 254, 255] if saturate else [255, 255, 255]
        np.testing.assert_array_equal(special.view(np.uint8), wanted)


@pytest.mark.parametrize(
    "source", ["int8", "uint8", "int16", "int32", "int64", "uint64", "float32"]
)
@pytest.mark.parametrize("name", INTEGERS)
def test_integers_keep_their_low_bits(name, source):
    low = 0 if source.startswith("u") else -100
    numbers = np.arange(low, 127).astype(source)
    assert_identical(cast(numbers, name), numbers.astype(np.int64).astype(dtype_of(name)))


def test_fractions_are_cut_off():
    numbers = np.array([-7.9, -0.5, 0.5, 6.9], np.float32)
    np.testing.assert_array_equal(carried(cast(numbers, "int4")), [-7, 0, 0, 6])


@pytest.mark.parametrize("target", ["bool", "int32", "int4", "float8_e5m2", "float4_e2m1fn"])
@pytest.mark.parametrize("source", ["bool", "int4", "uint2", "float8_e4m3fn", "float6_e3m2fn"])
def test_between_types(source, target):
    numbers = np.array([False, True]) if source == "bool" else all_numbers(source)
    wide = numbers.astype(np.float32)
    if not (target == "bool" or "float" in target):
        numbers, wide = numbers[np.isfinite(wide)], wide[np.isfinite(wide)]
    if target in FORMATS:
        largest = FORMATS[target].largest
        wide = np.where(np.isnan(wide) & (FORMATS[target].nan is None), -0.0, wide)
        wide = np.clip(wide, -largest, largest)
    if target in INTEGERS:
        wide = wide.astype(np.int64)
    assert_identical(cast(numbers, target), wide.astype(dtype_of(target)))


@pytest.mark.parametrize("name", ["int2", "float4_e2m1fn", "float8_e4m3fnuz"])
def test_cast_like(name):
    numbers = floats(7)
    got = run("CastLike", numbers, np.zeros(1, dtype_of(name)))
    assert_identical(got, numbers.astype(dtype_of(name)))


@pytest.mark.parametrize("constants", [(), (0, 1, 2)])
@pytest.mark.parametrize("name", NARROW)
def test_dequantization(name, constants):
    numbers = all_numbers(name).reshape(2, -1)
    scale = np.array([0.5, 0.75], np.float32)
    zero = np.zeros(2, dtype_of(name)) if name != E8M0 else None
    if is_integer(name):
        zero = np.ones(2, dtype_of(name))
    got = run("DequantizeLinear", numbers, scale, zero, constants=constants, axis=0)
    shift = 0 if zero is None else zero[:, None].astype(np.float32)
    assert_identical(got, (numbers.astype(np.float32) - shift) * scale[:, None])


@pytest.mark.parametrize("name", [*INTEGERS, *FORMATS])
def test_quantization_by_block(name):
    data, scale = floats(4, 6) * 40, np.abs(floats(4, 2)) + 1
    zero = np.ones((4, 2)).astype(dtype_of(name))
    got = run("QuantizeLinear", data, scale, zero, axis=1, block_size=3)
    ratio = data / np.repeat(scale, 3, 1)
    if is_integer(name):
        carrier = NARROW[name]
        wanted = np.clip(np.rint(ratio) + 1, carrier.low, carrier.high)
    else:
        wanted = np.clip(ratio + np.float32(1), -FORMATS[name].largest, FORMATS[name].largest)
    assert_identical(got, wanted.astype(dtype_of(name)))


def test_quantization_without_saturation():
    data, scale = np.array([1e6, -1e6, 3], np.float32), np.array(1, np.float32)
    to = TensorProto.FLOAT8E5M2
    got = run("QuantizeLinear", data, scale, output_dtype=to, saturate=0)
    np.testing.assert_array_equal(got.astype(np.float32), [np.inf, -np.inf, 3])


def test_scales_that_are_powers_of_two():
    numbers = all_numbers("float4_e2m1fn").reshape(4, 4)
    scale = np.array([[0.25, 1], [2, 4], [1, 8], [0.5, 64]], np.float32).astype(dtype_of(E8M0))
    options = {"axis": 1, "block_size": 2, "output_dtype": TensorProto.FLOAT}
    got = run("DequantizeLinear", numbers, scale, **options)
    wanted = numbers.astype(np.float32) * np.repeat(scale.astype(np.float32), 2, 1)
    np.testing.assert_array_equal(got, wanted)


X = all_numbers("int4").reshape(4, 4)
MOVED = [
    ("Concat", [X, X], {"axis": 1}, lambda x: np.concatenate([x, x], 1)),
    ("Expand", [X, vector(2, 4, 4)], {}, lambda x: np.broadcast_to(x, (2, 4, 4))),
    ("Flatten", [X], {"axis": 0}, lambda x: x.reshape(1, 16)),
    ("Gather", [X, vector(2, -1)], {"axis": 1}, lambda x: x[:, [2, 3]]),
    ("GatherND", [X, np.array([[1, 2]])], {}, lambda x: x[1:2, 2]),
    ("Identity", [X], {}, lambda x: x),
    ("Pad", [X, vector(1, 0, 0, 1)], {}, lambda x: np.pad(x, [(1, 0), (0, 1)])),
    ("Pad", [X, vector(0, 0, 0, 1), X[0, 0]], {}, lambda x: np.c_[x, [x[0, 0]] * 4]),
    ("Reshape", [X, vector(2, 8)], {}, lambda x: x.reshape(2, 8)),
    ("Slice", [X, vector(1), vector(3)], {}, lambda x: x[1:3]),
    ("Split", [X], {"axis": 0}, lambda x: x[:2]),
    ("Squeeze", [X[None], vector(0)], {}, lambda x: x[0]),
    ("Tile", [X, vector(1, 2)], {}, lambda x: np.tile(x, (1, 2))),
    ("Transpose", [X], {}, lambda x: x.T),
    ("Unsqueeze", [X, vector(0)], {}, lambda x: x[None]),
    ("Where", [np.eye(4, dtype=bool), X, X.T], {}, None),
]


@pytest.mark.parametrize("name", ["int4", "float4_e2m1fn", "float8_e4m3fn"])
@pytest.mark.parametrize(("op", "inputs", "attributes", "expected"), MOVED)
def test_movement(op, inputs, attributes, expected, name):
    arrays = [a.astype(dtype_of(name)) if a.dtype == X.dtype else a for a in inputs]
    fixed = [i for i, array in enumerate(arrays) if array.dtype == np.int64]
    outputs = 2 if op == "Split" else 1
    case = Case(op, arrays, attributes, 25 if op != "Split" else 13, fixed, outputs)
    given = [array for i, array in enumerate(arrays) if i not in fixed]
    got = run_lowered(lower_model(make_model(case)), given)[0]
    plain = [array.astype(np.float32) for array in given]
    wanted = np.where(*arrays) if expected is None else expected(plain[0])
    assert got.dtype == dtype_of(name)
    np.testing.assert_array_equal(got.astype(np.float32), wanted.astype(np.float32))


def test_tests_for_nan():
    numbers = all_numbers("float8_e5m2")
    wide = numbers.astype(np.float32)
    np.testing.assert_array_equal(run("IsNaN", numbers, opset=20), np.isnan(wide))
    np.testing.assert_array_equal(run("IsInf", numbers, opset=20), np.isinf(wide))


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("int4", "uint4"),
        ("uint4", "int4"),
        ("int4", "float4_e2m1fn"),
        ("float4_e2m1fn", "int4"),
        ("int2", "uint2"),
        ("float8_e4m3fn", "int8"),
        ("int8", "float8_e5m2"),
        ("float8_e4m3fn", "float8_e8m0fnu"),
    ],
)
def test_bits_read_as_another_type(source, target):
    numbers = np.arange(-128, 128).astype(np.int8) if source == "int8" else all_numbers(source)
    got = run("BitCast", numbers, opset=26, to=number_of(target))
    mask = 255 if "8" in source else 15 if "4" in source else 3
    np.testing.assert_array_equal(got.view(np.uint8) & mask, numbers.view(np.uint8) & mask)
    assert got.dtype == dtype_of(target)


def test_bits_of_another_width_are_refused():
    with pytest.raises(UnsupportedError, match="BitCast from int4 to int8"):
        run("BitCast", all_numbers("int4"), opset=26, to=TensorProto.INT8)


@pytest.mark.parametrize("name", ["int4", "uint2", "float8_e4m3fn"])
def test_constant_of_shape(name):
    value = onnx.numpy_helper.from_array(np.ones(1, dtype_of(name)))
    got = run("ConstantOfShape", vector(2, 3), constants=[0], value=value)
    assert_identical(got, np.ones((2, 3), dtype_of(name)))


def test_a_whole_path_stays_narrow():
    """Quantize, move, dequantize: no kernel reads the bytes as numbers on the way."""
    data, scale = floats(4, 6), np.array(0.25, np.float32)
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "s"], ["q"], output_dtype=TensorProto.INT4),
        helper.make_node("Transpose", ["q"], ["t"], perm=[1, 0]),
        helper.make_node("DequantizeLinear", ["t", "s"], ["y"]),
    ]
    info = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes,
        "path",
        [info("x", 1, data.shape), info("s", 1, [])],
        [info("q", TensorProto.INT4, data.shape), info("y", 1, data.shape[::-1])],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)])
    codes, result = run_lowered(lower_model(model), [data, scale])
    wanted = np.clip(np.rint(data / scale), -8, 7)
    np.testing.assert_array_equal(carried(codes), wanted)
    np.testing.assert_array_equal(result, wanted.T * scale)


@pytest.mark.parametrize("flag", [False, True])
@pytest.mark.parametrize("name", ["int4", "float8_e4m3fn"])
def test_branches(name, flag):
    """``If(flag): x else: y``, known at run time only."""
    info, kind = helper.make_tensor_value_info, number_of(name)
    branches = {
        f"{key}_branch": helper.make_graph(
            [helper.make_node("Identity", [source], [key])], key, [], [info(key, kind, (4,))]
        )
        for key, source in (("then", "x"), ("else", "y"))
    }
    graph = helper.make_graph(
        [helper.make_node("If", ["flag"], ["z"], **branches)],
        "choice",
        [info("flag", TensorProto.BOOL, ()), info("x", kind, (4,)), info("y", kind, (4,))],
        [info("z", kind, (4,))],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)])
    x, y = (whole(4, seed=seed, low=0, high=8).astype(dtype_of(name)) for seed in (0, 1))
    (got,) = run_lowered(lower_model(model), [np.array(flag), x, y])
    assert_identical(got, x if flag else y)


def test_integers_that_are_no_numbers_yet():
    """A weight of int4 is stored as int8."""
    weight = whole(4, 8, low=-8, high=8).astype(ml_dtypes.int4)
    lowered = lower_model(make_model(Case("Identity", [weight], opset=21, constants=[0])))
    (stored,) = lowered.weights.values()
    assert stored.dtype == np.int8
    np.testing.assert_array_equal(stored, weight.astype(np.int8))
