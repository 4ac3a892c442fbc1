"""Layers in int16: their form, sums that fit, and when a search under a budget takes them."""

from __future__ import annotations

import itertools

import numpy as np
import onnx
import pytest
from hybridc.passes.quantization.fuse_regions import FuseQuantizedRegions
from hybridc.targets.protocol import Device
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import numpy_helper

from hybridc.precision.budget import parse_budget
from hybridc.precision.costs import ModelCost, predict
from hybridc.precision.gains import multiplies_int16
from hybridc.precision.qdq import can_be_wide, insert_qdq
from hybridc.precision.scales import balanced_steps, wide_scale, wide_weight_steps
from hybridc.precision.search import search
from tests.models import make_model, node, random, run_reference, save
from tests.passes.harness import apply, operators
from tests.precision.data import DEVICE, network, samples, write_samples
from tests.support import hybridc


def error_of(calibrated, model):
    """The largest error on samples not calibrated with, relative to the largest result."""
    onnx.checker.check_model(model)
    found = []
    for seed in range(50, 56):
        x = {"x": random(1, 3, 8, 8, seed=seed)}
        exact, got = (run_reference(m, x)["y"] for m in (calibrated.model, model))
        found.append(np.abs(got - exact).max() / np.abs(exact).max())
    return max(found)


def test_int16_is_far_more_exact_than_int8(calibrated):
    narrow, wide = calibrated.quantized("abc"), calibrated.quantized("", wide="abc")
    assert error_of(calibrated, wide) < error_of(calibrated, narrow) / 30


@pytest.mark.parametrize("wide", ["a", "b", "c", "ab", "ac", "bc"])
def test_layers_of_both_kinds_side_by_side(calibrated, wide):
    narrow = [name for name in "abc" if name not in wide]
    model = calibrated.quantized(narrow, wide=wide)
    assert error_of(calibrated, model) <= error_of(calibrated, calibrated.quantized("abc")) * 1.5
    types = {t.name: numpy_helper.to_array(t).dtype for t in model.graph.initializer}
    makers = {name: n for n in model.graph.node for name in n.output}
    for layer in model.graph.node:
        if layer.name in ("a", "b", "c"):
            kind = "int16" if layer.name in wide else "int8"
            assert types[makers[layer.input[1]].input[0]] == kind


def test_all_regions_of_int16_become_integer_operators(calibrated):
    model = onnx.shape_inference.infer_shapes(calibrated.quantized("", wide="abc"))
    after = apply(FuseQuantizedRegions(), model)
    assert sorted(set(operators(after)) & {"Conv", "Gemm", "QLinearConv", "QGemm"}) == [
        "QGemm",
        "QLinearConv",
    ]
    assert operators(after).count("QLinearConv") == 2


def test_what_lies_between_is_as_wide_as_its_widest_reader():
    """One tensor that a layer in int8 and one in int16 read, made by one in int8."""
    nodes = [
        node("Conv", "x a", "h", "first"),
        node("Conv", "h b", "p", "narrow"),
        node("Conv", "h c", "q", "wide"),
        node("Add", "p q", "y", "join"),
    ]
    weights = {name: random(8, 8, 1, 1, seed=i) for i, name in enumerate("abc")}
    model = make_model(nodes, {"x": (1, 8, 4, 4)}, {"y": (1, 8, 4, 4)}, weights)
    model = onnx.shape_inference.infer_shapes(model)
    ranges = dict.fromkeys(("x", "h", "p", "q", "y"), (-9.0, 9.0))
    found = insert_qdq(model, ["first", "narrow", "wide"], ranges, wide=["wide"], extremes=ranges)
    onnx.checker.check_model(found)
    by_name = {n.name: n for n in found.graph.node}
    makers = {name: n for n in found.graph.node for name in n.output}

    def kinds(name):
        """Types that a tensor went through, the last one first."""
        while (maker := makers.get(name)) is not None and maker.op_type != "Conv":
            if maker.op_type == "QuantizeLinear":
                zero = next(t for t in found.graph.initializer if t.name == maker.input[2])
                yield numpy_helper.to_array(zero).dtype.name
            name = maker.input[0]

    assert list(kinds(by_name["wide"].input[0])) == ["int16"]
    assert list(kinds(by_name["narrow"].input[0])) == ["uint8", "int16"]
    assert list(kinds(by_name["first"].input[0])) == ["uint8"]


@settings(deadline=None, derandomize=True)
@given(
    st.integers(1, 6),
    st.integers(1, 4000),
    st.floats(1e-6, 1e6),
    st.floats(0, 1e4),
    st.floats(1e-3, 1e3),
    st.integers(0, 9),
)
def test_no_sum_leaves_int32(filters, count, weight_size, bias_size, reach, seed):
    weight = random(filters, count, seed=seed) * np.float32(weight_size)
    bias = random(filters, seed=seed + 1).astype(np.float64) * bias_size
    scale = wide_scale((-reach, reach), balanced_steps([(weight, 0)]))
    steps = wide_weight_steps(weight, 0, scale, bias)
    codes = np.rint(weight / steps[:, None]).astype(np.int64)
    assert np.abs(codes).max() <= np.iinfo(np.int16).max
    sums = np.abs(codes).sum(axis=1) * scale.largest
    assert np.all(sums + np.abs(np.rint(bias / (steps * float(scale.step)))) < 2**31)


