"""Models with a step of Python between them: results, rules on data, and what is refused."""

from __future__ import annotations

import json
import re
import shutil

import numpy as np
import pytest

from hybridc.bundle.read import open_bundle
from hybridc.errors import BundleError, UsageError
from hybridc.runtime.chain import CHAIN, load_chain, load_step
from tests.frontend.test_pipe import first, second
from tests.models import run_reference, save
from tests.support import assert_refused
from tests.support import hybridc as run_hybridc

STEPS = '''
import numpy as np
from hybridc.runtime.chain import step

@step
def rows(known):
    """One run for each row of the features whose sum is above zero."""
    found = [row for row in known["a_features"] if row.sum() > 0]
    return [{"b_2_x": row[None], "b_2_scale": np.full((1, 1), 2, np.float32)} for row in found]

@step
def largest(known):
    best = known["a_features"][known["a_features"].sum(axis=1).argmax()]
    return {"b_2_x": best[None], "b_2_scale": known["a_score"]}

@step
def wrong(known):
    return known["a_features"]

def unmarked(known):
    return {}
'''

SHAPES = ("--shape", "a_x=4x6", "--shape", "b_2_x=1x4")


@pytest.fixture
def pair(tmp_path, monkeypatch):
    (tmp_path / "between_them.py").write_text(STEPS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(__import__("sys").modules, "between_them", raising=False)
    return save(first(), tmp_path / "a.onnx"), save(second(), tmp_path / "b-2.onnx")


def compile_chain(pair, folder, step: str, *options):
    step = f"b-2=between_them:{step}"
    done = run_hybridc("compile", *pair, "--step", step, "-o", folder / "chain", *SHAPES, *options)
    assert done.code == 0, done.stderr
    return folder / "chain"


def picture(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((4, 6)).astype(np.float32)


def expected(rows: np.ndarray, scale: np.ndarray) -> np.ndarray:
    runs = [run_reference(second(), {"x": row[None], "scale": scale})["y"] for row in rows]
    return np.concatenate(runs)


def test_the_next_model_runs_for_each_that_a_step_gives(pair, tmp_path):
    np.savez(tmp_path / "sample.npz", a_x=picture(0))
    sample = ("--sample", tmp_path / "sample.npz", "--format", "json")
    with load_chain(compile_chain(pair, tmp_path, "rows", *sample)) as chain:
        assert [spec.name for spec in chain.inputs] == ["a_x"]
        assert {spec.name for spec in chain.outputs} == {"a_features", "a_score", "b_2_y"}
        x = picture(1)
        found = chain(a_x=x)
        before = run_reference(first(), {"x": x})
        kept = [row for row in before["features"] if row.sum() > 0]
        assert len(kept) > 1
        scale = np.full((1, 1), 2, np.float32)
        assert found["b_2_y"] == pytest.approx(expected(np.array(kept), scale), abs=1e-5)
        assert found["a_score"] == pytest.approx(before["score"], abs=1e-5)
        none = chain(a_x=np.zeros((4, 6), np.float32))
        assert none["b_2_y"].shape == (0, 3)
        assert none["b_2_y"].dtype == np.float32
    done = run_hybridc("run", tmp_path / "chain")
    assert done.code == 0, done.stderr
    assert "b_2_y" in done.stdout
    looked_at(tmp_path / "chain")
    samples = [open_bundle(tmp_path / "chain" / name).manifest.samples for name in ("a", "b-2")]
    assert len(samples[0]) == 1
    rows = run_reference(first(), {"x": picture(0)})["features"].sum(axis=1)
    assert len(samples[1]) == (rows > 0).sum(), "what the step gave for the sample"


def looked_at(chain) -> None:
    """A chain can be inspected and verified without its steps, by its folder or the file in it."""
    for place in (chain, chain / CHAIN):
        done = run_hybridc("inspect", place)
        assert done.code == 0, done.stderr
        assert "chain of 2 bundles" in done.stdout
        assert "step between_them:rows\nstage b-2:" in done.stdout
        assert "b_2_scale" in done.stdout
        done = run_hybridc("verify", place)
        assert done.code == 0, done.stderr
        assert len(re.findall("^b-2: .* files are as they were written$", done.stdout, re.M)) == 1
        assert re.search(r"^b-2: 0 +b_2_y +\S+ +ok$", done.stdout, re.M)
    found = json.loads(run_hybridc("inspect", chain, "--format", "json").stdout)["stages"]
    assert [stage["step"] for stage in found] == ["", "between_them:rows"]
    assert found[1]["manifest"]["outputs"][0]["name"] == "b_2_y"
    found = json.loads(run_hybridc("verify", chain, "--format", "json").stdout)["stages"]
    assert found["a"]["files"] > 0
    assert all(error["within"] for own in found.values() for error in own["errors"])
    library = next((chain / "b-2").rglob("*.so"))
    library.write_bytes(library.read_bytes()[:-1] + b"?")
    assert_refused(run_hybridc("verify", chain, "--no-run"), 6, "")


def test_one_run_and_what_is_refused_when_it_is_loaded(pair, tmp_path, monkeypatch):
    chain = compile_chain(pair, tmp_path, "largest", "--no-verify")
    x = picture(2)
    with load_chain(chain) as model:
        before = run_reference(first(), {"x": x})
        best = before["features"][before["features"].sum(axis=1).argmax()]
        y = expected(best[None], before["score"])
        assert model(a_x=x)["b_2_y"] == pytest.approx(y, abs=1e-5)
    spec = json.loads((chain / CHAIN).read_text())

    def rewritten(step: str) -> None:
        spec["stages"][1]["step"] = step
        (chain / CHAIN).write_text(json.dumps(spec))

    rewritten("between_them:wrong")
    with load_chain(chain) as model, pytest.raises(UsageError, match="gave a ndarray"):
        model(a_x=x)
    for step, words in (
        ("between_them:unmarked", "mark it"),
        ("os:system", "mark it"),
        ("between_them:gone", "is not there"),
        ("no_such_module_here:f", "is not there"),
    ):
        rewritten(step)
        with pytest.raises(UsageError, match=words):
            load_chain(chain)
    rewritten("between_them:largest")
    shutil.rmtree(chain / "b-2")
    shutil.copytree(chain / "a", chain / "b-2")
    with pytest.raises(BundleError, match="b-2 is not the bundle"):
        load_chain(chain)
    with pytest.raises(UsageError, match="no chain"):
        load_chain(chain / "a")


REMOTE = ("--remote", "server=llvm", "--link", "server=1gbit,1ms", "--pin", "b_2_*=server")
PRIVATE = (*REMOTE, "--private", "a_x")


def test_what_a_step_gives_goes_to_the_server_only_where_it_is_released(pair, tmp_path):
    released = ("--release", "b_2_x", "--release", "b_2_scale")
    chain = compile_chain(pair, tmp_path, "rows", *PRIVATE, *released)
    manifest = open_bundle(chain / "b-2").manifest
    sent = {c.tensor: c.reason for c in manifest.plans[0].crossings if c.destination == "server"}
    assert sent == {name: f"released by --release {name}" for name in ("b_2_x", "b_2_scale")}
    assert not open_bundle(chain / "a").manifest.plans, "its input is private"
    assert (tmp_path / "chain-repository").is_dir()


@pytest.mark.parametrize(
    ("step", "options", "code", "word"),
    [
        ("b-2=rows", (), 2, "MODEL=MODULE:FUNCTION"),
        ("c=between_them:rows", (), 2, "not the first"),
        ("a=between_them:rows", (), 2, "not the first"),
        ("b-2=between_them:rows", ("--pipe", "a:features=b-2:x"), 2, "after a step"),
        ("b-2=between_them:rows", ("--max-latency", "5ms"), 2, "all stages together"),
        ("b-2=between_them:rows", ("--memory", "llvm:0=1MB"), 2, "all stages together"),
        ("b-2=between_them:rows", (*PRIVATE, "--release", "b_2_x"), 3, "--private b_2_scale"),
        ("b-2=between_them:rows", (*REMOTE[:4], "--private", "b_2_x"), 3, "--private b_2_x"),
    ],
)
def test_refused(pair, tmp_path, step, options, code, word):
    """The last two: nothing that is computed from a private input is released."""
    arguments = ("--step", step, "-o", tmp_path / "chain", *SHAPES, "--no-verify")
    done = run_hybridc("compile", *pair, *arguments, *options)
    assert_refused(done, code, word)
    assert not (tmp_path / "chain").exists()


def test_a_chain_is_a_folder(pair, tmp_path):
    options = (pair[1], "--step", "b-2=between_them:rows", "--no-verify")
    done = run_hybridc("compile", pair[0], *options, "-o", tmp_path / "chain.hyb")
    assert_refused(done, 2, "folder")


def test_steps_are_loaded_by_name(pair):
    assert load_step("between_them:rows").__name__ == "rows"
