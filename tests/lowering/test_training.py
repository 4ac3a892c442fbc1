"""Optimizers against ONNX's reference."""

import numpy as np
import pytest
from harness import assert_same, floats, lower_model, run_lowered
from onnx import helper
from onnx.reference import ReferenceEvaluator

DOMAIN = "ai.onnx.preview.training"
MOMENTUM = {"alpha": 0.95, "beta": 0.1, "norm_coefficient": 0.01}


def model_of(op, tensors, attributes, averages):
    count = len(tensors) // (2 + averages)
    names = ["R", "T", *(f"x{i}" for i in range(len(tensors)))]
    results = [f"y{i}" for i in range(count * (1 + averages))]
    node = helper.make_node(op, names, results, name="step", domain=DOMAIN, **attributes)
    kinds = [1, 7, *(helper.np_dtype_to_tensor_dtype(x.dtype) for x in tensors)]
    shapes = [(), (), *(x.shape for x in tensors)]
    inputs = map(helper.make_tensor_value_info, names, kinds, shapes)
    changed = tensors[:count] * (1 + averages)
    outputs = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(x.dtype), x.shape)
        for name, x in zip(results, changed, strict=True)
    ]
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid(DOMAIN, 1)]
    return helper.make_model(
        helper.make_graph([node], "one", [*inputs], outputs), opset_imports=opsets, ir_version=8
    )


CASES = [
    ("Momentum", 1, {"mode": "standard", **MOMENTUM}),
    ("Momentum", 1, {"mode": "nesterov", **MOMENTUM}),
    ("Adagrad", 1, {}),
    ("Adagrad", 1, {"decay_factor": 0.1, "epsilon": 1e-3, "norm_coefficient": 0.05}),
    ("Adam", 2, {}),
    ("Adam", 2, {"alpha": 0.7, "beta": 0.8, "epsilon": 1e-2, "norm_coefficient": 0.1}),
    ("Adam", 2, {"norm_coefficient_post": 0.2}),
]


@pytest.mark.parametrize(("op", "averages", "attributes"), CASES)
@pytest.mark.parametrize("steps", [0, 1, 1000])
@pytest.mark.parametrize("shapes", [[()], [(2, 3)], [(4,), (2, 1, 3)]])
def test_optimizer(op, averages, attributes, steps, shapes):
    tensors = [
        floats(*shape, seed=kind, low=-2.0 if kind < 2 else 0.0)
        for kind in range(2 + averages)
        for shape in shapes
    ]
    given = [np.array(0.1, np.float32), np.array(steps, np.int64), *tensors]
    model = model_of(op, tensors, attributes, averages)
    names = [value.name for value in model.graph.input]
    expected = ReferenceEvaluator(model).run(None, dict(zip(names, given, strict=True)))
    actual = run_lowered(lower_model(model), given)
    for got, wanted in zip(actual, expected, strict=True):
        assert_same(got, np.asarray(wanted).astype(np.float32), 1e-6)
