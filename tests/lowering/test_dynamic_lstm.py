"""DynamicQuantizeLSTM against ONNX Runtime with one thread, whose ranges are of whole batches."""

import dataclasses

import numpy as np
import onnx
import pytest
from harness import assert_same, floats, lower_model, run_lowered, whole
from onnx import helper, numpy_helper
from onnxruntime.quantization import QuantType, quantize_dynamic
from test_microsoft import Fused, model_of, run_reference

from hybridc import onnx_backend
from hybridc.errors import UnsupportedError
from hybridc.lowering.ops import dynamic_lstm
from hybridc.lowering.ops.dynamic_lstm import sum_type

RUN_TIME = (0, 4, 5, 6)
ZEROS = {"int8": 0, "uint8": 121}


def layer(
    *,
    steps=5,
    batch=3,
    features=4,
    hidden=6,
    direction="forward",
    dtype="int8",
    zero=None,
    channels=False,
    bias=True,
    lengths=None,
    states=False,
    peepholes=False,
    outputs=("y", "h", "c"),
    symbolic=None,
    **attributes,
):
    """A case with weights of the right shapes, of a kind."""
    directions, columns = 2 if direction == "bidirectional" else 1, 4 * hidden
    low, high = (-63, 64) if dtype == "int8" else (0, 256)  # pairs that ONNX Runtime can add
    parameters = (directions, columns) if channels else (directions,)
    zeros = np.full(parameters, ZEROS[dtype] if zero is None else zero, dtype)
    scales = [floats(*parameters, seed=seed, low=1.0) * np.float32(0.005) for seed in (8, 9)]
    inputs = [
        floats(steps, batch, features, seed=1),
        whole(directions, features, columns, seed=2, dtype=dtype, low=low, high=high),
        whole(directions, hidden, columns, seed=3, dtype=dtype, low=low, high=high),
        floats(directions, 2 * columns, seed=4) if bias else None,
        None if lengths is None else np.array(lengths, np.int32),
        floats(directions, batch, hidden, seed=5) if states else None,
        floats(directions, batch, hidden, seed=6) if states else None,
        floats(directions, 3 * hidden, seed=7) if peepholes else None,
        *(scales[0], zeros, scales[1], zeros),
    ]
    constants = [i for i, array in enumerate(inputs) if array is not None and i not in RUN_TIME]
    attributes = {"hidden_size": hidden, "direction": direction, **attributes}
    return Fused("DynamicQuantizeLSTM", inputs, attributes, outputs, constants, symbolic or {})


EVERY = [
    layer(),
    layer(direction="reverse", channels=True),
    layer(direction="bidirectional", states=True),
    layer(lengths=[2, 4, 1], states=True),
    layer(direction="reverse", lengths=[2, 4, 1], channels=True, states=True),
    layer(direction="bidirectional", lengths=[2, 4, 1], channels=True),
    layer(dtype="uint8", direction="reverse", states=True),
    layer(dtype="uint8", direction="bidirectional", channels=True),
    layer(dtype="uint8", zero=128),  # fits 8 bits without its zero point
    layer(zero=3),
    layer(bias=False, lengths=[5, 0, 3], states=True),  # a row without steps
    layer(batch=1, lengths=[3], outputs=("", "h")),
    layer(batch=1, hidden=16, features=30, steps=9, outputs=("y",)),
    layer(batch=7, hidden=70, features=3, direction="bidirectional", peepholes=True),
    layer(batch=4, hidden=37, steps=1, states=True, outputs=("", "", "c")),
    layer(peepholes=True, states=True, lengths=[2, 5, 4], direction="bidirectional"),
    layer(peepholes=True, states=True, input_forget=1),
    layer(peepholes=True, states=True, clip=0.4),
    layer(
        direction="bidirectional",
        activations=["HardSigmoid", "LeakyRelu", "Tanh", "Sigmoid", "Elu", "ScaledTanh"],
        activation_alpha=[0.3, 0.2, 0.7, 1.5],
        activation_beta=[0.4, 0.8],
    ),
    layer(symbolic={0: {0: "steps", 1: "batch"}}, direction="bidirectional", steps=7),
    layer(
        symbolic={0: {0: "t", 1: "n"}, 4: {0: "n"}, 5: {1: "n"}, 6: {1: "n"}},
        lengths=[5, 2, 3],
        states=True,
    ),
]


@pytest.mark.parametrize("case", EVERY, ids=str)
def test_layer(case):
    check(case)


