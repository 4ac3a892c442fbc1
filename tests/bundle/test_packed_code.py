"""The runtime's libraries are packed once, and bundles are the same whether they were or not."""

from __future__ import annotations

import numpy as np
import pytest
from hybridc.targets.llvm.object_cache import ObjectCache

import hybridc
from hybridc import packed_code
from hybridc.bundle.storage import pack_code
from tests.models import make_model, node
from tests.support import compile_to


@pytest.fixture
def packed(monkeypatch):
    """Sizes of what was packed by LZMA."""
    sizes = []

    def counted(code):
        sizes.append(len(code))
        return pack_code(code)

    monkeypatch.setattr(packed_code, "pack_code", counted)
    return sizes


def large(sizes):
    return sum(size >= packed_code.LARGE for size in sizes)


def test_a_second_compile_packs_no_runtime(tmp_path, packed):
    contents = []
    for number, weight in enumerate((1, 1, 2)):
        weights = {"w": np.full((4, 4), weight, np.float32)}
        model = make_model([node("MatMul", "x w", "y")], {"x": (2, 4)}, {"y": (2, 4)}, weights)
        place = tmp_path / str(number)
        place.mkdir()
        compile_to(place / "b.hyb", model, cache=tmp_path / "kept")
        contents.append((place / "b.hyb").read_bytes())
        assert large(packed) == 1
        with hybridc.load(place / "b.hyb") as bundle:
            result = bundle.run({"x": np.ones((2, 4), np.float32)})["y"]
        np.testing.assert_array_equal(result, np.full((2, 4), 4 * weight))
    compile_to(tmp_path / "b.hyb", model, cache=None)
    contents.append((tmp_path / "b.hyb").read_bytes())
    assert large(packed) == 2
    assert contents[0] == contents[1]
    assert contents[1] != contents[2]
    assert contents[2] == contents[3]


def test_what_was_damaged_is_packed_anew(tmp_path, packed):
    code = np.random.default_rng(1).integers(0, 4, packed_code.LARGE, np.uint8).tobytes()
    first = packed_code.keeping(tmp_path)(memoryview(code))
    (file,) = tmp_path.iterdir()
    assert packed_code.keeping(tmp_path)(memoryview(code)) == first
    assert large(packed) == 1
    damaged = bytearray(file.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    file.write_bytes(damaged)
    assert packed_code.keeping(tmp_path)(memoryview(code)) == first
    assert large(packed) == 2


def test_the_folder_keeps_its_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(packed_code, "ObjectCache", lambda folder: ObjectCache(folder, limit=1000))
    code = np.random.default_rng(1).integers(0, 4, packed_code.LARGE, np.uint8).tobytes()
    assert len(packed_code.keeping(tmp_path)(memoryview(code))) > 1000
    assert not list(tmp_path.iterdir())


def test_small_code_is_not_kept(tmp_path):
    packed_code.keeping(tmp_path / "kept")(memoryview(bytes(1000)))
    assert not (tmp_path / "kept").exists()
