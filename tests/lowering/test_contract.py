"""What converters promise beyond values: fusion, run-time sizes, and refusals with a reason."""

import ml_dtypes
import numpy as np
import onnx
import pytest
import tvm
from harness import (
    PIPELINE,
    Case,
    assert_same,
    check,
    expected_results,
    floats,
    lower_model,
    make_model,
    run_lowered,
    vector,
    whole,
)
from onnx import helper, numpy_helper

from hybridc.errors import UnsupportedError
from hybridc.lowering import ops
from hybridc.lowering.call import Operator
from tests.models import relu_model, save
from tests.support import hybridc


def chain(nodes, inputs, weights):
    """A model of several nodes: ``(op, input names, output name, attributes)``."""
    protos = [helper.make_node(op, names, [out], **kw) for op, names, out, kw in nodes]
    float_type = onnx.TensorProto.FLOAT
    given = [helper.make_tensor_value_info(n, float_type, a.shape) for n, a in inputs.items()]
    stored = [numpy_helper.from_array(array, name) for name, array in weights.items()]
    result = [onnx.ValueInfoProto(name=nodes[-1][2])]
    graph = helper.make_graph(protos, "chain", given, result, stored)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return onnx.shape_inference.infer_shapes(model)


def kernels(model):
    """Kernels that one run calls, after fusion."""
    with tvm.transform.PassContext(opt_level=3):
        module = PIPELINE(lower_model(model).module)
    return str(module["main"].script()).count("R.call_tir(")


PADDED = {"pads": [1, 1, 1, 1]}
FUSIONS = [
    (
        [
            ("Conv", ["x", "w", "b"], "c", PADDED),
            ("HardSigmoid", ["c"], "s", {}),
            ("Mul", ["c", "s"], "m", {}),
            ("Clip", ["m", "", "six"], "k", {}),
            ("LeakyRelu", ["k"], "y", {}),
        ],
        {"w": floats(4, 3, 3, 3), "b": floats(4), "six": np.array(6, np.float32)},
    ),
    (
        [("Conv", ["x", "w"], "c", PADDED), ("PRelu", ["c", "slope"], "y", {})],
        {"w": floats(4, 3, 3, 3), "slope": floats(4, 1, 1)},
    ),
    (
        [
            ("Conv", ["x", "w"], "c", PADDED),
            ("BatchNormalization", ["c", "b", "b", "b", "v"], "n", {}),
            ("Relu", ["n"], "y", {}),
        ],
        {"w": floats(4, 3, 3, 3), "b": floats(4), "v": floats(4, low=0.1)},
    ),
    (
        [("ConvTranspose", ["x", "w", "b"], "c", {"strides": [2, 2]}), ("Sigmoid", ["c"], "y", {})],
        {"w": floats(3, 4, 2, 2), "b": floats(4)},
    ),
    (
        [
            ("Resize", ["x", "", "scales"], "r", {"mode": "nearest"}),
            ("Transpose", ["r"], "t", {"perm": [0, 2, 3, 1]}),
            ("Gelu_like", ["t"], "y", {}),
        ],
        {"scales": np.array([1, 1, 2, 2], np.float32)},
    ),
    (
        [
            ("Pow", ["x", "two"], "p", {}),
            ("Div", ["p", "two"], "d", {}),
            ("Erf", ["d"], "e", {}),
            ("Where", ["flag", "e", "two"], "y", {}),
        ],
        {"two": np.array([2], np.float32), "flag": np.array([[True], [False]] * 4)},
    ),
]


@pytest.mark.parametrize(("nodes", "weights"), FUSIONS, ids=lambda value: None)
def test_elementwise_operators_fuse_into_one_kernel(nodes, weights):
    nodes = [("Tanh", *rest) if op == "Gelu_like" else (op, *rest) for op, *rest in nodes]
    model = chain(nodes, {"x": floats(1, 3, 8, 8)}, weights)
    assert kernels(model) == 1


