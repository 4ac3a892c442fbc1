"""Recurrent layers against ONNX Runtime, and against NumPy where it has no kernel."""

import numpy as np
import pytest
from harness import Case, check, expected_results, floats, lower_model, make_model, run_lowered

GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}


def layer(
    op,
    *,
    steps=5,
    batch=3,
    features=4,
    hidden=6,
    direction="forward",
    bias=True,
    lengths=None,
    states=False,
    peepholes=False,
    constants=(1, 2, 3),
    opset=14,
    outputs=None,
    dtype="float32",
    symbolic=None,
    scale=1.0,
    **attributes,
):
    """A case with weights of the right shapes."""
    directions = 2 if direction == "bidirectional" else 1
    scale = np.array(scale, dtype)
    columns = GATES[op] * hidden
    inputs = [
        floats(steps, batch, features, seed=1, dtype=dtype),
        floats(directions, columns, features, seed=2, dtype=dtype) * scale,
        floats(directions, columns, hidden, seed=3, dtype=dtype) * scale,
        floats(directions, 2 * columns, seed=4, dtype=dtype) if bias else None,
        None if lengths is None else np.array(lengths, np.int32),
        floats(directions, batch, hidden, seed=5, dtype=dtype) if states else None,
    ]
    if op == "LSTM":
        inputs.append(floats(directions, batch, hidden, seed=6, dtype=dtype) if states else None)
        inputs.append(floats(directions, 3 * hidden, seed=7, dtype=dtype) if peepholes else None)
    while inputs[-1] is None:
        inputs.pop()
    given = [index for index in constants if index < len(inputs) and inputs[index] is not None]
    attributes = {"hidden_size": hidden, "direction": direction, **attributes}
    count = outputs or (3 if op == "LSTM" else 2)
    return Case(op, inputs, attributes, opset, given, count, symbolic or {})


EVERY = [
    *(
        layer(op, direction=direction, lengths=lengths, states=states)
        for op in GATES
        for direction in ("forward", "reverse", "bidirectional")
        for lengths in (None, [5, 1, 3])
        for states in (False, True)
    ),
    *(layer(op, opset=opset) for op in GATES for opset in (7, 22)),
    *(layer(op, bias=False, outputs=1) for op in GATES),
    *(layer(op, constants=(), states=True, direction="bidirectional") for op in GATES),
    *(layer(op, lengths=[4, 0, 5], constants=(1, 2, 3, 4)) for op in ("LSTM", "GRU")),
    *(layer(op, hidden=16, batch=4, direction="reverse", lengths=[5, 2, 4, 1]) for op in GATES),
    *(layer(op, hidden=24, batch=1) for op in GATES),
    *(layer(op, hidden=37, batch=5, scale=0.3, constants=()) for op in GATES),
    *(layer(op, hidden=70, batch=7, scale=0.2, constants=()) for op in GATES),
    *(layer(op, hidden=5, batch=2, features=1, steps=1) for op in GATES),
    *(layer(op, clip=0.6, states=True) for op in GATES),
    *(
        layer(op, symbolic={0: {0: "steps", 1: "batch"}}, direction="bidirectional", steps=7)
        for op in GATES
    ),
    layer("LSTM", symbolic={0: {0: "t", 1: "n"}, 4: {0: "n"}}, lengths=[5, 2, 3]),
    layer("LSTM", states=True, symbolic={0: {1: "n"}, 5: {1: "n"}, 6: {1: "n"}}),
    layer("LSTM", peepholes=True, states=True),
    layer("LSTM", peepholes=True, states=True, direction="bidirectional", lengths=[2, 5, 4]),
    layer("LSTM", peepholes=True, input_forget=1, states=True),
    layer("LSTM", input_forget=1),
    layer("LSTM", input_forget=1, clip=0.7, peepholes=True, states=True),
    layer("GRU", linear_before_reset=1, states=True),
    layer("GRU", linear_before_reset=1, states=True, constants=()),
    layer("GRU", linear_before_reset=1, direction="bidirectional", lengths=[1, 3, 5]),
    layer("GRU", linear_before_reset=1, bias=False, clip=0.5),
    layer("LSTM", activations=["HardSigmoid", "Relu", "Softsign"]),
    layer(
        "LSTM",
        direction="bidirectional",
        activations=["HardSigmoid", "LeakyRelu", "Tanh", "Sigmoid", "Elu", "ScaledTanh"],
        activation_alpha=[0.3, 0.2, 0.7, 1.5],
        activation_beta=[0.4, 0.8],
    ),
    layer("GRU", activations=["Sigmoid", "Softplus"]),
    layer("GRU", activations=["hardsigmoid", "tanh"]),
    *(
        layer("RNN", activations=[name], activation_alpha=[0.4], activation_beta=[0.3])
        for name in ("Affine", "ScaledTanh", "HardSigmoid", "ThresholdedRelu")
    ),
    *(
        layer("RNN", activations=[name], scale=0.2)
        for name in ("Relu", "LeakyRelu", "Elu", "Softsign", "Softplus")
    ),
]


@pytest.mark.parametrize("case", EVERY, ids=str)
def test_layer(case):
    check(case)


@pytest.mark.parametrize("op", GATES)
@pytest.mark.parametrize("direction", ["forward", "bidirectional"])
def test_batch_first(op, direction):
    """ONNX Runtime has no layout 1: compare with layout 0 on transposed inputs."""
    case = layer(op, direction=direction, states=True)
    expected = expected_results(case, make_model(case))
    expected = [np.moveaxis(expected[0], 2, 0)] + [np.swapaxes(y, 0, 1) for y in expected[1:]]
    inputs = [
        np.ascontiguousarray(np.swapaxes(array, 0, 1)) if index in (0, 5, 6) else array
        for index, array in enumerate(case.inputs)
    ]
    swapped = Case(op, inputs, {**case.attributes, "layout": 1}, 14, (1, 2, 3), case.outputs)
    run_time = [inputs[index] for index in range(len(inputs)) if index in (0, 5, 6)]
    actual = run_lowered(lower_model(make_model(swapped)), run_time)
    for got, wanted in zip(actual, expected, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("op", GATES)
@pytest.mark.parametrize(("dtype", "tolerance"), [("float16", 1e-2), ("float64", 1e-5)])
def test_other_precisions_follow_single(op, dtype, tolerance):
    """ONNX Runtime has kernels for float32 only."""
    single = layer(op, states=True, lengths=[5, 2, 4])
    expected = expected_results(single, make_model(single))
    inputs = [
        array if array is None or array.dtype.kind != "f" else array.astype(dtype)
        for array in single.inputs
    ]
    case = Case(op, inputs, single.attributes, 14, (1, 2, 3), single.outputs)
    run_time = [array for index, array in enumerate(inputs) if index in (0, 4, 5, 6)]
    actual = run_lowered(lower_model(make_model(case)), run_time)
    for got, wanted in zip(actual, expected, strict=True):
        assert got.dtype == np.dtype(dtype)
        np.testing.assert_allclose(got.astype("float32"), wanted, rtol=0, atol=tolerance)
