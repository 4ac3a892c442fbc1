"""The report as a page, its drawing, and the placement in the saved model."""

import json
import random
import re
from collections import Counter
from html.parser import HTMLParser

import numpy as np
import onnx
import onnxruntime
import pytest

from hybridc.placement.drawing import _GAP, _WIDTH, Edge, positions
from hybridc.placement.plan_file import plan_from_json
from tests.models import branched_model, make_model, node, run_reference, save
from tests.models import random as random_array
from tests.support import assert_close, assert_refused, hybridc

EVIL = "</script><img src=x onerror=alert(1)>&\"'"
OPTIONS = ("--target", "near=llvm", "--target", "far=llvm", "--link", "near-far=10gbit,1us")
PROFILES = ("--profile", "near=zen3", "--profile", "far=zen3")


class Page(HTMLParser):
    """Tags with their attributes, and texts by the tag around them."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.texts, self.open = [], {}, []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        self.open.append(tag)

    def handle_endtag(self, tag):
        while self.open and self.open.pop() != tag:
            pass

    def handle_data(self, data):
        self.texts.setdefault(self.open[-1] if self.open else "", []).append(data)


@pytest.fixture
def planned(tmp_path):
    """A plan with both devices in use, its page, and the saved model."""
    model = branched_model()
    model.graph.node[0].name = EVIL
    save(model, tmp_path / "m.onnx")
    outcome = hybridc(
        *("plan", tmp_path / "m.onnx", *OPTIONS, *PROFILES, "--pin", "right*=far"),
        *("-o", tmp_path / "p.json", "--html", tmp_path / "p.html"),
        *("--save-model", tmp_path / "s.onnx"),
    )
    assert outcome.code == 0, outcome
    return plan_from_json((tmp_path / "p.json").read_text(), "p.json"), tmp_path


def test_the_page_shows_every_group_once(planned):
    plan, folder = planned
    page = Page((folder / "p.html").read_text())
    boxes = [a["data-group"] for tag, a in page.tags if a.get("class") == "group"]
    assert boxes == [str(index) for index in range(len(plan.groups))]
    fills = Counter(a["fill"] for tag, a in page.tags if tag == "rect")
    assert sorted(fills.values()) == sorted(Counter(g.device for g in plan.groups).values())
    pairs = [(t.source, r) for t in plan.tensors if t.source >= 0 for r in t.readers]
    apart = sum(plan.groups[a].device != plan.groups[b].device for a, b in pairs)
    lines = Counter(a["class"] for tag, a in page.tags if tag == "path")
    assert lines == {"copy": apart, "edge": len(pairs) - apart}
    assert apart > 0
    texts = json.loads(page.texts["script"][0])
    for group, text in zip(plan.groups, texts, strict=True):
        assert text.startswith(f"{group.name} runs on {group.device}: {group.why}")


def test_the_page_needs_nothing_and_runs_nothing_of_the_model(planned):
    _, folder = planned
    text = (folder / "p.html").read_text()
    page = Page(text)
    assert not {"img", "link", "iframe", "object"} & {tag for tag, _ in page.tags}
    assert not any({"src", "href", "onerror"} & attributes.keys() for _, attributes in page.tags)
    assert set(re.findall(r"https?://[^\"\s]*", text)) == {"http://www.w3.org/2000/svg"}
    assert "@import" not in text
    assert "url(" not in text
    assert [tag for tag, _ in page.tags].count("script") == 2
    assert any("default-src 'none'" in a.get("content", "") for _, a in page.tags)


def test_explain_writes_the_same_page(planned):
    _, folder = planned
    outcome = hybridc("explain", folder / "p.json", "--html", folder / "e.html")
    assert outcome.code == 0, outcome
    assert (folder / "e.html").read_text() == (folder / "p.html").read_text()


def test_the_saved_model_carries_the_placement(planned):
    plan, folder = planned
    model = onnx.load(folder / "s.onnx")
    onnx.checker.check_model(model, full_check=True)
    devices = plan.device_of_nodes()
    found = {n.name: {p.key: p.value for p in n.metadata_props} for n in model.graph.node}
    assert {name: props["hybridc.device"] for name, props in found.items()} == devices
    assert all(props["hybridc.why"] and props["hybridc.reason"] for props in found.values())
    assert {p.key: p.value for p in model.metadata_props}["hybridc.devices"] == "near, far"
    arrays = {"x": random_array(1, 3, 8, 8)}
    session = onnxruntime.InferenceSession(folder / "s.onnx", providers=["CPUExecutionProvider"])
    actual = dict(zip(("y",), session.run(["y"], arrays), strict=True))
    assert_close(actual, run_reference(branched_model(), arrays))


def test_a_plan_without_costs_says_so(bundle, tmp_path):
    outcome = hybridc("explain", bundle, "--html", tmp_path / "p.html")
    assert outcome.code == 0, outcome
    assert "was made without costs" in (tmp_path / "p.html").read_text()


@pytest.mark.parametrize("seed", range(30))
def test_boxes_do_not_cover_each_other(seed):
    source = random.Random(seed)
    count = source.randint(1, 60)
    lines = [
        Edge("t", 1, reader, index, False)
        for index in range(1, count)
        for reader in source.sample(range(index), min(index, source.randint(0, 3)))
    ]
    spots = positions(count, lines)
    assert all(spots[line.source][1] < spots[line.target][1] for line in lines), "lines run down"
    assert all(x >= _WIDTH / 2 for x, _ in spots)
    for row in {row for _, row in spots}:
        across = np.sort([x for x, own in spots if own == row])
        assert (np.diff(across) >= _WIDTH + _GAP - 1e-6).all()


def test_refusals(planned):
    _, folder = planned
    plan, page = folder / "p.json", folder / "none" / "p.html"
    assert_refused(hybridc("explain", plan, "--html", page), 2, "cannot write the report")
    assert_refused(hybridc("explain", plan, "stem", "--html", folder / "x"), 2, "--html")
    dynamic = make_model([node("Relu", "x", "y", "r")], {"x": ("n", 4)}, {"y": ("n", 4)})
    save(dynamic, folder / "d.onnx")
    sweep = ("plan", folder / "d.onnx", *OPTIONS, *PROFILES, "--sweep", "n=1,2")
    assert_refused(hybridc(*sweep, "--html", folder / "x"), 2, "--sweep makes several plans")
    outcome = hybridc(
        *("plan", folder / "m.onnx", *OPTIONS, *PROFILES, "--save-model", folder / "none" / "s")
    )
    assert_refused(outcome, 2, "cannot write the model")
