"""Operators that are lowered as the standard's bodies for them, against ONNX's reference."""

import numpy as np
import pytest
from onnx.reference import ReferenceEvaluator

from hybridc.compiler import build, load_built
from hybridc.frontend.read import read_model
from tests.models import make_model, node, random, save
from tests.support import make_options

TOLERANCE = {"float32": 2e-6, "float16": 2e-3}


def check(folder, one, arrays, results, opset, dynamic=None):
    """Compile a node, with dimensions given by name where ``dynamic`` says so, and compare."""
    dims = {name: list(array.shape) for name, array in arrays.items()}
    options = []
    for (name, axis), dimension in (dynamic or {}).items():
        options.append(f"{dimension}=1..64")
        dims[name][axis] = dimension
    model = make_model([one], dims, dict.fromkeys(results, ()), opset=opset)
    for item in (*model.graph.input, *model.graph.output):
        array = arrays.get(item.name, next(iter(arrays.values())))
        item.type.tensor_type.elem_type = {"f": 1, "e": 10, "l": 7, "?": 9}[array.dtype.char]
        if item.name in results:
            item.type.tensor_type.ClearField("shape")
    model.ir_version = 11
    expected = ReferenceEvaluator(model).run(None, arrays)
    path = save(model, folder / "m.onnx")
    settings = make_options(shapes=sorted(set(options)), fallback=False)
    actual = load_built(build(read_model(path), settings)[0]).run(arrays)
    for name, wanted in zip(results, expected, strict=True):
        assert actual[name].dtype == wanted.dtype
        assert actual[name].shape == wanted.shape
        tolerance = TOLERANCE[str(wanted.dtype)] * float(np.abs(wanted).max(initial=1))
        np.testing.assert_allclose(
            actual[name].astype("f8"), wanted.astype("f8"), atol=tolerance, rtol=0
        )


def cache(batch, heads, length, size=8, dtype="float32", seed=0):
    return random(batch, heads, length, size, seed=seed, dtype=dtype)


@pytest.mark.parametrize(
    ("dtype", "window", "causal"),
    [
        ("float32", {}, 0),
        ("float16", {}, 1),
        ("float32", {}, 1),
        ("float32", {"left_window_size": 2}, 1),
        ("float32", {"left_window_size": 1, "right_window_size": 1}, 0),
    ],
)
def test_attention_with_an_external_cache(tmp_path, dtype, window, causal):
    """More heads of queries than of keys; one batch element has fewer keys than queries."""
    arrays = {
        "q": cache(3, 4, 2, dtype=dtype),
        "k": cache(3, 2, 6, dtype=dtype, seed=1),
        "v": cache(3, 2, 6, 5, dtype=dtype, seed=2),
        "n": np.array([6, 3, 1], np.int64),
    }
    one = node("Attention", "q k v - - - n", "y", "a", is_causal=causal, **window)
    check(tmp_path, one, arrays, ["y"], 25)


@pytest.mark.parametrize(
    ("mask", "kind", "opset"),
    [
        (None, "float32", 23),
        (None, "float32", 25),
        ((2, 5), "bool", 24),
        ((4, 2, 5), "float32", 24),
        ((3, 1, 2, 5), "bool", 25),
    ],
)
def test_attention_with_past(tmp_path, mask, kind, opset):
    arrays = {
        "q": cache(3, 4, 2),
        "k": cache(3, 4, 2, seed=1),
        "v": cache(3, 4, 2, seed=2),
        "pk": cache(3, 4, 3, seed=3),
        "pv": cache(3, 4, 3, seed=4),
    }
    if mask is not None:
        numbers = random(*mask, seed=5)
        arrays["m"] = numbers > -0.5 if kind == "bool" else numbers
    names = f"q k v {'-' if mask is None else 'm'} pk pv"
    one = node("Attention", names, "y k2 v2", "a", is_causal=1, softcap=2.0)
    check(tmp_path, one, arrays, ["y", "k2", "v2"], opset)


def test_attention_of_run_time_lengths(tmp_path):
    arrays = {"q": random(2, 5, 32), "k": random(2, 7, 16, seed=1), "v": random(2, 7, 16, seed=2)}
    arrays["n"] = np.array([7, 4], np.int64)
    one = node("Attention", "q k v - - - n", "y", "a", is_causal=1, q_num_heads=4, kv_num_heads=2)
    dynamic = {("q", 1): "s", ("k", 1): "t", ("v", 1): "t"}
    check(tmp_path, one, arrays, ["y"], 24, dynamic)


@pytest.mark.parametrize("rule", ["linear", "gated", "delta", "gated_delta"])
@pytest.mark.parametrize(
    ("heads", "steps", "past"), [((2, 2), 1, True), ((4, 2), 5, False), ((3, 1), 5, True)]
)
def test_linear_attention(tmp_path, rule, heads, steps, past):
    queries, keys = heads
    arrays = {
        "q": random(2, steps, queries * 4),
        "k": random(2, steps, keys * 4, seed=1) / 2,
        "v": random(2, steps, keys * 3, seed=2),
    }
    if past:
        arrays["s"] = random(2, keys, 4, 3, seed=3)
    if "gated" in rule:
        width = keys * 4 if past else keys
        arrays["g"] = -np.abs(random(2, steps, width, seed=4))
    if "delta" in rule:
        arrays["b"] = np.abs(random(2, steps, keys if past else 1, seed=5)) / 3
    names = " ".join(name if name in arrays else "-" for name in "qkvsgb")
    attributes = {"q_num_heads": queries, "kv_num_heads": keys, "update_rule": rule}
    one = node("LinearAttention", names, "y s2", "a", **attributes)
    check(tmp_path, one, arrays, ["y", "s2"], 27)


@pytest.mark.parametrize(
    ("activation", "length", "width", "names"),
    [
        ("none", 6, 3, "x w"),
        ("none", 2, 5, "x w - p"),
        ("none", 4, 1, "x w b"),
        ("silu", 2, 5, "x w"),
        ("silu", 1, 4, "x w b p"),
        ("silu", 6, 3, "x w - p"),
    ],
)
def test_causal_convolution(tmp_path, activation, length, width, names):
    arrays = {
        "x": random(2, 3, length),
        "w": random(3, 1, width, seed=1),
        "b": random(3, seed=2),
        "p": random(2, 3, width - 1, seed=3),
    }
    arrays = {name: arrays[name] for name in names.split() if name != "-"}
    one = node("CausalConvWithState", names, "y s", "c", activation=activation)
    check(tmp_path, one, arrays, ["y", "s"], 27)
