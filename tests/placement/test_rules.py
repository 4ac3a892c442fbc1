"""Rules: how they are read, what they take away, and the smallest set that conflicts."""

import itertools

import onnx_ir as ir
import pytest
from hybridc.targets.protocol import Device
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridc.errors import UnsupportedError, UsageError
from hybridc.placement.conflict import smallest_conflict
from hybridc.placement.decide import Request, decide
from hybridc.placement.fallback import DEFAULT_FALLBACK
from hybridc.placement.group import make_groups
from hybridc.placement.rules import (
    RuleTexts,
    exclude,
    merge,
    parse_rules,
    parse_size,
    read_rules,
)
from tests.models import branched_model, make_model, node, save
from tests.support import assert_refused, hybridc

DEVICES = (Device("a", "llvm"), Device("b", "llvm"))
NAMES = ["a", "b"]


def graph_of(model):
    return ir.from_proto(model).graph


def left(texts, model=None):
    """Devices that rules leave to each group of the branched model."""
    graph = graph_of(model or branched_model())
    groups = make_groups(list(graph))
    taken = exclude(graph, groups, parse_rules(texts, NAMES), NAMES).by_group
    return {
        g.name: "".join(n for n in NAMES if n not in t) for g, t in zip(groups, taken, strict=True)
    }


def chain():
    """x -> one -> two -> three, none of which fuse."""
    nodes = [node("MatMul", f"{i} {i}", o, n) for i, o, n in ("xa1", "ab2", "bc3")]
    return make_model(nodes, {"x": (2, 2)}, {"c": (2, 2)})


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        (RuleTexts(pin=("1=b",)), {"1": "b", "2": "ab", "3": "ab"}),
        (RuleTexts(forbid=("b=a", "3=b")), {"1": "ab", "2": "b", "3": "a"}),
        (RuleTexts(keep_on=(("b", "x"),), release=("c",)), {"1": "b", "2": "b", "3": "b"}),
        (RuleTexts(keep_on=(("b", "x"),), release=("b",)), {"1": "b", "2": "b", "3": "ab"}),
        (RuleTexts(keep_on=(("b", "x"),), release=("a",)), {"1": "b", "2": "ab", "3": "ab"}),
        (RuleTexts(keep_on=(("b", "a"),), release=("b",)), {"1": "b", "2": "b", "3": "ab"}),
        (RuleTexts(keep_on=(("b", "x"),), release=("x",)), {"1": "ab", "2": "ab", "3": "ab"}),
        (RuleTexts(forbid=("1=a", "1=b")), {"1": "", "2": "ab", "3": "ab"}),
    ],
)
def test_what_rules_leave(texts, expected):
    assert left(texts, chain()) == expected


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        (RuleTexts(pin=("left",)), "--pin 'left' is not of the form"),
        (RuleTexts(forbid=("left=c",)), "--forbid 'left=c' names device 'c'; the devices are a, b"),
        (RuleTexts(keep_on=(("c", "x"),)), "--keep-on 'c x' names device"),
        (RuleTexts(memory=("2GiB",)), "not of the form DEVICE=SIZE"),
        (RuleTexts(memory=("a=much",)), "'much' is no size"),
        (RuleTexts(memory=("a=1.2.3",)), "no size"),
        (RuleTexts(max_latency="5"), "--max-latency: '5' is no time"),
    ],
)
def test_wrong_rules(texts, words):
    with pytest.raises(UsageError, match=words):
        parse_rules(texts, NAMES)


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        (RuleTexts(forbid=("lefft=a",)), "--forbid lefft=a: no node.*did you mean 'left'"),
        (RuleTexts(keep_on=(("a", "xx"),)), "--keep-on a xx: no tensor"),
        (RuleTexts(keep_on=(("a", "x"),), release=("zz",)), "--release: no tensor .* 'zz'"),
    ],
)
def test_rules_that_name_nothing(texts, words):
    with pytest.raises(UsageError, match=words):
        left(texts)


@pytest.mark.parametrize(
    ("text", "count"),
    [("2GiB", 2**31), ("512MB", 512 * 10**6), ("1.5k", 1500), ("7", 7), ("3 KiB", 3072)],
)
def test_sizes(text, count):
    assert parse_size(text) == count