def test_sums_that_float32_cannot_hold(monkeypatch):
    rows = np.full((257, 1), 255, np.int16)
    assert [sum_type(rows * sign) for sign in (1, -1)] == ["float32", "float32"]
    assert sum_type(np.full((259, 1), 255, np.int16)) == "int32"
    monkeypatch.setattr(dynamic_lstm, "sum_type", lambda _weights: "int32")
    check(layer(dtype="uint8", hidden=19, batch=2, states=True, channels=True))


def check(case):
    model = model_of(case)
    feed = {
        f"x{i}": array for i, array in enumerate(case.inputs) if array is not None and i in RUN_TIME
    }
    expected = run_reference(model, feed)
    results = run_lowered(lower_model(model), list(feed.values()))
    for got, wanted in zip(results, expected, strict=True):
        assert_same(got, np.asarray(wanted), 1e-5)


def without_constant(case, place):
    return dataclasses.replace(case, constants=[i for i in case.constants if i != place])


def with_zero(case, zeros):
    return dataclasses.replace(case, inputs=[*case.inputs[:9], zeros, *case.inputs[10:]])


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        (layer(lengths=[2, 4, 1], outputs=("", "h")), "without its first output"),
        (without_constant(layer(), 2), "weights"),
        (without_constant(layer(), 9), "weights"),
        (with_zero(layer(channels=True), np.zeros(1, np.int8)), "another shape than the scales"),
        (
            with_zero(layer(channels=True), np.arange(24, dtype=np.int8).reshape(1, 24)),
            "differ between channels",
        ),
        (layer(activations=["Sigmoid", "Affine", "Tanh"]), "without its parameters"),
    ],
    ids=str,
)
def test_what_is_refused(case, reason):
    with pytest.raises(UnsupportedError, match=reason):
        lower_model(model_of(case))


def recurrent_model(features=12, hidden=20):
    """A float model of two LSTM layers behind each other, of steps and rows that vary."""
    nodes, weights, data = [], {}, "x"
    for number, (width, direction, count) in enumerate(
        [(features, "bidirectional", 2), (2 * hidden, "reverse", 1)]
    ):
        shapes = {
            "w": (count, 4 * hidden, width),
            "r": (count, 4 * hidden, hidden),
            "b": (count, 8 * hidden),
        }
        for name, shape in shapes.items():
            weights[f"{name}{number}"] = floats(*shape, seed=number) * np.float32(0.3)
        nodes.append(
            helper.make_node(
                "LSTM",
                [data, *(f"{name}{number}" for name in shapes)],
                [f"all{number}", f"last{number}"],
                name=f"lstm{number}",
                hidden_size=hidden,
                direction=direction,
            )
        )
        nodes += [
            helper.make_node("Transpose", [f"all{number}"], [f"t{number}"], perm=[0, 2, 1, 3]),
            helper.make_node("Reshape", [f"t{number}", f"shape{number}"], [f"y{number}"]),
        ]
        weights[f"shape{number}"] = np.array([0, 0, count * hidden])
        data = f"y{number}"
    inputs = [helper.make_tensor_value_info("x", 1, ["steps", "batch", features])]
    outputs = [helper.make_tensor_value_info("y1", 1, None)]
    initializers = [numpy_helper.from_array(array, name) for name, array in weights.items()]
    graph = helper.make_graph(nodes, "layers", inputs, outputs, initializers)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


@pytest.mark.parametrize(
    ("kind", "channels"), [(QuantType.QInt8, False), (QuantType.QUInt8, True)], ids=str
)
def test_what_onnx_runtime_quantizes(tmp_path, kind, channels):
    onnx.save(recurrent_model(), tmp_path / "float.onnx")
    paths = str(tmp_path / "float.onnx"), str(tmp_path / "quantized.onnx")
    # With less range, pairs of products fit int16, in which ONNX Runtime may add them.
    quantize_dynamic(*paths, weight_type=kind, per_channel=channels, reduce_range=True)
    model = onnx.load(paths[1])
    assert [n.op_type for n in model.graph.node].count("DynamicQuantizeLSTM") == 2
    compiled = onnx_backend.prepare(model, fallback=False)
    for steps, batch in ((6, 1), (3, 4)):
        data = floats(steps, batch, 12, seed=steps)
        (wanted,) = run_reference(model, {"x": data})
        assert_same(np.asarray(compiled.run([data])[0]), wanted, 1e-5)
