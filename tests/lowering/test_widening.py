"""Types of 16 bits are computed in float32, and rounded where their type matters."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from hybridc.targets.protocol import Section

from hybridc.compiler import build, load_built
from hybridc.frontend.read import source_of
from hybridc.lowering.lower import lower
from hybridc.lowering.ops import default_table
from tests.support import make_options

Array = np.ndarray[Any, Any]
DTYPES = {"float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}


def parse(text: str) -> onnx.ModelProto:
    """A model of opset 18 out of ONNX's text for a graph."""
    return onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 18]> {text}')


def run(model: onnx.ModelProto, strict_math: bool = False, **inputs: Array) -> dict[str, Array]:
    """Compile for llvm in this process, and run."""
    options = make_options(strict_math=strict_math)
    built, notes = build(source_of(model), options)
    assert not notes
    return dict(load_built(built).run(inputs))


def noise(*shape: int, dtype: str = "float16", seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(DTYPES[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_follows_another_node_is_not_rounded_before(dtype: str) -> None:
    """One rounding at the end; with strict math one at each node, as numpy does it."""
    model = parse(
        f"g ({dtype}[64] x, {dtype}[64] y) => ({dtype}[64] z) "
        "{ a = Mul(x, y) b = Add(a, x) c = Mul(b, y) z = Sub(c, y) }"
    )
    x, y = noise(64, dtype=dtype), noise(64, dtype=dtype, seed=1)
    wide_x, wide_y = x.astype(np.float32), y.astype(np.float32)
    once = ((wide_x * wide_y + wide_x) * wide_y - wide_y).astype(DTYPES[dtype])
    each = (x * y + x) * y - y
    assert np.any(once != each)
    np.testing.assert_array_equal(run(model, x=x, y=y)["z"], once)
    np.testing.assert_array_equal(run(model, strict_math=True, x=x, y=y)["z"], each)


def test_squares_do_not_overflow_between_nodes() -> None:
    model = parse("g (float16[3] x) => (float16[3] y) { a = Mul(x, x) y = Sqrt(a) }")
    x = np.array([300, -400, 2], np.float16)
    np.testing.assert_array_equal(run(model, x=x)["y"], np.abs(x))
    session = onnxruntime.InferenceSession(model.SerializeToString())
    np.testing.assert_array_equal(session.run(None, {"x": x})[0], np.abs(x))
    assert np.isinf(run(model, strict_math=True, x=x)["y"][:2]).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("operator", ["Round", "Floor", "Sign", "Cast <to = 1>", "Cast <to = 6>"])
def test_what_names_a_type_or_jumps_gets_rounded_numbers(operator: str, dtype: str) -> None:
    kind = {"Cast <to = 1>": "float", "Cast <to = 6>": "int32"}.get(operator, dtype)
    name, _, attributes = operator.partition(" ")
    model = parse(
        f"g ({dtype}[512] x, {dtype}[512] y) => ({kind}[512] z) "
        f"{{ a = Mul(x, y) z = {name} {attributes}(a) }}"
    )
    x = noise(512, dtype=dtype) * DTYPES[dtype].type(8)
    y = noise(512, dtype=dtype, seed=1)
    product = x * y
    expected = {
        "Round": np.rint(product.astype(np.float32)),
        "Floor": np.floor(product.astype(np.float32)),
        "Sign": np.sign(product.astype(np.float32)),
        "Cast <to = 1>": product.astype(np.float32),
        "Cast <to = 6>": product.astype(np.int32),
    }[operator]
    result = run(model, x=x, y=y)["z"]
    np.testing.assert_array_equal(result.astype(np.float64), expected.astype(np.float64))


def test_equal_numbers_are_equal() -> None:
    """A comparison sees what the model's types hold: 1/3 and what it is stored as."""
    model = parse(
        "g (float16[8] x, float16[8] y, float16[8] stored) => (bool[8] z, int64[1] place) "
        "{ a = Div(x, y) z = Equal(a, stored) place = ArgMax <keepdims = 1>(a) }"
    )
    x = np.array([1, 1, 2, 5, 7, 1, 3, 6], np.float16)
    y = np.array([3, 7, 3, 3, 3, 9, 1, 2], np.float16)
    results = run(model, x=x, y=y, stored=x / y)
    assert results["z"].all()
    np.testing.assert_array_equal(results["place"], [np.argmax(x / y)])


def test_a_value_that_is_an_output_and_read_on() -> None:
    model = parse(
        "g (float16[16] x, float16[16] y) => (float16[16] a, float16[16] z, float[16] w) "
        "{ a = Mul(x, y) z = Add(a, y) w = Cast <to = 1>(a) }"
    )
    x, y = noise(16), noise(16, seed=1)
    results = run(model, x=x, y=y)
    wide = x.astype(np.float32) * y
    np.testing.assert_array_equal(results["a"], x * y)
    np.testing.assert_array_equal(results["w"], (x * y).astype(np.float32))
    np.testing.assert_array_equal(results["z"], (wide + y).astype(np.float16))


@pytest.mark.parametrize("go", [True, False])
def test_branches_and_loops_pass_on_the_type_of_the_model(go: bool) -> None:
    """A value computed outside is read in a branch and carried through a loop."""
    model = parse("""
        g (float16[4] x, bool go, int64 trips) => (float16[4] y, float16[4] z) {
          a = Mul(x, x)
          y = If(go) <
            then_branch = t () => (float16[4] u) { u = Add(a, x) },
            else_branch = e () => (float16[4] v) { b = Neg(a) v = Mul(b, x) }>
          yes = Constant <value = bool {1}>()
          z = Loop(trips, yes, a) <
            body = l (int64 i, bool c, float16[4] carried) => (bool d, float16[4] next) {
              d = Identity(c) s = Mul(carried, x) next = Sub(s, a) }>
        }""")
    x = noise(4)
    results = run(model, x=x, go=np.array(go), trips=np.array(3))
    session = onnxruntime.InferenceSession(model.SerializeToString())
    expected = session.run(None, {"x": x, "go": np.array(go), "trips": np.array(3)})
    for name, array in zip(("y", "z"), expected, strict=True):
        assert results[name].dtype == np.float16
        np.testing.assert_allclose(results[name], array, rtol=4e-3, atol=4e-3)


@pytest.mark.parametrize("dtype", DTYPES)
def test_layers_are_nearer_to_the_exact_result(dtype: str) -> None:
    """A small network: what is computed in float32 is off by no more than its last rounding."""
    kind = {"float16": onnx.TensorProto.FLOAT16, "bfloat16": onnx.TensorProto.BFLOAT16}[dtype]
    model = parse(
        f"g ({dtype}[2, 8, 6, 6] x) => ({dtype}[2, 16] y) "
        "{ c = Conv <pads = [1, 1, 1, 1]>(x, k) r = Relu(c) p = GlobalAveragePool(r)"
        "  f = Flatten(p) m = MatMul(f, w) y = Softmax(m) }"
    )
    x, k, w = noise(2, 8, 6, 6, dtype=dtype), noise(8, 8, 3, 3, seed=1), noise(8, 16, seed=2) / 8
    weights = {"k": k.astype(DTYPES[dtype]), "w": w.astype(DTYPES[dtype])}
    for name, array in weights.items():
        tensor = onnx.helper.make_tensor(name, kind, array.shape, array.tobytes(), raw=True)
        model.graph.initializer.append(tensor)
    exact = _network(x, **weights)
    ours = run(model, x=x)["y"].astype(np.float64)
    each = run(model, strict_math=True, x=x)["y"].astype(np.float64)
    rounding = float(ml_dtypes.finfo(DTYPES[dtype]).eps)
    np.testing.assert_allclose(ours, exact, rtol=rounding, atol=1e-7)
    assert np.abs(ours - exact).sum() < np.abs(each - exact).sum()


def _network(x: Array, k: Array, w: Array) -> Array:
    x, k, w = (array.astype(np.float64) for array in (x, k, w))
    padded = np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), (2, 3))
    layer = np.maximum(np.einsum("bchwij,ocij->bohw", windows, k), 0)
    scores = layer.mean((2, 3)) @ w
    powers = np.exp(scores - scores.max(1, keepdims=True))
    result: Array = powers / powers.sum(1, keepdims=True)
    return result


def test_numbers_are_converted_once_and_moved_as_they_are() -> None:
    """An input that several nodes compute with, and tensors that are only moved."""
    model = parse(
        "g (float16[4, 4] x) => (float16[4, 4] y, float16[4, 4] z, float16[16] w) "
        "{ t = Transpose(x) w = Reshape(t, shape) y = MatMul(x, x) a = Sqrt(x) z = Softmax(a) }"
    )
    shape = onnx.numpy_helper.from_array(np.array([16]), "shape")
    model.graph.initializer.append(shape)
    graph = ir.serde.deserialize_model(onnx.shape_inference.infer_shapes(model)).graph
    section = Section(list(graph), list(graph.inputs), list(graph.outputs), {"": 18})
    text = lower(section, default_table(), widens=True).module.script()
    assert text.count('R.astype(input_0, dtype="float32")') == 1
    assert text.count("R.astype(") == 3  # the input, and two results
