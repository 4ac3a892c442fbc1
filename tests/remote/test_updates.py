"""The server's part is replaced, and the edge bundle stays as it is, byte for byte."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

import hybridc
from hybridc.bundle.read import open_bundle
from hybridc.errors import RemoteMissing
from hybridc.runtime.remote_settings import RemoteSettings
from tests.models import run_reference, save
from tests.remote.conftest import SERVER, hybrid_model
from tests.remote.http_server import HttpServer
from tests.remote.server import Server
from tests.support import hybridc as run_hybridc


def trained(**scales: float) -> onnx.ModelProto:
    """The model with some weights scaled, as if they were trained again."""
    model = hybrid_model()
    for weight in model.graph.initializer:
        if weight.name in scales:
            array = numpy_helper.to_array(weight) * np.float32(scales[weight.name])
            weight.CopyFrom(numpy_helper.from_array(array, weight.name))
    return model


def compiled(folder: Path, name: str, model: onnx.ModelProto, repository: Path, version: int):
    """The outcome of a compile to ``folder/name/edge.hyb``."""
    place = folder / name
    place.mkdir()
    options = ("--private", "x", "--release", "map", "--pin", "stem*=llvm:0", *SERVER)
    options += ("--remote-updates", "--remote-version", str(version), "--shape", "batch=1")
    target = ("-o", place / "edge.hyb", "--repository", repository)
    return run_hybridc("compile", save(model, place / "model.onnx"), *target, *options)


@pytest.fixture(scope="module")
def updated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two compiles into one repository; the second has another head."""
    folder = tmp_path_factory.mktemp("updates")
    first = compiled(folder, "one", trained(), folder / "repository", 1)
    second = compiled(folder, "two", trained(w2=0.5, w4=2.0), folder / "repository", 2)
    assert (first.code, second.code) == (0, 0), first.stderr + second.stderr
    return folder


def test_another_head_leaves_the_edge_bundle_as_it_is(updated):
    first, second = ((updated / name / "edge.hyb").read_bytes() for name in ("one", "two"))
    assert first == second
    (model,) = [child for child in (updated / "repository").iterdir() if child.is_dir()]
    one, two = ((model / version / "bundle.hyb").read_bytes() for version in "12")
    assert one != two


@pytest.mark.parametrize("kind", [Server, HttpServer])
def test_an_edge_bundle_takes_the_newest_version(updated, kind):
    x = np.random.default_rng(7).standard_normal((1, 3, 96, 96)).astype(np.float32)
    for model, config in ((trained(w2=0.5, w4=2.0), True), (trained(w2=0.5, w4=2.0), False)):
        with kind(updated / "repository", tells_config=config) as server:
            remote = RemoteSettings((server.address,), deadline=20.0)
            with hybridc.load(updated / "one" / "edge.hyb", remote=remote) as edge:
                found = edge(x=x)["y"]
        np.testing.assert_allclose(found, run_reference(model, {"x": x})["y"], 1e-3, 1e-4)


def test_another_stem_is_refused_on_both_sides(updated):
    other = compiled(updated, "three", trained(w1=3.0), updated / "repository", 3)
    assert other.code == 2
    assert "another edge bundle" in other.stderr
    apart = compiled(updated, "four", trained(w1=3.0), updated / "apart", 1)
    assert apart.code == 0, apart.stderr
    with Server(updated / "apart") as server, pytest.raises(RemoteMissing, match="another build"):
        hybridc.load(updated / "one" / "edge.hyb", remote=server.address)


def test_what_depends_on_the_server_is_not_in_the_edge_bundle(updated):
    manifest = open_bundle(updated / "one" / "edge.hyb").manifest
    assert manifest.samples == ()
    assert manifest.model_sha256 == ""
    assert "local" not in {plan.name for plan in manifest.plans}
