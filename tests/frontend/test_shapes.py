"""--shape: what it accepts, what it sets, what it refuses."""

import json

import numpy as np
import pytest

import hybridc
from hybridc.errors import UsageError
from hybridc.frontend.shapes import Range, parse_shapes
from tests.bundle.test_manifest import sealed
from tests.models import relu_model, save, sum_model
from tests.support import assert_compile_refused, compile_to
from tests.support import hybridc as command


@pytest.mark.parametrize(
    ("option", "name", "request_"),
    [
        ("x=1x3x224", "x", (1, 3, 224)),
        ("x=1..8x?", "x", (Range(1, 8), None)),
        ("x=32..960/32x1", "x", (Range(32, 960, 32), 1)),
        ("x=1..33/32", "x", (Range(1, 33, 32),)),
        ("batch=4", "batch", (4,)),
        ("a=b=2", "a=b", (2,)),
        ("serving:0=2x2", "serving:0", (2, 2)),
    ],
)
def test_parse(option, name, request_):
    assert parse_shapes([option]) == {name: request_}


@pytest.mark.parametrize(
    "option",
    ["x", "=1", "x=", "x=1x", "x=axb", "x=-1", "x=8..1", "x=1.5", "x=4/2", "x=1..4/0", "x=1..4/2"],
)
def test_syntax(tmp_path, option):
    with pytest.raises(UsageError, match="--shape"):
        parse_shapes([option])
    path = save(relu_model(), tmp_path / "m.onnx")
    assert_compile_refused(path, tmp_path, 2, "--shape", options=("--shape", option))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["z=1x4"], ["'z', which the model has not", "left=rowsx4", "rows"]),
        (["left=1x2x3"], ["3 dimensions and it has 2"]),
        (["left=1x5"], ["dimension of 5 where the model has 4"]),
        (["left=1x2..4"], ["dimension of 2..4 where the model has 4"]),
        (["left=1x4", "right=2x4"], ["'rows' both 1 and 2"]),
        (["left=1x4", "left=1x4"], ["'left' twice"]),
        (["rows=1x4"], ["takes one number or range"]),
        (["rows=?"], ["takes one number or range"]),
        ([], ["without a value", "--shape left=1x4"]),
        (["left=?x4"], ["without a value"]),
    ],
)
def test_refused(tmp_path, options, words):
    path = save(sum_model(), tmp_path / "m.onnx")
    flags = tuple(text for option in options for text in ("--shape", option))
    assert_compile_refused(path, tmp_path, 2, *words, options=flags)


@pytest.mark.parametrize("shapes", [("rows=3",), ("left=3x4",), ("left=3x?", "right=?x4")])
def test_one_value_sets_all_inputs_with_that_dimension(tmp_path, shapes):
    report = compile_to(tmp_path / "b.hyb", sum_model(), shapes=shapes)
    assert [spec.shape for spec in report.manifest.inputs] == [(3, 4), (3, 4)]
    assert report.manifest.outputs[0].shape == (3, 4)


def test_nameless_dimensions_get_names(tmp_path):
    path = save(relu_model((None, -1)), tmp_path / "m.onnx")
    assert_compile_refused(path, tmp_path, 2, "x=x_0xx_1")
    outcome = command("compile", path, "-o", tmp_path / "b", "--shape", "x=2x3", "--no-verify")
    assert outcome.code == 0


def test_a_dimension_of_zero_is_a_size(tmp_path):
    """It is not open: nothing has to be asked for, and only empty tensors fit."""
    report = compile_to(tmp_path / "b.hyb", relu_model((0, 3)), verify=True)
    assert [spec.shape for spec in report.manifest.inputs] == [(0, 3)]
    with hybridc.load(tmp_path / "b.hyb") as model:
        assert model.run({"x": np.ones((0, 3), "f")})["y"].shape == (0, 3)
        with pytest.raises(UsageError, match="0"):
            model.run({"x": np.ones((1, 3), "f")})
    path = save(relu_model((0, 3)), tmp_path / "m.onnx")
    assert_compile_refused(path, tmp_path, 2, "0x3", options=("--shape", "x=2x3"))


def test_a_range_in_steps(tmp_path):
    report = compile_to(tmp_path / "b.hyb", sum_model(), shapes=("rows=2..10/4",), verify=True)
    assert report.manifest.dimensions == {"rows": (2, 10)}
    assert report.manifest.steps == {"rows": 4}
    assert "2..10/4" in command("inspect", tmp_path / "b.hyb").stdout
    with hybridc.load(tmp_path / "b.hyb") as model:
        for rows in (2, 6, 10):
            ones = np.ones((rows, 4), "f")
            np.testing.assert_array_equal(model(left=ones, right=ones)["total"], ones + ones)
        for rows in (1, 4, 14):
            ones = np.ones((rows, 4), "f")
            with pytest.raises(UsageError, match=rf"'rows' is {rows} .* 2\.\.10 in steps of 4"):
                model(left=ones, right=ones)


def test_a_bundle_without_steps_still_loads(tmp_path):
    """A manifest may say nothing about them."""
    compile_to(tmp_path / "b", sum_model(), shapes=("rows=2..5",))
    path = tmp_path / "b" / "manifest.json"
    body = json.loads(path.read_text())
    del body["steps"], body["digest"]
    path.write_bytes(sealed(body))
    with hybridc.load(tmp_path / "b") as model:
        ones = np.ones((3, 4), "f")
        np.testing.assert_array_equal(model(left=ones, right=ones)["total"], ones + ones)


def test_range_stays_dynamic(tmp_path):
    report = compile_to(tmp_path / "b.hyb", sum_model(), shapes=("rows=2..5",), verify=True)
    assert report.manifest.dimensions == {"rows": (2, 5)}
    assert report.manifest.inputs[0].shape == ("rows", 4)
    assert len(report.manifest.samples) == 2
    with hybridc.load(tmp_path / "b.hyb") as model:
        for rows in (2, 3, 5):
            ones = np.ones((rows, 4), "f")
            np.testing.assert_array_equal(model(left=ones, right=ones)["total"], ones + ones)
        for rows in (1, 6):
            ones = np.ones((rows, 4), "f")
            with pytest.raises(UsageError, match=rf"'rows' is {rows} .* 2\.\.5"):
                model(left=ones, right=ones)
        with pytest.raises(UsageError, match="'rows' is 2 in one input and 3 in 'right'"):
            model(left=np.ones((2, 4), "f"), right=np.ones((3, 4), "f"))
