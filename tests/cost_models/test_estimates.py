"""Estimates: by hand for rooflines, by exact signature for measurements, and recovered by a fit."""

import dataclasses
import json
import math
import random as randomness

import onnx
import onnx_ir as ir
import pytest
from hybridc.cost_models.calibrate import FEWEST, calibrate, fit_roofline
from hybridc.cost_models.cost import CALIBRATED, DATA_SHEET, MEASURED, UNKNOWN, Ranked
from hybridc.cost_models.device import DeviceProfile, MemoryLevel
from hybridc.cost_models.group_work import GroupWork, NodeWork, describe_group
from hybridc.cost_models.measured import Code, Measured, Measurement, parse_measurements
from hybridc.cost_models.operators import CONVOLUTION, DEPTHWISE, ELEMENTWISE, PRODUCT, VIEW
from hybridc.cost_models.roofline import (
    BANDWIDTH_SHARE,
    DATA_SHEET_CONFIDENCE,
    EFFICIENCY,
    CalibratedRoofline,
    Roofline,
)

from hybridc.errors import UsageError
from tests.models import branched_model, make_model, node, random

DEVICE = DeviceProfile(
    "a board",
    "data sheet",
    "made up",
    {"float32": 1e9, "int8": 4e9},
    (MemoryLevel("cache", 1000, 1e10), MemoryLevel("memory", 10**9, 1e9)),
    launch_seconds=1e-6,
)
CODE = Code("llvm", "x86-64-v3", {"hybridc": "1"})


def group(operations, count, kind=PRODUCT, dtype="float32", signature="s"):
    return GroupWork((NodeWork("N", kind, dtype, operations),), count, 0, 0, signature)


def groups_of(model):
    """Work of each node alone, by the node's name."""
    return {str(n.name): describe_group([n]) for n in ir.from_proto(model).graph}


@pytest.mark.parametrize(
    ("work", "seconds"),
    [
        (group(6_000_000, 10), 6e-3 / EFFICIENCY[PRODUCT]),
        (group(6_000_000, 10, dtype="int8"), 1.5e-3 / EFFICIENCY[PRODUCT]),
        (group(6_000_000, 10, dtype="uint4"), 6e-3 / EFFICIENCY[PRODUCT]),
        (group(6_000_000, 10, kind=DEPTHWISE), 6e-3 / EFFICIENCY[DEPTHWISE]),
        (group(1, 1000), 1e-7 / BANDWIDTH_SHARE),
        (group(1, 1001), 1.001e-6 / BANDWIDTH_SHARE),
        (group(0, 0), 0),
    ],
)
def test_roofline(work, seconds):
    cost = Roofline().estimate(work, DEVICE)
    assert cost.seconds == pytest.approx(1e-6 + seconds)
    assert (cost.source, cost.confidence) == (DATA_SHEET, DATA_SHEET_CONFIDENCE)
    assert cost.bytes == work.bytes


def test_a_profile_may_know_an_efficiency_better():
    better = dataclasses.replace(DEVICE, efficiency={PRODUCT: 1.0})
    assert Roofline().estimate(group(10**6, 0), better).seconds == pytest.approx(1e-6 + 1e-3)


def test_views_cost_no_kernel_and_unknown_sizes_a_launch():
    assert Roofline().estimate(group(0, 10**9, kind=VIEW), DEVICE).seconds < 1e-6
    assert Roofline().estimate(group(-1, 0), DEVICE) is None
    cost = Ranked([Roofline()]).estimate(group(-1, 0), DEVICE)
    assert (cost.seconds, cost.source, cost.confidence) == (1e-6, UNKNOWN, 0.0)


def test_work_of_a_group():
    nodes = list(ir.from_proto(onnx.shape_inference.infer_shapes(branched_model())).graph)
    stem, relu = nodes[0], nodes[0].outputs[0].uses()[0].node
    alone, fused = describe_group([stem]), describe_group([stem, relu])
    assert alone.nodes[0].kind == CONVOLUTION
    assert fused.operations == alone.operations + describe_group([relu]).operations
    assert fused.weight_bytes == alone.weight_bytes > 0
    assert fused.read_bytes == alone.read_bytes == 4 * 3 * 8 * 8


def test_what_stays_in_a_group_moves_no_bytes():
    nodes = [node("Relu", "x", "a", "a"), node("Sigmoid", "a", "y", "b")]
    model = make_model(nodes, {"x": (10,)}, {"y": (10,)})
    pair = list(ir.from_proto(model).graph)
    pair[0].outputs[0].shape, pair[0].outputs[0].dtype = ir.Shape([10]), ir.DataType.FLOAT
    assert describe_group(pair).bytes == 80
    assert describe_group(pair[:1]).bytes == describe_group(pair[1:]).bytes == 80
    assert {work.kind for work in describe_group(pair).nodes} == {ELEMENTWISE}


def signature(shape=(4, 5), name="n", weights=None, **attributes):
    constants = {"w": random(5, 6) if weights is None else weights}
    nodes = [node("Gemm", "x w", "y", name, **attributes)]
    return groups_of(make_model(nodes, {"x": shape}, {"y": (4, 6)}, constants))[name].signature


def test_signatures_are_exact():
    """Names and values of large weights do not matter; sizes and attributes do."""
    same = signature()
    assert signature(name="other") == same
    assert signature(alpha=2.0) != same
    assert signature(shape=(5, 4), transA=1) != same
    big = [signature((4, 500), weights=random(500, 6) + i) for i in (0, 1)]
    assert big[0] == big[1] != same


