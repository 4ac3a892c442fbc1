"""Static int8 step by step: histograms, ranges, smoothing, QDQ form, layers that stay float."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from hybridc.errors import UsageError
from hybridc.precision.anchors import anchors_of, quantizable, taking_part
from hybridc.precision.observe import BINS, Channels, Histogram, observe
from hybridc.precision.qdq import insert_qdq
from hybridc.precision.ranges import METHODS, range_of
from hybridc.precision.rounding import round_weights
from hybridc.precision.scales import scale_of
from hybridc.precision.smooth import best_scales, expected_error, scales_of, smooth
from hybridc.precision.static import calibrate_model, sensitive, sensitivities
from hybridc.reference import open_session
from tests.models import make_model, node, random, run_reference
from tests.precision.data import network, samples


def histogram(*arrays):
    found = Histogram()
    for array in arrays:
        found.add(np.asarray(array, np.float32))
    return found


@pytest.mark.parametrize("factors", [(1, 1), (1, 10, 1000), (1000, 1)])
def test_a_histogram_widens_without_losing_numbers(factors):
    arrays = [random(5000, seed=i) * np.float32(f) for i, f in enumerate(factors)]
    found, together = histogram(*arrays), np.concatenate(arrays)
    assert found.counts.sum() == together.size
    assert (found.low, found.high) == (together.min(), together.max())
    bins = np.histogram(together, BINS, (-found.limit, found.limit))[0]
    assert np.abs(np.cumsum(bins) - np.cumsum(found.counts)).max() <= 3  # at edges of bins


def test_a_histogram_of_zeros():
    assert range_of(histogram(np.zeros(4)), "percentile") == (0, 0)
    assert scale_of((0, 0)).step == 1


@pytest.mark.parametrize("method", METHODS)
def test_ranges_hold_zero_and_lie_within_what_occurred(method):
    for array in (random(9999), np.abs(random(9999)), -np.abs(random(9999))):
        low, high = range_of(histogram(array), method)
        assert min(0, array.min()) <= low <= 0 <= high <= max(0, array.max())
        assert high - low > 0.3 * np.ptp(array)


def rounded(array, span):
    scale = scale_of(span)
    codes = np.clip(np.rint(array / scale.step) + scale.zero, 0, 255)
    return (codes - scale.zero) * scale.step


def test_outliers_cost_less_with_the_methods_that_clip():
    parts = [random(50000, seed=seed) for seed in range(8)]
    parts.append(np.array([20], np.float32))
    found, array = histogram(*parts), np.concatenate(parts)
    errors = {m: np.mean((array - rounded(array, range_of(found, m))) ** 2) for m in METHODS}
    widths = {m: np.ptp(range_of(found, m)) for m in METHODS}
    assert widths["percentile"] < 0.5 * widths["min-max"]
    assert errors["mse"] <= min(errors.values()) * 1.05
    assert errors["mse"] < errors["min-max"]


def test_numbers_that_are_not_finite_are_refused():
    model = make_model([node("Log", "x", "l"), node("Relu", "l", "y")], {"x": (2,)}, {"y": (2,)})
    with pytest.raises(UsageError, match="infinite"):
        observe(model, ["l"], [{"x": np.zeros(2, np.float32)}])


def transformer():
    """Two products that read one tensor with a large channel, which a residual reads, too."""
    nodes = [
        node("Mul", "x large", "h", "scale"),
        node("MatMul", "h a", "p", "first"),
        node("Gemm", "h b c", "q", "second", transB=1),
        node("Add", "p q", "s", "join"),
        node("Add", "s h", "y", "residual"),
    ]
    large = np.ones(32, np.float32)
    large[[3, 17]] = 60
    weights = {
        "large": large,
        "a": random(32, 32, seed=1) / large[:, None],
        "b": random(32, 32, seed=2) / large,
        "c": random(32, seed=3),
    }
    return make_model(nodes, {"x": (16, 32)}, {"y": (16, 32)}, weights)


def inputs(count, start=0):
    return [{"x": random(16, 32, seed=start + seed)} for seed in range(count)]


def test_smoothing_keeps_what_is_computed_and_makes_int8_better():
    model, held = transformer(), inputs(4, 50)
    names = anchors_of(model)
    seen = observe(model, ["h"], inputs(8))
    smoothed = smooth(model, names, seen.channels)
    onnx.checker.check_model(smoothed)
    errors = {}
    for key, candidate in (("plain", model), ("smooth", smoothed)):
        tensors = [n.input[0] for n in candidate.graph.node if n.name in names]
        found = observe(candidate, tensors, inputs(8)).histograms
        ranges = {name: range_of(h, "min-max") for name, h in found.items()}
        int8 = insert_qdq(candidate, names, ranges)
        onnx.checker.check_model(int8)
        for x in held:
            (exact,), (same,), (got,) = (
                run_reference(m, x).values() for m in (model, candidate, int8)
            )
            np.testing.assert_allclose(same, exact, rtol=1e-4, atol=1e-3)
            errors[key] = max(errors.get(key, 0), np.square(got - exact).mean())
    assert errors["smooth"] < 0.5 * errors["plain"]


def test_scales_are_powers_of_two():
    scales = scales_of(np.array([1.0, 1.0, 50.0, 0.0]), np.ones(4), 0.8)
    assert np.all(np.exp2(np.rint(np.log2(scales))) == scales)
    assert scales[2] > 8 * scales[0]


def test_smoothing_is_left_where_weights_would_suffer_more():
    large = np.ones(32)
    large[3] = 60
    weight = random(32, 16)
    even, peaked = (Channels(3 * size, size**2 * 100, 100) for size in (np.ones(32), large))
    assert best_scales(even, weight) is None
    assert best_scales(peaked, weight / large[:, None]) is not None
    scales = best_scales(peaked, weight)
    plain = expected_error(peaked, weight, np.ones(32))
    assert scales is None or expected_error(peaked, weight, scales) < plain


def test_channels_of_all_samples_count():
    arrays = inputs(5)
    seen = observe(transformer(), ["x"], arrays).channels["x"]
    together = np.concatenate([x["x"] for x in arrays])
    np.testing.assert_array_equal(seen.largest, np.abs(together).max(axis=0))
    np.testing.assert_allclose(seen.mean_squares, np.square(together).mean(axis=0), rtol=1e-5)


def test_a_residual_stays_float():
    model = transformer()
    int8 = insert_qdq(model, anchors_of(model), {"h": (-200.0, 200.0)})
    residual = next(n for n in int8.graph.node if n.name == "residual")
    assert "h" in residual.input
    assert sum(n.op_type == "QuantizeLinear" for n in int8.graph.node) == 1  # for both readers


def test_a_bias_beyond_int32_widens_its_weight():
    weights = {"w": random(8, 4) * np.float32(1e-6), "b": np.full(8, 1e4, np.float32)}
    nodes = [node("Gemm", "x w b", "y", "g", transB=1)]
    model = make_model(nodes, {"x": (2, 4)}, {"y": (2, 8)}, weights)
    int8 = insert_qdq(model, ["g"], {"x": (-1, 1)})
    (got,) = run_reference(int8, {"x": random(2, 4) / np.float32(4)}).values()
    np.testing.assert_allclose(got, 1e4, rtol=1e-5)


def test_what_is_next_to_float_layers_stays_float():
    model = onnx.shape_inference.infer_shapes(network())
    assert quantizable(model) == ["a", "b", "join", "pool", "c"]
    assert taking_part(model, ["c"]) == {"c"}
    assert taking_part(model, ["b"]) == {"b", "join", "pool"}


def test_layers_that_cost_much_are_found():
    model = network()
    calibrated = calibrate_model(model, [{"x": x} for x in samples()], "percentile")
    errors = sensitivities(calibrated, [{"x": x} for x in samples(2)])
    assert list(errors) == ["a", "b", "c"]
    assert all(0 <= error < 0.01 for error in errors.values())
    many = {f"layer{i}": 1e-5 for i in range(28)} | {"worst": 0.1, "bad": 0.01}
    assert sensitive(many) == ["worst", "bad"]
    assert sensitive({"only": 0.5}) == []


def test_ranges_leave_out_what_an_activation_does_not_tell_apart():
    nodes = [node("Conv", "x w", "c", "conv"), node("HardSwish", "c", "y", "act")]
    weights = {"w": random(8, 4, 1, 1) * np.float32(9)}
    model = make_model(nodes, {"x": (1, 4, 6, 6)}, {"y": (1, 8, 6, 6)}, weights)
    model = onnx.shape_inference.infer_shapes(model)
    calibrated = calibrate_model(model, [{"x": random(1, 4, 6, 6)}], "min-max")
    low, high = calibrated.ranges["c"]
    assert low == -3
    assert high > 10


@pytest.mark.parametrize("kernel", [1, 3])
def test_activations_behind_pixels_are_computed_before_rounding(kernel):
    nodes = [
        node("Conv", "x w b", "c", "first"),
        node("HardSwish", "c", "h", "act"),
        node("Mul", "h two", "m", "scale"),
        node("Conv", "m v", "y", "second"),
    ]
    weights = {
        "w": random(8, 4, kernel, kernel, seed=1),
        "b": random(8, seed=2),
        "two": np.array(2, np.float32),
        "v": random(8, 8, 1, 1, seed=3),
    }
    size = 7 - kernel
    model = make_model(nodes, {"x": (1, 4, 6, 6)}, {"y": (1, 8, size, size)}, weights)
    model = onnx.shape_inference.infer_shapes(model)
    calibrated = calibrate_model(model, [{"x": random(1, 4, 6, 6, seed=5)}], "min-max")
    int8 = calibrated.quantized(calibrated.anchors)
    onnx.checker.check_model(int8)
    rounded = [n.input[0] for n in int8.graph.node if n.op_type == "QuantizeLinear"]
    assert ("c" in rounded) == (kernel == 3)
    assert "m" in rounded
    last = calibrated.quantized(["first"])
    rounded = [n.input[0] for n in last.graph.node if n.op_type == "QuantizeLinear"]
    assert rounded == (["x", "c"] if kernel == 3 else ["x"])


@pytest.mark.parametrize("groups", [1, 8])
def test_rounding_weights_moves_no_mean(groups):
    """Of data far from zero, what rounding adds to each weight adds up."""
    nodes = [node("Conv", "x w b", "y", "conv", group=groups)]
    weights = {"w": random(8, 8 // groups, 3, 3), "b": random(8, seed=1)}
    model = make_model(nodes, {"x": (1, 8, 9, 9)}, {"y": (1, 8, 7, 7)}, weights)
    model = onnx.shape_inference.infer_shapes(model)
    inputs = [{"x": random(1, 8, 9, 9, seed=seed) + np.float32(5)} for seed in range(12)]
    means = observe(model, ["x"], inputs[:8]).means
    np.testing.assert_allclose(means["x"], 5, atol=0.3)
    ranges, moved = {"x": (0.0, 10.0)}, []
    for known in (None, means):
        run = open_session(insert_qdq(model, ["conv"], ranges, known).SerializeToString())
        plain = open_session(model.SerializeToString())
        errors = np.concatenate([run(x)["y"] - plain(x)["y"] for x in inputs[8:]])
        moved.append(np.abs(errors.mean(axis=(0, 2, 3))).max())
    assert moved[1] < 0.3 * moved[0]


@pytest.mark.parametrize("transposed", [0, 1])
def test_rounding_a_products_weights_moves_no_mean(transposed):
    matrix = random(16, 32) if transposed else random(32, 16)
    nodes = [node("Gemm", "x w b", "y", "g", transB=transposed)]
    weights = {"w": matrix, "b": random(16, seed=1)}
    model = make_model(nodes, {"x": (64, 32)}, {"y": (64, 16)}, weights)
    inputs = [{"x": random(64, 32, seed=seed) + np.float32(5)} for seed in range(2)]
    means = observe(model, ["x"], inputs[:1]).means
    int8 = insert_qdq(model, ["g"], {"x": (0.0, 10.0)}, means)
    plain = insert_qdq(model, ["g"], {"x": (0.0, 10.0)})
    exact, got, without = (
        open_session(m.SerializeToString())(inputs[1])["y"] for m in (model, int8, plain)
    )
    moved = [np.abs((y - exact).mean(axis=0)).max() for y in (without, got)]
    assert moved[1] < 0.3 * moved[0]


def test_sums_that_are_measured_do_not_saturate():
    """Pairs of products beyond int16, which ONNX Runtime's fast way on AVX2 cuts off."""
    weights = {"w": np.full((16, 64), 127, np.float32)}
    nodes = [node("Gemm", "x w", "y", "g", transB=1)]
    model = make_model(nodes, {"x": (2, 64)}, {"y": (2, 16)}, weights)
    int8 = insert_qdq(model, ["g"], {"x": (0.0, 255.0), "y": (0.0, 255.0 * 127 * 64)})
    x = np.full((2, 64), 255, np.float32)
    for optimize in (False, True):
        got = open_session(int8.SerializeToString(), optimize=optimize)({"x": x})["y"]
        np.testing.assert_allclose(got, 255 * 127 * 64, rtol=1e-5)


