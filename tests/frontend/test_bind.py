"""--bind: an input becomes a constant, and what cannot be one is refused."""

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

import hybridc
from hybridc.errors import UsageError
from hybridc.frontend.bind import bind_inputs, parse_bindings
from hybridc.frontend.read import source_of
from tests.models import make_model, node, random, save
from tests.support import assert_compile_refused
from tests.support import hybridc as command


def scaled(kind=TensorProto.FLOAT, dims=(2,)):
    """``y = x * factor``; the factor is an input of its own."""
    nodes = [node("Cast", "factor", "f", "cast", to=TensorProto.FLOAT), node("Mul", "x f", "y")]
    model = make_model(nodes, {"x": (2,)}, {"y": (2,)})
    model.graph.input.append(helper.make_tensor_value_info("factor", kind, dims))
    return model


def bind(model, *options):
    return bind_inputs(source_of(model).model, parse_bindings(options))


@pytest.mark.parametrize(
    ("option", "expected"),
    [
        ("factor=3", [3, 3]),
        ("factor=[3,0.5]", [3, 0.5]),
        ("factor=-1e-3", [-1e-3, -1e-3]),
        ("factor=@f.npy", [7, 8]),
    ],
)
def test_values(option, expected, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    np.save("f.npy", np.array([7, 8], np.float32))
    path = save(scaled(), tmp_path / "m.onnx")
    assert command("compile", path, "-o", "m.hyb", "--bind", option).code == 0
    with hybridc.load("m.hyb") as model:
        assert [spec.name for spec in model.inputs] == ["x"]
        x = random(2)
        np.testing.assert_allclose(model(x=x)["y"], x * np.float32(expected), rtol=1e-6)


def test_the_type_is_the_inputs():
    bound = bind(scaled(TensorProto.INT64, ()), "factor=3")
    assert bound["factor"].dtype == np.int64
    assert bound["factor"].shape == ()


def test_a_number_is_no_shape_for_an_open_dimension():
    with pytest.raises(UsageError, match="does not fit"):
        bind(scaled(dims=("n",)), "factor=3")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["factor"], "not of the form INPUT=VALUE"),
        (["=3"], "not of the form INPUT=VALUE"),
        (["factor=three"], "neither a number"),
        (["factor=@nowhere.npy"], "neither a number"),
        (["factor=[1,[2]]"], "neither a number"),
        (["factor=1", "factor=2"], "twice"),
    ],
)
def test_options_that_cannot_be_read(options, words):
    with pytest.raises(UsageError, match=words):
        parse_bindings(options)


@pytest.mark.parametrize(
    ("model", "option", "words"),
    [
        (scaled(), "other=3", "the model's inputs are x, factor"),
        (scaled(), "factor=[1,2,3]", "does not fit"),
        (scaled(), "factor=[[1,2]]", "does not fit"),
        (scaled(TensorProto.INT64), "factor=0.5", "does not fit int64"),
        (scaled(TensorProto.UINT8), "factor=-1", "does not fit uint8"),
        (scaled(TensorProto.UINT8), "factor=256", "does not fit uint8"),
        (scaled(TensorProto.FLOAT16), "factor=1e5", "does not fit float16"),
    ],
)
def test_values_that_do_not_fit(model, option, words):
    with pytest.raises(UsageError, match=words):
        bind(model, option)


def test_an_initializer_is_no_input(tmp_path):
    model = scaled()
    model.graph.initializer.append(numpy_helper.from_array(np.ones(2, np.float32), "factor"))
    path = save(model, tmp_path / "m.onnx")
    assert_compile_refused(path, tmp_path, 2, "'factor'", options=("--bind", "factor=3"))
