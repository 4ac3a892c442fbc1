"""Regions of dequantized floats become integer operators that compute the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from hybridc.passes.quantization.channels_last import ChannelsLast
from hybridc.passes.quantization.fuse_regions import FuseQuantizedRegions
from hybridc.passes.quantization.split_dequantized import SplitDequantized
from onnx import numpy_helper
from onnx.shape_inference import infer_shapes

from hybridc.compiler import build, load_built
from hybridc.frontend.read import source_of
from tests.models import make_model, node, random, run_reference
from tests.passes.harness import apply, interface, operators, run_all
from tests.support import make_options

Array = np.ndarray[Any, Any]

# Of 7 bits: no pair of products exceeds int16, in which ONNX Runtime adds them on some CPUs.
WEIGHTS = {
    "sx": np.array(0.03, np.float32),
    "zx": np.array(120, np.uint8),
    "sy": np.array(0.2, np.float32),
    "zy": np.array(31, np.uint8),
    "lowest": np.array(0, np.uint8),
    "sw": np.linspace(0.005, 0.02, 16, dtype=np.float32),
    "zw": np.zeros(16, np.int8),
    "w": np.random.default_rng(1).integers(-63, 64, (16, 6, 3, 3)).astype(np.int8),
    "m": np.random.default_rng(2).integers(-63, 64, (6, 16)).astype(np.int8),
    "mt": np.random.default_rng(3).integers(-63, 64, (16, 6)).astype(np.int8),
    "b": random(16, seed=4),
    "huge": np.full(16, 1e9, np.float32),
    "one": np.array(0.02, np.float32),
    "none": np.array(0, np.int8),
    "to": np.array([1, 6, 64], np.int64),
    "scales": np.array([1, 1, 2, 2], np.float32),
}

X = [node("QuantizeLinear", "x sx zx", "xq"), node("DequantizeLinear", "xq sx zx", "xf")]
W = [node("DequantizeLinear", "w sw zw", "wf", axis=0)]


def quantized(value: str, zero: str = "zy") -> list[onnx.NodeProto]:
    return [
        node("QuantizeLinear", f"{value} sy {zero}", "yq"),
        node("DequantizeLinear", f"yq sy {zero}", "y"),
    ]


def model_of(nodes, dims=(1, 6, 8, 8), result=(1, 16, 8, 8)) -> onnx.ModelProto:
    read = {name for n in nodes for name in n.input}
    weights = {name: array for name, array in WEIGHTS.items() if name in read}
    return infer_shapes(make_model(nodes, {"x": dims}, {"y": result}, weights))


def check(model: onnx.ModelProto, expected: list[str], steps: float = 1) -> onnx.ModelProto:
    """The operators are as expected, and results equal but for a few steps at ties."""
    after = apply(FuseQuantizedRegions(), model)
    assert operators(after) == expected
    x = {"x": random(*[d.dim_value for d in model.graph.input[0].type.tensor_type.shape.dim])}
    (wanted,), (got,) = (list(run_reference(m, x).values()) for m in (model, ir.to_proto(after)))
    assert np.ptp(wanted) > 1
    np.testing.assert_allclose(got, wanted, atol=steps * 0.2 + 1e-4)
    assert np.mean(np.abs(got - wanted) > 1e-3) < 0.01
    return ir.to_proto(after)


CONV = node("Conv", "xf wf b", "c", pads=[1, 1, 1, 1])
ENDS = ["QuantizeLinear", "QLinearConv", "DequantizeLinear"]


def test_a_convolution():
    check(model_of([*X, *W, CONV, *quantized("c")]), ENDS)


def test_a_relu_that_the_integers_imply():
    nodes = [*X, *W, CONV, node("Relu", "c", "r"), *quantized("r", "lowest")]
    check(model_of(nodes), ENDS)


def test_a_relu_that_they_do_not_imply():
    nodes = [*X, *W, CONV, node("Relu", "c", "r"), *quantized("r")]
    check(model_of(nodes), ["QuantizeLinear", "QLinearConv", "Clip", "DequantizeLinear"])


@pytest.mark.parametrize(
    "bounds",
    [(0, 6), (-50, 6), (0,), (6, 6), (1e9,), (-1e9, -1e9)],
    ids=["both", "low implied", "low alone", "equal", "all above", "all below"],
)
def test_a_clip(bounds):
    names = " ".join(f"bound{place}" for place in range(len(bounds)))
    model = model_of([*X, *W, CONV, node("Clip", f"c {names}", "r"), *quantized("r")])
    model.graph.initializer.extend(
        numpy_helper.from_array(np.float32(number), name)
        for name, number in zip(names.split(), bounds, strict=True)
    )
    after = apply(FuseQuantizedRegions(), model)
    assert operators(after) == ["QuantizeLinear", "QLinearConv", "Clip", "DequantizeLinear"]
    x = {"x": random(1, 6, 8, 8)}
    (wanted,), (got,) = (list(run_reference(m, x).values()) for m in (model, ir.to_proto(after)))
    assert np.mean(np.abs(got - wanted) > 1e-3) < 0.01


def test_bounds_that_are_computed_stay():
    nodes = [*X, *W, CONV, node("ReduceMax", "x", "most", keepdims=0),
             node("Clip", "c  most", "r"), *quantized("r")]  # fmt: skip
    nodes[-3] = onnx.helper.make_node("Clip", ["c", "", "most"], ["r"])
    assert not FuseQuantizedRegions()(ir.from_proto(model_of(nodes))).modified


def test_a_bias_that_is_too_large_stays():
    nodes = [*X, *W, node("Conv", "xf wf huge", "c", pads=[1, 1, 1, 1]), *quantized("c")]
    assert not FuseQuantizedRegions()(ir.from_proto(model_of(nodes))).modified


def test_a_weight_that_is_not_constant_stays():
    nodes = [*X, node("Conv", "xf x", "c"), *quantized("c")]
    model = model_of(nodes, (6, 6, 1, 1), (6, 6, 1, 1))
    assert not FuseQuantizedRegions()(ir.from_proto(model)).modified


def wide_region(largest: int | None, weight: int, *between: onnx.NodeProto) -> onnx.ModelProto:
    """A product of int16 with 16 weights to a filter, behind a Clip to so many steps or none."""
    weights = {
        "s": np.array(0.01, np.float32),
        "z": np.array(0, np.int16),
        "w": np.full((16, 8), weight, np.int16),
        "zw": np.zeros((), np.int16),
    }
    nodes = [
        node("QuantizeLinear", "c s z" if largest else "x s z", "xq"),
        *between,
        node("DequantizeLinear", f"{between[-1].output[0] if between else 'xq'} s z", "xf"),
        node("DequantizeLinear", "w s zw", "wf"),
        node("MatMul", "xf wf", "y"),
    ]
    if largest:
        weights |= {"l": np.float32(-0.01 * largest), "h": np.float32(0.01 * largest)}
        nodes.insert(0, node("Clip", "x l h", "c"))
    return infer_shapes(make_model(nodes, {"x": (5, 16)}, {"y": (5, 8)}, weights, opset=21))


FLIP = node("Gather", "xq order", "xr", axis=1)


@pytest.mark.parametrize(
    ("largest", "weight", "fits"),
    [
        (None, 4095, True),  # 16 * 4095 * 32768 is below 2 ** 31
        (None, 4096, False),
        (8192, 16383, True),
        (8192, 16384, False),
        (8191, 16384, True),
    ],
)
@pytest.mark.parametrize("is_moved", [False, True], ids=["direct", "moved"])
def test_int16_where_sums_fit(largest, weight, fits, is_moved):
    model = wide_region(largest, weight, *([FLIP] if is_moved else []))
    if is_moved:
        order = np.arange(16)[::-1].copy()
        model.graph.initializer.append(numpy_helper.from_array(order, "order"))
    after = apply(FuseQuantizedRegions(), model)
    assert ("MatMulInteger" in operators(after)) == fits


def test_uint16_stays():
    model = wide_region(None, 1)
    for tensor in model.graph.initializer:
        if tensor.name == "z":
            tensor.CopyFrom(numpy_helper.from_array(np.array(32768, np.uint16), "z"))
    del model.graph.value_info[:]
    assert "MatMulInteger" not in operators(apply(FuseQuantizedRegions(), infer_shapes(model)))


@pytest.mark.parametrize("zero", ["zw", ""])
def test_a_matrix_product(zero):
    weight = node("DequantizeLinear", f"m sw {zero}".strip(), "mf", axis=1)
    product = node("MatMul", "xf mf", "p")
    nodes = [*X, weight, product, *quantized("p")]
    expected = ["QuantizeLinear", "QLinearMatMul", "DequantizeLinear"]
    check(model_of(nodes, (2, 5, 6), (2, 5, 16)), expected)


def test_a_matrix_product_that_is_not_quantized():
    weight = node("DequantizeLinear", "m sw zw", "mf", axis=1)
    nodes = [*X, weight, node("MatMul", "xf mf", "y")]
    expected = ["QuantizeLinear", "MatMulInteger", "Cast", "Mul"]
    check(model_of(nodes, (2, 5, 6), (2, 5, 16)), expected)


@pytest.mark.parametrize("last", [True, False], ids=["quantized", "float"])
def test_a_gemm(last):
    weight = node("DequantizeLinear", "mt one none", "mf")
    gemm = node("Gemm", "xf mf b", "g" if last else "y", transB=1)
    nodes = [*X, weight, gemm, *(quantized("g") if last else [])]
    expected = ["QuantizeLinear", "QGemm", *(["DequantizeLinear"] if last else [])]
    check(model_of(nodes, (5, 6), (5, 16)), expected)


def test_movement_between_equal_scales():
    pool = node("MaxPool", "xf", "p", kernel_shape=[3, 3], pads=[1, 1, 1, 1])
    nodes = [
        *X,
        pool,
        node("QuantizeLinear", "p sx zx", "pq"),
        node("DequantizeLinear", "pq sx zx", "pf"),
        node("Reshape", "pf to", "r"),
        node("QuantizeLinear", "r sx zx", "rq"),
        node("DequantizeLinear", "rq sx zx", "y"),
    ]
    model = model_of(nodes, result=(1, 6, 64))
    check(model, ["QuantizeLinear", "MaxPool", "Reshape", "DequantizeLinear"], 0)


def test_movement_between_other_scales_stays():
    nodes = [*X, node("MaxPool", "xf", "p", kernel_shape=[1, 1]), *quantized("p")]
    model = model_of(nodes, result=(1, 6, 8, 8))
    assert not FuseQuantizedRegions()(ir.from_proto(model)).modified


SAME = [node("QuantizeLinear", "p sx zx", "pq"), node("DequantizeLinear", "pq sx zx", "y")]


@pytest.mark.parametrize(
    ("made", "dims", "result"),
    [
        (node("Resize", "xf - scales", "p", mode="nearest"), (1, 6, 8, 8), (1, 6, 16, 16)),
        (node("Concat", "xf xf", "p", axis=1), (1, 6, 8, 8), (1, 12, 8, 8)),
        (node("DepthToSpace", "xf", "p", blocksize=2), (1, 8, 4, 4), (1, 2, 8, 8)),
    ],
    ids=lambda value: getattr(value, "op_type", None),
)
def test_movement_of_images(made, dims, result):
    model = model_of([*X, made, *SAME], dims, result)
    check(model, ["QuantizeLinear", made.op_type, "DequantizeLinear"], 0)
    (wanted,) = run_reference(model, {"x": random(*dims)}).values()
    built = build(source_of(model), make_options())[0]
    np.testing.assert_array_equal(load_built(built)(x=random(*dims))["y"], wanted)


def test_a_resize_that_computes_stays():
    nodes = [*X, node("Resize", "xf - scales", "p", mode="linear"), *SAME]
    model = model_of(nodes, result=(1, 6, 16, 16))
    assert not FuseQuantizedRegions()(ir.from_proto(model)).modified


def test_a_concatenation_of_other_scales_stays():
    nodes = [*X, node("Concat", "xf xf", "p", axis=1), *quantized("p")]
    model = model_of(nodes, result=(1, 12, 8, 8))
    assert not FuseQuantizedRegions()(ir.from_proto(model)).modified


@pytest.mark.parametrize(
    ("count", "bias"), [(3, True), (3, False), (1, True)], ids=["bias", "no bias", "one filter"]
)
def test_a_convolution_of_few_filters_is_filled_up(count, bias):
    few = {name: WEIGHTS[name][:count] for name in ("w", "sw", "zw", "b")}
    names = "xq sx zx w sw zw sy zy" + (" b" if bias else "")
    few["b"] = np.array([100, -2000, 30], np.int32)[:count]
    nodes = [X[0], node("QLinearConv", names, "q"), node("DequantizeLinear", "q sy zy", "y")]
    weights = {name: few.get(name, WEIGHTS.get(name)) for name in names.split()[1:]}
    model = infer_shapes(make_model(nodes, {"x": (1, 6, 9, 8)}, {"y": (1, count, 7, 6)}, weights))
    after = apply(ChannelsLast(), model)
    assert operators(after).count("Slice") == 1
    x = {"x": random(1, 6, 9, 8)}
    (wanted,) = run_reference(model, x).values()
    (moved,) = run_reference(ir.to_proto(after), x).values()
    np.testing.assert_array_equal(moved, wanted)
    built = build(source_of(model), make_options())[0]
    np.testing.assert_array_equal(load_built(built)(**x)["y"], wanted)


PIXELS = [
    *X,
    node("DequantizeLinear", "p sw zw", "pf", axis=0),
    node("Conv", "xf pf b", "c"),
    node("HardSwish", "c", "y"),
]


def pixels_model(nodes=PIXELS, filters=16) -> onnx.ModelProto:
    weights = {name: WEIGHTS[name] for name in ("sx", "zx")}
    weights |= {name: WEIGHTS[name][:filters] for name in ("sw", "zw")} | {"b": random(filters)}
    weights["p"] = np.random.default_rng(7).integers(-63, 64, (filters, 6, 1, 1)).astype(np.int8)
    return infer_shapes(make_model(nodes, {"x": (2, 6, 5, 7)}, {"y": (2, filters, 5, 7)}, weights))


@pytest.mark.parametrize("filters", [16, 3, 1])
def test_a_convolution_of_pixels_before_an_activation(filters):
    model = pixels_model(filters=filters)
    after = apply(FuseQuantizedRegions(), model)
    made = ["QuantizeLinear", "Transpose", "MatMulInteger", "Cast", "Mul", "Add"]
    cut = ["Slice"] if filters < 8 else []
    assert operators(after) == [*made, *cut, "Transpose", "HardSwish"]
    x = {"x": random(2, 6, 5, 7)}
    (wanted,), (got,) = (list(run_reference(m, x).values()) for m in (model, ir.to_proto(after)))
    np.testing.assert_allclose(got, wanted, atol=1e-5)
    built = build(source_of(model), make_options())[0]
    np.testing.assert_allclose(load_built(built)(**x)["y"], wanted, atol=1e-5)


@pytest.mark.parametrize("attribute", [{"strides": [2, 2]}, {"pads": [0, 1, 0, 1]}])
def test_a_convolution_of_not_all_pixels_stays_float(attribute):
    model = pixels_model([*PIXELS[:3], node("Conv", "xf pf b", "c", **attribute), PIXELS[-1]])
    model.graph.output[0].type.tensor_type.ClearField("shape")
    assert not FuseQuantizedRegions()(ir.from_proto(model)).modified


def test_each_reader_gets_floats_of_its_own():
    nodes = [*X, node("Relu", "xf", "r"), node("Mul", "xf xf", "k"), node("Add", "r k", "y")]
    model = model_of(nodes, result=(1, 6, 8, 8))
    after = apply(SplitDequantized(), model)
    assert operators(after).count("DequantizeLinear") == 2
    x = {"x": random(1, 6, 8, 8)}
    (wanted,), (got,) = (list(run_reference(m, x).values()) for m in (model, ir.to_proto(after)))
    np.testing.assert_array_equal(got, wanted)
    assert not SplitDequantized()(after).modified


def network() -> onnx.ModelProto:
    """Convolutions with a residual, an activation, a pool and a mean."""
    nodes = [
        *X,
        *W,
        CONV,
        node("QuantizeLinear", "c sy zy", "cq"),
        node("DequantizeLinear", "cq sy zy", "cf"),
        node("MaxPool", "cf", "p", kernel_shape=[3, 3], strides=[2, 2]),
        node("QuantizeLinear", "p sy zy", "pq"),
        node("DequantizeLinear", "pq sy zy", "pf"),
        node("DequantizeLinear", "d sw zw", "df", axis=0),
        node("Conv", "pf df b", "e", group=16, pads=[1, 1, 1, 1]),
        node("QuantizeLinear", "e sy zy", "eq"),
        node("DequantizeLinear", "eq sy zy", "ef"),
        node("HardSwish", "ef", "h"),
        node("Add", "h pf", "a"),
        node("QuantizeLinear", "a sy zy", "aq"),
        node("DequantizeLinear", "aq sy zy", "af"),
        node("GlobalAveragePool", "af", "y"),
    ]
    weights = {name: array for name, array in WEIGHTS.items() if name in "sx zx sy zy sw zw w b"}
    weights["d"] = np.random.default_rng(5).integers(-63, 64, (16, 1, 3, 3)).astype(np.int8)
    return infer_shapes(make_model(nodes, {"x": (1, 6, 9, 9)}, {"y": (1, 16, 1, 1)}, weights))


def test_channels_last_is_the_same_bit_for_bit():
    first = apply(FuseQuantizedRegions(), network())
    before = ir.to_proto(first)
    after = ir.to_proto(ChannelsLast()(first).model)
    onnx.checker.check_model(after)
    assert interface(after) == interface(before)
    moved = [n.op_type for n in after.graph.node if n.domain == "com.microsoft"]
    assert moved == ["QLinearConv", "NhwcMaxPool", "QLinearConv"]
    x = {"x": random(1, 6, 9, 9)}
    (wanted,), (got,) = (list(run_reference(m, x).values()) for m in (before, after))
    np.testing.assert_allclose(got, wanted, rtol=1e-6)


def test_the_whole_pipeline_leaves_one_transposition():
    model = network()
    after, notes = run_all(model)
    assert not notes
    assert operators(after).count("QLinearConv") == 2
    assert operators(after).count("Transpose") == 1
    built = build(source_of(model), make_options())[0]
    x = {"x": random(1, 6, 9, 9)}
    (wanted,) = run_reference(model, x).values()
    np.testing.assert_allclose(load_built(built)(**x)["y"], wanted, atol=0.01)