def test_weights_of_layers_that_stay_float_take_16_bits():
    model = network()
    calibrated = calibrate_model(model, [{"x": x} for x in samples()], "percentile")
    mixed = calibrated.quantized(["a", "c"])
    kept = {t.name: onnx.numpy_helper.to_array(t) for t in mixed.graph.initializer}
    name = next(n.input[1] for n in mixed.graph.node if n.name == "b")
    assert np.array_equal(kept[name], kept[name].astype(np.float16))
    original = next(t for t in model.graph.initializer if t.name == name)
    np.testing.assert_allclose(kept[name], onnx.numpy_helper.to_array(original), rtol=1e-3)
    assert calibrated.quantized([]) is calibrated.model


def test_weights_that_float16_would_change_stay():
    weights = {"w": random(8, 4) * np.float32(1e-7), "v": random(8, 4) * np.float32(1e6)}
    nodes = [node("Gemm", f"x {name}", f"y{name}", name, transB=1) for name in weights]
    model = make_model(nodes, {"x": (2, 4)}, {f"y{name}": (2, 8) for name in weights}, weights)
    round_weights(model, list(weights))
    for tensor in model.graph.initializer:
        np.testing.assert_array_equal(onnx.numpy_helper.to_array(tensor), weights[tensor.name])


def test_what_is_made_for_a_sum_alone_is_not_rounded():
    nodes = [
        node("Conv", "x w", "c", "first"),
        node("Mul", "c c", "m", "gate"),
        node("Add", "m c", "s", "inner"),
        node("Add", "s r", "t", "outer"),
        node("Conv", "x w", "r", "other"),
        node("Conv", "t v", "y", "last"),
    ]
    nodes[3], nodes[4] = nodes[4], nodes[3]
    weights = {"w": random(8, 4, 1, 1, seed=1), "v": random(8, 8, 1, 1, seed=3)}
    model = make_model(nodes, {"x": (1, 4, 6, 6)}, {"y": (1, 8, 6, 6)}, weights, opset=17)
    model = onnx.shape_inference.infer_shapes(model)
    calibrated = calibrate_model(model, [{"x": random(1, 4, 6, 6, seed=5)}], "min-max")
    int8 = calibrated.quantized(calibrated.anchors)
    onnx.checker.check_model(int8)
    rounded = [n.input[0] for n in int8.graph.node if n.op_type == "QuantizeLinear"]
    assert sorted(rounded) == ["c", "r", "t", "x"]
    x = {"x": random(1, 4, 6, 6, seed=5)}
    (exact,), (got,) = (run_reference(m, x).values() for m in (model, int8))
    assert 0 < np.abs(got - exact).max() < 0.1 * np.abs(exact).max()
