"""Precision per layer under a budget: the search, its costs, its curve, and the whole compile."""

from __future__ import annotations

import itertools
import json
from xml.etree import ElementTree

import numpy as np
import onnx
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from onnx import numpy_helper

from hybridc.precision.budget import Budget, parse_budget
from hybridc.precision.costs import predict
from hybridc.precision.curve import as_json, as_svg, as_table
from hybridc.precision.search import (
    USED,
    afford_halves,
    fitting,
    has_room,
    is_lost,
    search,
)
from tests.models import save
from tests.precision.data import DEVICE, network, samples, write_samples
from tests.support import assert_compile_refused, hybridc


@pytest.fixture(scope="module")
def found(calibrated, loaded):
    """Searches by bound."""
    cost = predict(calibrated.model, calibrated.anchors, DEVICE, None)
    bounds = (1e-9, 0.01, 0.5)
    return {b: search(calibrated, loaded, parse_budget(f"relative={b}"), cost) for b in bounds}


def test_a_looser_budget_takes_more_layers(found):
    counts = [found[bound].chosen for bound in sorted(found)]
    assert counts[0] == 0
    assert counts == sorted(counts)
    assert counts[-1] == 3


def test_what_is_chosen_keeps_the_budget(found):
    for bound, result in found.items():
        chosen = result.point(result.chosen)
        assert chosen.value <= bound
        assert len(result.names) == result.chosen
        assert all(layer.reason for layer in result.layers if layer.precision == "fp32")


def test_the_curve_rises_in_error_and_falls_in_time_and_size(found):
    points = found[0.5].points
    for before, after in itertools.pairwise(points):
        assert after.count > before.count
        assert after.seconds < before.seconds
        assert after.bytes < before.bytes
    assert points[0].value == pytest.approx(0, abs=1e-5)
    assert points[-1].value > 0


@pytest.mark.parametrize(("bound", "halves"), [("1e-6", False), ("0.5", True)])
def test_weights_of_float_layers_are_rounded_where_the_budget_hardly_feels_it(
    calibrated, loaded, bound, halves
):
    budget = parse_budget(f"relative={bound}")
    model = afford_halves(calibrated, loaded, budget).quantized(["b"])
    weights = [
        numpy_helper.to_array(next(t for t in one.graph.initializer if t.name == "a.w"))
        for one in (calibrated.model, model)
    ]
    rounded = weights[0].astype(np.float16).astype(np.float32)
    assert np.any(rounded != weights[0])
    assert np.array_equal(weights[1], rounded if halves else weights[0])


def test_layers_behind_one_that_does_not_fit_are_tried():
    def is_kept(names):
        return sum(prices[name] for name in names) <= 10

    prices = {"a": 6, "b": 5, "c": 3, "d": 2, "e": 1}
    assert fitting("abcde", is_kept) == ["a", "c", "e"]
    assert fitting("ab", is_kept) == ["a"]
    assert fitting("cde", is_kept) == ["c", "d", "e"]
    assert fitting("", is_kept) == []
    prices["a"] = 11
    assert fitting("abcde", is_kept) == ["b", "c", "d"]


@given(st.lists(st.floats(0.9, 1), min_size=1, max_size=30), st.floats(0.9, 0.9999))
@pytest.mark.parametrize("metric", ["cosine", "mean-cosine", "top1"])
def test_a_budget_is_given_up_only_if_it_cannot_be_kept(metric, values, bound):
    budget = parse_budget(f"{metric}={bound}")
    prefixes = [values[:count] for count in range(1, len(values) + 1)]
    lost = [is_lost(budget, prefix, len(values)) for prefix in prefixes]
    assume(abs(1 - budget.fold(values) - USED * (1 - bound)) > 1e-9)
    assert any(lost) == (not has_room(budget, budget.fold(values)))


def test_a_metric_that_may_fall_below_zero_is_never_given_up():
    budget = Budget("own:metric", 0.1, lambda old, new: 0.0, sum, at_least=False)
    assert not is_lost(budget, [1e9], 2)


def test_a_part_of_the_budget_is_left_for_other_samples():
    budget = parse_budget("cosine=0.99")
    assert has_room(budget, 0.9955)
    assert not has_room(budget, 0.991)
    assert not has_room(budget, float("nan"))


def test_costs_of_layers_are_part_of_the_model(found):
    model = onnx.shape_inference.infer_shapes(network())
    cost = predict(model, {"a", "b", "c"}, DEVICE, None)
    assert set(cost.layers) == {"a", "b", "c"}
    assert sum(layer.seconds for layer in cost.layers.values()) <= cost.seconds
    assert all(0 < layer.saved_seconds < layer.seconds for layer in cost.layers.values())
    assert cost.bytes == sum(len(t.raw_data) for t in model.graph.initializer)


def test_the_curve_as_texts(found):
    result = found[0.01]
    assert json.loads(as_json(result))["chosen"] == result.chosen
    table = as_table(result)
    assert table.count("chosen") == 1
    assert all(f"| {layer.name} |" in table for layer in result.layers)
    plot = ElementTree.fromstring(as_svg(result))
    circles = [element for element in plot.iter() if element.tag.endswith("circle")]
    assert len(circles) == 2 * len(result.points)


def compile_under_budget(folder, *options):
    """What a compile of the network prints that keeps its budget, and the curve that it writes."""
    model = save(network(), folder / "network.onnx")
    data, output = write_samples(folder / "data", samples(12)), folder / "bundle"
    curve = folder / "curve.json"
    outcome = hybridc(
        "compile", model, "-o", output, "--precision", "auto", "--calibration", data,
        "--accuracy-budget", "relative=0.01", "--trade-off", curve, *options,
    )  # fmt: skip
    assert outcome.code == 0, outcome.stderr
    assert "relative <= 0.01 is kept" in outcome.stdout
    return outcome.stdout, json.loads(curve.read_text())


def test_a_compile(tmp_path):
    printed, written = compile_under_budget(tmp_path)
    for layer in written["layers"]:
        stays = f"{layer['name']} stays fp32: {layer['reason']}"
        assert (stays in printed) == (layer["precision"] == "fp32")


AUTO = ("--precision", "auto", "--calibration", "{data}", "--accuracy-budget", "cosine=0.9")
BAD = [
    (("--precision", "auto", "--accuracy-budget", "cosine=0.9"), "--calibration"),
    (("--precision", "auto", "--calibration", "{data}"), "--accuracy-budget"),
    (("--precision", "int8", "--calibration", "{data}", "--trade-off", "x.svg"), "auto"),
    (("--trade-off", "x.svg"), "--precision"),
    ((*AUTO, "--trade-off", "x.png"), ".svg"),
]


@pytest.mark.parametrize(("options", "word"), BAD, ids=[str(i) for i in range(len(BAD))])
def test_what_is_refused(tmp_path, options, word):
    model = save(network(), tmp_path / "network.onnx")
    data = write_samples(tmp_path / "data", samples(3))
    filled = tuple(option.format(data=data) for option in options)
    assert_compile_refused(model, tmp_path, 2, word, options=filled)