def test_measurements_count_for_the_very_code_only():
    work = group(10, 10)
    row = Measurement(work, CODE, 0.5, 0.1, 30)
    cost = Measured([row], CODE).estimate(work, DEVICE)
    assert (cost.seconds, cost.source, cost.confidence) == (0.5, MEASURED, 0.9)
    assert Measured([row], CODE).estimate(group(10, 10, signature="t"), DEVICE) is None
    for other in (
        dataclasses.replace(CODE, kind="cuda"),
        dataclasses.replace(CODE, specification="znver3"),
        dataclasses.replace(CODE, versions={"hybridc": "2"}),
    ):
        assert Measured([row], other).estimate(work, DEVICE) is None


def test_the_most_trusted_model_answers():
    work = group(10, 10)
    factors = {"launch": 0.0, "weights": 1.0, f"moving {PRODUCT}": 1.0, PRODUCT: 2.0}
    fitted = CalibratedRoofline(factors, 0.2)
    measured = Measured([Measurement(work, CODE, 0.5, 0.0, 30)], CODE)
    ranked = Ranked([measured, fitted, Roofline()])
    assert ranked.estimate(work, DEVICE).source == MEASURED
    assert ranked.estimate(group(10, 10, signature="t"), DEVICE).source == CALIBRATED
    assert ranked.estimate(group(10, 10, DEPTHWISE, signature="t"), DEVICE).source == DATA_SHEET


def measurements(count, noise, seed=0):
    """Groups on a machine with known factors, whose times are off by up to ``noise``."""
    source = randomness.Random(seed)
    rows = []
    for number in range(count):
        kind = source.choice((CONVOLUTION, PRODUCT, ELEMENTWISE))
        operations, size = int(10 ** source.uniform(3, 8)), int(10 ** source.uniform(2, 6))
        work = group(operations, size, kind, signature=str(number))
        factor = {CONVOLUTION: 1.25, PRODUCT: 2.0, ELEMENTWISE: 8.0}[kind]
        rate = DEVICE.level(size).bytes_per_second
        seconds = 4e-6 + factor * operations / 1e9 + 1.5 * size / rate
        seconds *= 1 + source.uniform(-noise, noise)
        rows.append(Measurement(work, CODE, seconds, 0.0, 30))
    return rows


def test_a_fit_recovers_the_machine():
    rows = measurements(60, 0.0)
    wanted = {CONVOLUTION: 1.25, PRODUCT: 2.0, ELEMENTWISE: 8.0}
    moving = {f"moving {kind}": 1.5 for kind in wanted}
    all_of_them = {"launch": 4e-6, "weights": 0.0, **wanted, **moving}
    assert fit_roofline(rows, DEVICE).factors == pytest.approx(all_of_them, rel=1e-2)
    fitted = calibrate(rows, DEVICE)
    for name, value in all_of_them.items():
        assert fitted.factors[name] == pytest.approx(value, rel=5e-2)
    assert fitted.error < 1e-2


def test_a_fit_sees_that_small_groups_do_not_fill_a_device():
    """Where the rate grows with the root of the work, up to the peak."""
    rows = [
        dataclasses.replace(row, seconds=2e-6 + math.sqrt(row.work.operations / 1e9 * 9e-6))
        for row in measurements(80, 0.0)
    ]
    fresh = rows[:20]
    plain, fitted = fit_roofline(rows[20:], DEVICE), calibrate(rows[20:], DEVICE)

    def error(model):
        found = [model.estimate(row.work, DEVICE).seconds / row.seconds for row in fresh]
        return sorted(abs(ratio - 1) for ratio in found)[10]

    assert error(fitted) < 0.02 < 0.1 < error(plain)


def test_a_fit_is_as_often_too_fast_as_too_slow():
    """Though some groups take five times as long as others of the same size."""
    source = randomness.Random(0)
    rows = [
        dataclasses.replace(row, seconds=row.seconds * 5 ** source.uniform(-0.5, 0.5))
        for row in measurements(300, 0.0)
    ]
    fitted = fit_roofline(rows, DEVICE)
    ratios = sorted(fitted.estimate(row.work, DEVICE).seconds / row.seconds for row in rows)
    assert ratios[len(ratios) // 2] == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize("seed", range(5))
def test_the_error_that_a_fit_claims_holds_on_other_groups(seed):
    fitted = calibrate(measurements(80, 0.2, seed), DEVICE)
    fresh = measurements(200, 0.2, seed + 100)
    errors = sorted(abs(fitted.estimate(m.work, DEVICE).seconds / m.seconds - 1) for m in fresh)
    assert 0.02 < fitted.error < 0.25
    assert errors[len(errors) // 2] < 2 * fitted.error
    assert fitted.estimate(fresh[0].work, DEVICE).confidence == 1 - fitted.error


def test_too_few_measurements_are_not_fitted():
    assert calibrate(measurements(FEWEST - 1, 0.0), DEVICE) is None


def as_json(row):
    return json.loads(json.dumps(dataclasses.asdict(row)))


def test_measurements_as_json():
    (row,) = measurements(1, 0.0)
    assert parse_measurements([as_json(row)], "m.json")[0].work.signature == "0"
    with pytest.raises(UsageError, match=r"m\.json holds no measurements"):
        parse_measurements([{**as_json(row), "seconds": 0.0}], "m.json")
    with pytest.raises(UsageError, match=r"m\.json holds no measurements"):
        parse_measurements([{"seconds": 1.0}], "m.json")