def test_a_file_of_rules():
    text = """
        pin = ["stem=a"]
        forbid = ["head=b"]
        memory = ["a=2GiB"]
        keep-on = ["a x"]
        release = ["pool.y"]
        max-latency = "20ms"
    """
    texts = read_rules(text, "rules.toml")
    assert texts == RuleTexts(
        ("stem=a",), ("head=b",), ("a=2GiB",), (("a", "x"),), ("pool.y",), "20ms"
    )
    both = merge(texts, RuleTexts(pin=("left=b",), max_latency="5ms"))
    assert both.pin == ("stem=a", "left=b")
    assert both.max_latency == "5ms"
    shown = [str(rule) for rule in parse_rules(texts, NAMES).rules]
    assert shown[0] == "--pin stem=a"
    assert shown[2:] == ["--keep-on a x", "--memory a=2GiB", "--max-latency 20ms"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("pin = [", "is not TOML"),
        ("pins = []", "no rule 'pins'; rules are pin, forbid"),
        ("pin = 'a=b'", "pin is not a list of texts"),
        ("max-latency = 5", "max-latency is not a text"),
        ("keep-on = ['a']", "not of the form 'DEVICE TENSOR'"),
    ],
)
def test_wrong_files(text, words):
    with pytest.raises(UsageError, match=rf"rules\.toml.*{words}"):
        read_rules(text, "rules.toml")


@settings(max_examples=500, deadline=None)
@given(st.lists(st.sets(st.integers(0, 6), min_size=1), min_size=1, max_size=5))
def test_a_conflict_is_minimal(bad_sets):
    """Rules are numbers; any superset of one of the sets cannot hold."""

    def can_hold(rules):
        return not any(bad <= set(rules) for bad in bad_sets)

    found = smallest_conflict(range(7), can_hold)
    assert not can_hold(found)
    assert all(can_hold(without) for without in itertools.combinations(found, len(found) - 1))


@pytest.mark.parametrize(
    ("texts", "named", "not_named"),
    [
        (RuleTexts(pin=("*=a", "3=b")), ("--pin *=a", "--pin 3=b"), ()),
        (
            RuleTexts(pin=("1=a", "2=a"), forbid=("2=b", "2=a", "3=b")),
            ("2=a",),
            ("--pin 1=a", "3=b"),
        ),
        (
            RuleTexts(pin=("2=b",), keep_on=(("a", "x"),), release=("c",)),
            ("--pin", "--keep-on"),
            (),
        ),
    ],
)
def test_the_smallest_conflict_is_named(texts, named, not_named):
    request = Request(DEVICES, parse_rules(texts, NAMES))
    with pytest.raises(UnsupportedError, match="contradict each other") as caught:
        decide(graph_of(chain()), request, {}, DEFAULT_FALLBACK)
    assert all(word in str(caught.value) for word in named)
    assert not any(word in str(caught.value) for word in not_named)


def test_what_is_kept_may_not_be_given_to_the_caller():
    request = Request(DEVICES, parse_rules(RuleTexts(keep_on=(("b", "x"),)), NAMES))
    with pytest.raises(UnsupportedError, match=r"the caller reads 'c'.*--release c"):
        decide(graph_of(chain()), request, {}, DEFAULT_FALLBACK)


def test_forbidding_a_device_leaves_the_others():
    request = Request(DEVICES, parse_rules(RuleTexts(forbid=("2=a",)), NAMES))
    assert decide(graph_of(chain()), request, {}, DEFAULT_FALLBACK).placement == (0, 1, 0)


def test_what_no_device_may_run_goes_to_the_fallback():
    """Both devices refuse it, and no rule keeps it off ONNX Runtime."""
    graph = graph_of(chain())
    first = next(iter(graph))
    refused = {first: dict.fromkeys(DEVICES, "it is odd")}
    decision = decide(graph, Request(DEVICES), refused, DEFAULT_FALLBACK)
    assert decision.devices_of_groups() == [DEFAULT_FALLBACK, DEVICES[0], DEVICES[0]]
    pinned = Request(DEVICES, parse_rules(RuleTexts(pin=("1=b",)), NAMES))
    with pytest.raises(UnsupportedError, match="--pin 1=b cannot be kept") as caught:
        decide(graph, pinned, refused, DEFAULT_FALLBACK)
    assert ("1", "MatMul", "b: it is odd") in caught.value.reasons


def test_one_device_refuses_and_the_other_runs_it():
    graph = graph_of(chain())
    first = next(iter(graph))
    decision = decide(graph, Request(DEVICES), {first: {DEVICES[0]: "odd"}}, DEFAULT_FALLBACK)
    assert decision.placement == (1, 0, 0)


def test_limits_need_profiles(tmp_path):
    path = save(branched_model(), tmp_path / "m.onnx")
    options = ("--target", "llvm", "--max-latency", "5ms")
    outcome = hybridc("compile", path, "-o", tmp_path / "b.hyb", *options)
    assert_refused(outcome, 2, "--max-latency 5ms needs to know the devices", "--profile")
