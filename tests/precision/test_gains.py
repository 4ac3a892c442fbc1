"""Layers that stay float since 8-bit integers make them no faster."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from hybridc.targets.registry import parse_targets
from hypothesis import given
from hypothesis import strategies as st
from onnx import numpy_helper

import hybridc
from hybridc.bundle.manifest import TensorSpec
from hybridc.compiler import Options
from hybridc.precision.compile import Wanted, compile_in_precision
from hybridc.precision.gains import no_faster
from hybridc.precision.quantize import Calibration, quantize_static
from hybridc.precision.rounding import round_to_steps
from hybridc.precision.samples import load_samples
from tests.models import make_model, node, random, run_reference
from tests.precision.data import write_samples

WEIGHTS = {
    "first": random(8, 3, 3, 3, seed=1),
    "spread": random(8, 1, 5, 5, seed=2),
    "grouped": random(8, 4, 3, 3, seed=3),
    "last": random(4, 8, 1, 1, seed=4),
}


def separable() -> onnx.ModelProto:
    """A plain, a depthwise, a grouped and a pointwise convolution."""
    nodes = [
        node("Conv", "x first", "a", name="first"),
        node("Conv", "a spread", "b", name="depthwise", group=8),
        node("HardSwish", "b", "c"),
        node("Conv", "c grouped", "d", name="grouped", group=2),
        node("Conv", "d last", "y", name="last"),
    ]
    return make_model(nodes, {"x": (1, 3, 16, 16)}, {"y": (1, 4, 8, 8)}, WEIGHTS, opset=17)


@pytest.mark.parametrize(
    ("targets", "expected"),
    [
        (["llvm:x86-64-v3"], ("depthwise",)),
        (["llvm:x86-64-v4"], ("depthwise",)),
        (["llvm:x86-64-v3", "llvm:x86-64-v2"], ("depthwise",)),
        (["llvm:icelake-server"], ("depthwise",)),
        (["llvm:sapphirerapids"], ("depthwise",)),
        (["llvm:aarch64"], ()),
        (["cuda:sm_90"], ()),
        (["llvm:x86-64-v3", "cuda:sm_90"], ()),
        ([], ()),
    ],
)
def test_depthwise_layers_gain_nothing_on_x86_64(targets, expected):
    assert no_faster(separable(), parse_targets(targets) if targets else ()) == expected


@given(
    st.lists(st.floats(-1, 1, width=32), min_size=4, max_size=4),
    st.integers(-40, 12),
)
def test_steps_are_powers_of_two_and_fit_float16(numbers, exponent):
    filters = np.array([numbers, [0.5, 0.25, 0, 1]], np.float32)
    filters[0] *= np.float32(2.0**exponent)
    model = separable()
    weight = filters.reshape(2, 1, 2, 2)
    model.graph.initializer.append(numpy_helper.from_array(weight, "w"))
    model.graph.node.append(onnx.helper.make_node("Conv", ["x", "w"], ["z"], "extra", group=2))
    round_to_steps(model, ["extra"])
    (tensor,) = (t for t in model.graph.initializer if t.name == "w")
    rounded = numpy_helper.to_array(tensor)
    assert rounded.dtype == np.float32
    np.testing.assert_array_equal(rounded.astype(np.float16), rounded)
    largest = np.abs(weight).max(axis=(1, 2, 3), keepdims=True)
    step = np.maximum(2 * largest / 127, 2.0**-23)
    assert (np.abs(rounded - weight) <= step / 2).all()
    for own in rounded:
        codes = own / 2.0 ** np.floor(np.log2(max(np.abs(own).max(), 2.0**-24) / 64))
        np.testing.assert_array_equal(codes, np.rint(codes))
        assert np.abs(codes).max() <= 128


def quantized(tmp_path, slow):
    model = separable()
    data = write_samples(tmp_path / "data", [random(1, 3, 16, 16, seed=i) for i in range(6)])
    found = load_samples(str(data), (TensorSpec("x", "float32", (1, 3, 16, 16)),), {})
    return model, quantize_static(model, Calibration(found), slow)


def weights_in_int8(model):
    made = {name: n.op_type for n in model.graph.node for name in n.output}
    return {n.name for n in model.graph.node if made.get(n.input[-1]) == "DequantizeLinear"}


def test_they_stay_float_and_the_others_do_not(tmp_path):
    model, found = quantized(tmp_path, ["depthwise"])
    assert found.slow == ("depthwise",)
    convolutions = {n.name for n in model.graph.node if n.op_type == "Conv"}
    chosen = convolutions & weights_in_int8(found.model)
    assert chosen == {"first", "grouped", "last"} - set(found.kept)
    assert found.count == len(chosen) > 0
    x = {"x": random(1, 3, 16, 16, seed=9)}
    (exact,), (got,) = (run_reference(m, x).values() for m in (model, found.model))
    assert 0 < np.abs(got - exact).max() < 0.2 * np.abs(exact).max()


def test_a_model_of_nothing_else_is_in_int8_all_the_same():
    nodes = [node("Conv", "x spread", "y", name="depthwise", group=8)]
    model = make_model(
        nodes, {"x": (1, 8, 9, 9)}, {"y": (1, 8, 5, 5)}, {"spread": WEIGHTS["spread"]}
    )
    assert no_faster(model, parse_targets(["llvm:x86-64-v3"])) == ()


def test_where_all_are_slow_or_cost_much_the_slow_ones_are_in_int8(tmp_path):
    everything = ["first", "depthwise", "grouped", "last"]
    _, found = quantized(tmp_path, everything)
    assert found.slow == ()
    assert found.count + len(found.kept) == 4


def test_a_compile_says_so_and_what_it_makes_is_right(tmp_path):
    path = tmp_path / "model.onnx"
    onnx.save(separable(), path)
    data = write_samples(tmp_path / "data", [random(1, 3, 16, 16, seed=i) for i in range(6)])
    options = Options(devices=parse_targets(["llvm:x86-64-v3"]), fallback=False)
    wanted = Wanted("int8", data=str(data))
    report = compile_in_precision(path, tmp_path / "b.hyb", options, lambda _line: None, wanted)
    (note,) = (note for note in report.notes if "no faster" in note)
    assert note.startswith("depthwise stay fp32")
    x = {"x": random(1, 3, 16, 16, seed=9)}
    with hybridc.load(tmp_path / "b.hyb") as model:
        got = model.run(x)["y"]
    (exact,) = run_reference(separable(), x).values()
    assert np.abs(got - exact).max() < 0.2 * np.abs(exact).max()
