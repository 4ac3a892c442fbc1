"""Profiles and links: the shipped ones are sound, and what is wrong is refused with a reason."""

import json

import pytest
from hybridc.cost_models.device import load_json, parse_profile, read_profile_text, shipped_profiles
from hybridc.cost_models.link import parse_links, parse_seconds
from hybridc.cost_models.load import default_profile, load_device
from hybridc.cost_models.measured import Code

from hybridc.errors import UsageError

CODE = Code("llvm", "", {})
SMALL = {
    "name": "a board",
    "source": "data sheet",
    "provenance": "made up",
    "peaks": {"float32": 1e9},
    "memory": [{"name": "DDR", "bytes": 2**30, "bytes_per_second": 1e9}],
    "launch_seconds": 1e-6,
}


@pytest.mark.parametrize("name", shipped_profiles())
def test_shipped_profiles(name):
    profile = load_device(name, CODE).profile
    assert profile.source == "data sheet"
    assert len(profile.provenance) > 20
    sizes = [level.bytes for level in profile.memory]
    rates = [level.bytes_per_second for level in profile.memory]
    assert sizes == sorted(sizes)
    assert rates == sorted(rates, reverse=True)
    assert profile.joules(1, 1, 1.0) > 0
    assert profile.level(1) is profile.memory[0]
    assert profile.level(10**15) is profile.memory[-1]


def test_the_devices_that_users_ask_for_are_there():
    wanted = {"zen3", "sapphire-rapids", "graviton3", "a10", "l4", "a100", "h100", "pocl"}
    assert wanted | {"integrated-gpu"} <= set(shipped_profiles())


@pytest.mark.parametrize(
    ("kind", "specification", "profile"),
    [
        ("llvm", "znver3", "zen3"),
        ("llvm", "x86-64-v3", None),
        ("llvm", "", None),
        ("cuda", "sm_90", "h100"),
        ("cuda", "sm_90+aarch64", "h100"),
        ("cuda", "sm_80,sm_90", None),
        ("onnxruntime", "", None),
    ],
)
def test_default_profiles(kind, specification, profile):
    assert default_profile(kind, specification) == profile


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"peak": {}}, "no field 'peak'"),
        ({"peaks": {"float16": 1e9}}, "no float32"),
        ({"peaks": {"float32": 0}}, "not above zero"),
        ({"memory": []}, "memory is empty"),
        ({"launch_seconds": -1}, "below zero"),
        ({"launch_seconds": "fast"}, "launch_seconds is not float"),
        ({"in_host_memory": False}, "to_host"),
        ({"watts": -1.0}, "below zero"),
        ({"launch_seconds": float("nan")}, "below zero"),
        ({"to_host": {"latency_seconds": 0, "bytes_per_second": 0}}, "not above zero"),
        ({"to_host": {"latency_seconds": 0}}, "bytes_per_second"),
        ({"efficiency": {"Conv": 0.5}}, "no class of operators 'Conv'"),
    ],
)
def test_wrong_profiles(change, word):
    with pytest.raises(UsageError, match=word):
        parse_profile({**SMALL, **change}, "board.json")


@pytest.mark.parametrize("text", ["", "[]", "{"])
def test_not_a_json_object(text):
    with pytest.raises(UsageError, match=r"board\.json is not"):
        load_json(text, "board.json")


def test_a_file_is_a_profile_too(tmp_path):
    (tmp_path / "board.json").write_text(json.dumps(SMALL))
    assert load_device(str(tmp_path / "board.json"), CODE).profile.name == "a board"
    with pytest.raises(UsageError, match=r"no profile 'h200'.*h100"):
        read_profile_text("h200")


DEVICES = ("llvm:0", "cuda:0", "edge-box")


def test_links():
    links = parse_links(["llvm:0-cuda:0=20gbit,5us", "cuda:0-edge-box=1MiB,1ms/8kB,2s"], DEVICES)
    wanted = {
        ("llvm:0", "cuda:0"): (5e-6, 2.5e9),
        ("cuda:0", "llvm:0"): (5e-6, 2.5e9),
        ("cuda:0", "edge-box"): (1e-3, 2**20),
        ("edge-box", "cuda:0"): (2.0, 8e3),
    }
    found = {pair: (r.latency_seconds, r.bytes_per_second) for pair, r in links.items()}
    assert found.keys() == wanted.keys()
    assert all(found[pair] == pytest.approx(wanted[pair]) for pair in wanted)
    assert links["llvm:0", "cuda:0"].seconds(2500) == pytest.approx(6e-6)


@pytest.mark.parametrize(
    "option",
    [
        "llvm:0-cuda:1=1gbit,1us",
        "llvm:0=1gbit,1us",
        "llvm:0-cuda:0",
        "llvm:0-llvm:0=1gbit,1us",
        "llvm:0-cuda:0=1gbit",
        "llvm:0-cuda:0=0gbit,1us",
        "llvm:0-cuda:0=1.2.3gbit,1us",
        "llvm:0-cuda:0=1ibit,1us",
        "llvm:0-cuda:0=1Gb,1us",
        "llvm:0-cuda:0=1gbit,1h",
    ],
)
def test_wrong_links(option):
    with pytest.raises(UsageError, match="--link"):
        parse_links([option], DEVICES)


def test_times():
    assert parse_seconds("1.5ms") == pytest.approx(1.5e-3)
    with pytest.raises(ValueError, match="no time"):
        parse_seconds("5")
