"""Models joined by pipes give what they give one after the other; what does not fit is refused."""

from __future__ import annotations

import json

import numpy as np
import onnx
import onnxruntime
import pytest

import hybridc
from hybridc.frontend.pipe import joined_models
from tests.models import make_model, node, run_reference, save
from tests.support import assert_compile_refused
from tests.support import hybridc as run_hybridc


def first() -> onnx.ModelProto:
    """Two outputs out of one input; ``w`` and ``t`` are names of the second too."""
    w = np.random.default_rng(0).standard_normal((6, 4)).astype(np.float32)
    nodes = [
        node("MatMul", "x w", "t"),
        node("Relu", "t", "features"),
        node("ReduceMax", "t", "score", keepdims=1),
    ]
    shapes = {"features": ("batch", 4), "score": (1, 1)}
    return make_model(nodes, {"x": ("batch", 6)}, shapes, {"w": w})


def second(opset: int = 17, dtype: str = "float32") -> onnx.ModelProto:
    w = np.random.default_rng(1).standard_normal((4, 3)).astype(dtype)
    nodes = [node("MatMul", "x w", "t"), node("Mul", "t scale", "u"), node("Tanh", "u", "y")]
    inputs = {"x": ("batch", 4), "scale": (1, 1)}
    return make_model(nodes, inputs, {"y": ("batch", 3)}, {"w": w}, opset=opset, dtype=dtype)


@pytest.fixture
def pair(tmp_path):
    return save(first(), tmp_path / "a.onnx"), save(second(), tmp_path / "b-2.onnx")


PIPE = "a:features=b-2:x"


def one_after_the_other(x: np.ndarray, scale: np.ndarray) -> dict[str, np.ndarray]:
    found = run_reference(first(), {"x": x})
    after = run_reference(second(), {"x": found["features"], "scale": scale})
    return {"a_score": found["score"], "b_2_y": after["y"]}


def test_results_are_those_of_one_after_the_other(pair, tmp_path):
    bundle = tmp_path / "both.hyb"
    done = run_hybridc("compile", *pair, "--pipe", PIPE, "-o", bundle, "--shape", "batch=2")
    assert done.code == 0, done.stderr
    random = np.random.default_rng(2)
    x, scale = (random.standard_normal(s).astype(np.float32) for s in ((2, 6), (1, 1)))
    with hybridc.load(bundle) as model:
        assert [spec.name for spec in model.inputs] == ["a_x", "b_2_scale"]
        found = model(a_x=x, b_2_scale=scale)
        assert model.manifest.model == "a+b-2.onnx"
    expected = one_after_the_other(x, scale)
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_allclose(found[name], array, rtol=1e-5, atol=1e-6)


def test_an_output_may_feed_several_models(tmp_path):
    names = ("a", "b", "c")
    models = (first(), second(), second())
    paths = [save(model, tmp_path / f"{n}.onnx") for n, model in zip(names, models, strict=True)]
    with joined_models(paths, ["a:features=b:x", "a:features=c:x", "a:score=c:scale"]) as file:
        session = onnxruntime.InferenceSession(file)
        assert [value.name for value in session.get_inputs()] == ["a_x", "b_scale"]
        x, scale = np.ones((1, 6), np.float32), np.ones((1, 1), np.float32)
        outputs = session.run(None, {"a_x": x, "b_scale": scale})
    assert not file.exists()
    found = run_reference(first(), {"x": x})
    for output, own in zip(outputs, (scale, found["score"]), strict=True):
        after = run_reference(second(), {"x": found["features"], "scale": own})
        np.testing.assert_allclose(output, after["y"], rtol=1e-5)


def test_opsets_are_made_alike(pair, tmp_path):
    older = save(second(opset=11), tmp_path / "b-2.onnx")
    with joined_models([pair[0], older], [PIPE]) as file:
        assert [e.version for e in onnx.load(file).opset_import] == [17]
        onnxruntime.InferenceSession(file)


def test_one_model_is_left_alone(pair):
    with joined_models(pair[:1], []) as file:
        assert file == pair[0]


@pytest.mark.parametrize(
    ("pipes", "word"),
    [
        ((), "nothing feeds b-2"),
        (("features=x",), "MODEL:OUTPUT=MODEL:INPUT"),
        (("a:features=c:x",), "models are a, b-2"),
        (("b-2:y=a:x",), "b-2 must be given before a"),
        (("a:feature=b-2:x",), "a has no output feature; it has features, score"),
        (("a:features=b-2:z",), "b-2 has no input z; it has x, scale"),
        ((PIPE, "a:score=b-2:x"), "x is fed twice"),
        (("a:score=b-2:x",), "the output is 1x1 and the input batchx4"),
    ],
)
def test_pipes_that_do_not_fit(pair, tmp_path, pipes, word):
    options = [text for pipe in pipes for text in ("--pipe", pipe)]
    assert_compile_refused(pair[0], tmp_path, 2, word, options=(pair[1], *options))


def test_types_that_differ(pair, tmp_path):
    save(second(dtype="float64"), pair[1])
    word = "the output is float and the input double"
    assert_compile_refused(pair[0], tmp_path, 2, word, options=(pair[1], "--pipe", PIPE))


def test_models_of_one_name(pair, tmp_path):
    (tmp_path / "other").mkdir()
    other = save(second(), tmp_path / "other" / "a.onnx")
    options = (other, "--pipe", "a:features=a:x")
    assert_compile_refused(pair[0], tmp_path, 2, "before", options=options)


def test_a_plan_may_cut_between_models(pair, tmp_path):
    options = ("--target", "llvm:0", "--target", "llvm:1", "--shape", "batch=1")
    pins = ("--pin", "a_*=llvm:0", "--pin", "b_2_*=llvm:1", "--format", "json")
    place = ("-o", tmp_path / "cut.hyb")
    done = run_hybridc("compile", *pair, "--pipe", PIPE, *place, *options, *pins)
    assert done.code == 0, done.stderr
    transfers = json.loads(done.stdout)["manifest"]["transfers"]
    assert [row["tensor"] for row in transfers if row["source"] == "llvm:0"] == ["a_features"]