RUNTIME_SIZES = [
    (Case("Conv", [floats(1, 3, 8, 8), floats(4, 3, 3, 3)], {"strides": [2, 2]}, constants=[1]), 2),
    (Case("MaxPool", [floats(1, 3, 8, 8)], {"kernel_shape": [3, 3], "strides": [2, 2]}), 2),
    (
        Case(
            "AveragePool",
            [floats(1, 3, 8, 8)],
            {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 1, 1]},
        ),
        2,
    ),
    (
        Case(
            "ConvTranspose",
            [floats(1, 3, 8, 8), floats(3, 4, 3, 3)],
            {"strides": [2, 2], "pads": [1, 1, 1, 1]},
            constants=[1],
        ),
        2,
    ),
    (
        Case(
            "Resize",
            [floats(1, 3, 8, 8), None, np.array([1, 1, 2, 2], np.float32)],
            {"mode": "linear"},
            constants=[2],
        ),
        2,
    ),
    *(
        (Case(op, [floats(1, 3, 8, 8)], {"kernel_shape": [3, 2], "strides": [2, 2], **same}), 2)
        for op in ("MaxPool", "AveragePool")
        for same in ({"auto_pad": "SAME_UPPER"}, {"auto_pad": "SAME_LOWER"})
    ),
    (
        Case(
            "Conv",
            [floats(1, 3, 8, 8), floats(4, 3, 3, 1)],
            {"auto_pad": "SAME_LOWER", "strides": [2, 3]},
            constants=[1],
        ),
        2,
    ),
    (Case("Slice", [floats(4, 6), vector(-3), vector(5), vector(1)], constants=[1, 2, 3]), 1),
    (Case("Softmax", [floats(3, 6)]), 1),
]


@pytest.mark.parametrize(("case", "axis"), RUNTIME_SIZES, ids=str)
def test_one_compilation_serves_many_sizes(case, axis):
    rank = case.inputs[0].ndim
    names = {i: f"d{i}" for i in range(axis, rank)}
    symbolic = Case(**{**vars(case), "symbolic": {0: names}})
    model = make_model(symbolic)
    lowered = lower_model(model)
    for size in (4, 5, 7):
        shape = [*case.inputs[0].shape[:axis], *range(size, size + rank - axis)]
        data = floats(*shape, seed=size)
        sized = Case(**{**vars(symbolic), "inputs": [data, *case.inputs[1:]]})
        (wanted,) = expected_results(sized, model)
        (got,) = run_lowered(lowered, [data])
        assert_same(got, wanted, 1e-5)


IMAGE = floats(1, 2, 6, 6)
INT4 = whole(3).astype(ml_dtypes.int4)
FLOAT8 = floats(3, 3).astype(ml_dtypes.float8_e4m3fn)
REFUSALS = [
    (
        Case(
            "Resize",
            [IMAGE, None, np.ones(4, np.float32)],
            {"antialias": 1},
            opset=18,
            constants=[2],
        ),
        "antialias",
    ),
    (Case("ReduceMean", [whole(3, 4)]), "mean of integers"),
    (Case("Cast", [floats(3)], {"to": 8}), "element type"),
    (Case("Add", [INT4, INT4], opset=21), "Add of int4"),
    (Case("MatMul", [FLOAT8, FLOAT8], opset=21), "MatMul of float8_e4m3fn"),
    (
        Case("Concat", [INT4, whole(3, dtype="int8")], {"axis": 0}, opset=21),
        "another type and int4",
    ),
]


@pytest.mark.parametrize(("case", "reason"), REFUSALS, ids=str)
def test_refuses_with_a_reason(case, reason):
    with pytest.raises(UnsupportedError, match=reason):
        lower_model(make_model(case))


def test_a_value_used_twice_and_passed_through_is_right():
    check(Case("Add", [floats(2, 3), floats(2, 3)]))
    model = chain(
        [("Identity", ["x"], "a", {}), ("Add", ["a", "x"], "y", {})], {"x": floats(2, 3)}, {}
    )
    (got,) = run_lowered(lower_model(model), [floats(2, 3)])
    assert_same(got, floats(2, 3) * 2, 1e-6)


@pytest.mark.parametrize("fault", [AttributeError, AssertionError, NameError])
def test_a_fault_of_a_converter_is_no_refusal(fault, tmp_path, monkeypatch):
    """Nobody is told that a node is not supported where hybridc is at fault: exit code 1."""

    def broken(_call):
        raise fault("oops")

    table = ops.OperatorTable((Operator("Relu", broken),))
    monkeypatch.setattr(ops, "default_table", lambda: table)
    path = save(relu_model(), tmp_path / "m.onnx")
    outcome = hybridc("compile", path, "-o", tmp_path / "b.hyb")
    assert outcome.code == 1
    assert f"lowering relu (Relu) failed: {fault.__name__}: oops" in outcome.stderr