def test_a_model_that_stays_at_its_opset_has_no_int16():
    assert can_be_wide(network())
    scan = make_model([node("Upsample", "x s", "y")], {"x": (1, 1, 2, 2)}, {"y": (1, 1, 4, 4)},
                      {"s": np.array([1, 1, 2, 2], np.float32)}, opset=9)  # fmt: skip
    assert not can_be_wide(scan)


@pytest.mark.parametrize(
    ("devices", "expected"),
    [
        ((("llvm", "x86-64-v3"),), True),
        ((("llvm", "x86-64-v4"),), True),
        ((("llvm", "x86-64-v2"),), False),
        ((("llvm", "neoverse-n1"),), False),
        ((("cuda", "sm_90"),), False),
        ((("llvm", "x86-64-v3"), ("cuda", "sm_90")), False),
    ],
)
def test_what_computes_on_int16(devices, expected):
    found = [Device(f"{kind}:{i}", kind, cpu) for i, (kind, cpu) in enumerate(devices)]
    assert multiplies_int16(found) == expected


def cost_of(calibrated, has_wide=True):
    return predict(calibrated.model, calibrated.anchors, DEVICE, None, has_wide)


def test_int16_costs_between_int8_and_fp32(calibrated):
    cost = cost_of(calibrated)
    for layer in cost.layers.values():
        assert 0 < layer.wide_seconds <= layer.saved_seconds
        assert 0 < layer.wide_bytes < layer.saved_bytes
    names = list(cost.layers)
    assert cost.seconds_with(names) <= cost.seconds_with([], names) < cost.seconds_with([])
    assert cost.bytes_with(names) < cost.bytes_with([], names) < cost.bytes_with([])


def test_without_kernels_for_int16_none_is_offered(calibrated):
    assert cost_of(calibrated, has_wide=False).ranked_wide(dict.fromkeys("abc", 1e-3)) == {}


BOUNDS = (1e-9, 5e-3, 0.02, 0.5)


@pytest.fixture(scope="module")
def searches(calibrated, loaded):
    """Searches by bound, and the same without int16."""
    costs = cost_of(calibrated), cost_of(calibrated, has_wide=False)
    return {
        bound: [search(calibrated, loaded, parse_budget(f"relative={bound}"), c) for c in costs]
        for bound in BOUNDS
    }


def test_a_search_is_never_slower_for_int16(searches):
    for wide, plain in searches.values():
        chosen = [one.point(one.chosen) for one in (wide, plain)]
        assert chosen[0].seconds <= chosen[1].seconds
        assert not plain.wide


def test_a_tight_budget_is_kept_by_int16(searches):
    wide, plain = searches[5e-3]
    assert len(plain.names) < 3
    assert len(wide.wide) >= 2
    assert wide.chosen == len(wide.names) + len(wide.wide)
    assert wide.point(wide.chosen).value <= 5e-3


def test_where_all_fit_in_int8_none_is_in_int16(searches):
    wide, _ = searches[0.5]
    assert (len(wide.names), wide.wide) == (3, [])


def test_where_none_fits_none_is_in_integers(searches):
    wide, _ = searches[1e-9]
    assert wide.chosen == 0


def test_points_of_a_curve_with_both_kinds(searches):
    for wide, _ in searches.values():
        for before, after in itertools.pairwise(wide.points):
            assert after.count > before.count
            assert after.seconds < before.seconds


def test_a_layer_is_in_int8_only_if_it_gains_by_that(calibrated, loaded):
    """Where int16 saves as much, nothing is given for a smaller number."""
    cost = cost_of(calibrated)
    same = {
        name: layer.__class__(layer.seconds, layer.saved_seconds, 3, layer.saved_seconds, 2)
        for name, layer in cost.layers.items()
    }
    equal = ModelCost(cost.seconds, cost.bytes, same, cost.profile)
    found = search(calibrated, loaded, parse_budget("relative=0.005"), equal)
    assert (found.names, sorted(found.wide)) == ([], ["a", "b", "c"])


def test_a_compile(tmp_path):
    model = save(network(), tmp_path / "network.onnx")
    data = write_samples(tmp_path / "data", samples(12))
    outcome = hybridc(
        "compile", model, "-o", tmp_path / "bundle", "--precision", "auto", "--calibration", data,
        "--accuracy-budget", "relative=0.005", "--target", "llvm:x86-64-v3",
    )  # fmt: skip
    assert outcome.code == 0, outcome.stderr
    assert "in int16" in outcome.stdout
    assert "relative <= 0.005 is kept" in outcome.stdout
