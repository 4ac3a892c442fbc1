"""Samples: read from folders and functions, checked, divided."""

from __future__ import annotations

import numpy as np
import pytest

from hybridc.bundle.manifest import TensorSpec
from hybridc.errors import UsageError
from hybridc.frontend.shapes import Range
from hybridc.precision.samples import load_samples
from tests.precision.data import SHAPE, samples, write_samples

SPECS = (TensorSpec("x", "float32", SHAPE),)


def test_a_folder_is_read_in_order(tmp_path):
    found = load_samples(str(write_samples(tmp_path / "data", samples(3))), SPECS, {})
    assert found.count == 3
    for sample, expected in zip(found, samples(3), strict=True):
        np.testing.assert_array_equal(sample["x"], expected)


def test_files_of_one_array(tmp_path):
    np.save(tmp_path / "a.npy", samples(1)[0])
    assert load_samples(str(tmp_path), SPECS, {}).count == 1


@pytest.mark.parametrize("body", ["{'x': array} for array in arrays", "array for array in arrays"])
def test_a_function(tmp_path, monkeypatch, body):
    source = f"""
from tests.precision.data import samples

def data():
    arrays = samples(4)
    return ({body})
"""
    (tmp_path / "given_data.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(__import__("sys").modules, "given_data", raising=False)
    found = load_samples("given_data:data", SPECS, {})
    assert len(list(found)) == found.count == 4
    assert len(list(found)) == 4  # and once more


@pytest.mark.parametrize("count", [2, 5, 6, 11])
def test_parts_divide_all_samples(tmp_path, count):
    found = load_samples(str(write_samples(tmp_path / "data", samples(count))), SPECS, {})
    parts = [found.part(held_out) for held_out in (False, True)]
    sums = [sorted(float(s["x"].sum()) for s in part) for part in parts]
    assert [len(part) for part in sums] == [part.count for part in parts]
    assert all(part.count >= 1 for part in parts)
    assert sorted(sums[0] + sums[1]) == sorted(float(array.sum()) for array in samples(count))


def bad_nan():
    array = samples(1)[0].copy()
    array[0, 1, 2, 3] = np.nan
    return [*samples(2), array]


BAD = {
    "wrong name": (samples(2), "image", "'image'"),
    "wrong shape": ([np.zeros((1, 3, 8, 9), np.float32)], "x", "1x3x8x9"),
    "wrong rank": ([np.zeros((3, 8, 8), np.float32)], "x", "3x8x8"),
    "wrong type": ([samples(1)[0].astype(np.float64)], "x", "float64"),
    "not a number": (bad_nan(), "x", "NaN"),
    "constant": ([np.full(SHAPE, 3, np.float32)] * 4, "x", "3 everywhere"),
    "none": ([], "x", "no samples"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_data_is_refused(tmp_path, case):
    arrays, name, word = BAD[case]
    with pytest.raises(UsageError, match=word):
        load_samples(str(write_samples(tmp_path / "data", arrays, name)), SPECS, {})


def test_dynamic_dimensions_agree_and_keep_to_their_range(tmp_path):
    specs = (TensorSpec("x", "float32", ("n", 2)), TensorSpec("y", "float32", ("n",)))
    for name, rows in (("good", (3, 3)), ("bad", (3, 4)), ("long", (9, 9))):
        (tmp_path / name).mkdir()
        x, y = np.ones((rows[0], 2), np.float32), np.ones(rows[1], np.float32)
        x[0], y[0] = 2, 2
        np.savez(tmp_path / name / "0.npz", x=x, y=y)
    assert load_samples(str(tmp_path / "good"), specs, {"n": Range(1, 8)}).count == 1
    for name in ("bad", "long"):
        with pytest.raises(UsageError, match="must be n"):
            load_samples(str(tmp_path / name), specs, {"n": Range(1, 8)})


@pytest.mark.parametrize(
    "data", ["nowhere", "no_such_module:f", "math:no_such_function", "math:pi"]
)
def test_what_is_not_there(data):
    with pytest.raises(UsageError, match=data):
        load_samples(data, SPECS, {})


def test_a_function_that_fails(tmp_path, monkeypatch):
    (tmp_path / "failing_data.py").write_text("def data():\n    yield {}['gone']\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UsageError, match="KeyError"):
        load_samples("failing_data:data", SPECS, {})
