"""The drawing of a sweep: lines stand where the figures say, and names cannot break it."""

import xml.etree.ElementTree as ElementTree

import pytest

from hybridc.placement.sweep_plot import OWN, sweep_svg
from tests.models import branched_model, save
from tests.support import hybridc

SVG = "{http://www.w3.org/2000/svg}"


def point(label, value, groups, **alternatives):
    prediction = {"objective": "latency", "value": value, "alternatives": alternatives}
    return {"label": label, "value": float(label), "groups": groups, "prediction": prediction}


def sweep(*points, moved=()):
    crossovers = [{"group": "g", "from": "a", "to": "b", "at": 4.0, "label": at} for at in moved]
    return {"dimension": "batch", "points": points, "crossovers": crossovers}


SWEEP = sweep(
    point("1", 0.001, {"a": 4}, greedy=0.001, **{"all <b>": 0.01}),
    point("2", 0.004, {"a": 4}, greedy=0.008),
    point("4", 0.009, {"a": 1, "b": 3}, greedy=0.1, **{"all <b>": 0.01}),
    moved=("4", "4"),
)


def draw(data):
    return ElementTree.fromstring(sweep_svg(data, lambda value: f"{value:g} s"))


def corners(line):
    return [tuple(map(float, pair.split(","))) for pair in line.get("points").split()]


def test_lines_stand_where_the_figures_say():
    own, greedy, everything = map(corners, draw(SWEEP).iter(f"{SVG}polyline"))
    assert own[0] == greedy[0], "the same cost at the same value"
    assert len(everything) == 2, "a plan that does not exist at a value is left out there"
    assert everything[0][1] == everything[1][1], "the same cost at two values"
    assert [x for x, _ in own] == [x for x, _ in greedy]
    heights = dict(zip((0.001, 0.004, 0.009), (y for _, y in own), strict=True))
    heights |= {0.008: greedy[1][1], 0.1: greedy[2][1], 0.01: everything[0][1]}
    assert sorted(heights, reverse=True) == sorted(heights, key=heights.__getitem__)
    decade = heights[0.001] - heights[0.01]
    assert heights[0.01] - heights[0.1] == pytest.approx(decade, abs=0.2), "logarithmic"


def test_names_scales_and_moves_are_written():
    texts = [text.text for text in draw(SWEEP).iter(f"{SVG}text")]
    assert {OWN, "greedy", "all <b>", "a", "b", "1", "2", "4", "latency over batch"} <= set(texts)
    assert {"0.001 s", "0.01 s", "0.1 s", "2 move"} <= set(texts)


def test_bars_are_shares_of_the_groups():
    boxes = [box for box in draw(SWEEP).iter(f"{SVG}rect") if box.get("class") == "share"]
    heights = [float(box.get("height")) for box in boxes]
    assert heights == [40.0, 0.0, 40.0, 0.0, 10.0, 30.0]


@pytest.mark.parametrize("values", [(0.0, 2.0), (3.0, 3.0), (0.0, 0.0), (1e-9, 1e9)])
def test_odd_ranges_stay_in_the_drawing(values):
    first, second = (point(label, v, {"a": 1}) for label, v in zip("12", values, strict=True))
    (line,) = draw(sweep(first, second)).iter(f"{SVG}polyline")
    assert all(40 <= y <= 320 for _, y in corners(line))


def test_plot_from_the_command_line(tmp_path):
    save(branched_model(), tmp_path / "m.onnx")
    targets = ("--target", "llvm:znver3", "--target", "cuda:sm_90")
    command = ("plan", tmp_path / "m.onnx", *targets, "--plot", tmp_path / "s.svg")
    outcome = hybridc(*command)
    assert (outcome.code, "--plot draws a --sweep" in outcome.stderr) == (2, True), outcome
    outcome = hybridc(*command, "--sweep", "link.bandwidth=1gbit,4gbit,16gbit")
    assert outcome.code == 0, outcome
    drawing = ElementTree.parse(tmp_path / "s.svg").getroot()
    assert len(list(drawing.iter(f"{SVG}polyline"))) == 4
    texts = [text.text for text in drawing.iter(f"{SVG}text")]
    assert {"1gbit", "16gbit", "all on llvm:0", "latency over link.bandwidth"} <= set(texts)
