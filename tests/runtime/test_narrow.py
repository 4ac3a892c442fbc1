"""Bundles with inputs, outputs and weights of types that numpy does not have."""

import json
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
import tvm_ffi
from onnx import TensorProto, helper, numpy_helper

import hybridc
from hybridc.errors import UsageError
from hybridc.runtime.arrays import random_inputs, read_arrays, write_arrays
from tests.models import node
from tests.support import compile_to

SHAPE = (2, 8)
INT4 = np.arange(-8, 8).reshape(SHAPE).astype(ml_dtypes.int4)
FLOAT8 = np.linspace(-9, 9, 16, dtype=np.float32).reshape(SHAPE).astype(ml_dtypes.float8_e4m3fn)


def narrow_model():
    """``total = int4 * weight + float8``; both inputs are handed out too, turned round."""
    info = helper.make_tensor_value_info
    weight = np.array([1, -2, 3, -4, 5, -6, 7, -8]).astype(ml_dtypes.int4)
    nodes = [
        node("Cast", "i", "i32", "wide_integers", to=TensorProto.FLOAT),
        node("Cast", "f", "f32", "wide_floats", to=TensorProto.FLOAT),
        node("DequantizeLinear", "w scale", "w32", "weight"),
        node("Mul", "i32 w32", "product", "product"),
        node("Add", "product f32", "total", "total"),
        node("Transpose", "i", "turned", "turn", perm=[1, 0]),
        node("Cast", "total", "small", "small", to=TensorProto.FLOAT8E5M2),
    ]
    graph = helper.make_graph(
        nodes,
        "narrow",
        [info("i", TensorProto.INT4, SHAPE), info("f", TensorProto.FLOAT8E4M3FN, ["rows", 8])],
        [
            info("total", TensorProto.FLOAT, SHAPE),
            info("turned", TensorProto.INT4, SHAPE[::-1]),
            info("small", TensorProto.FLOAT8E5M2, SHAPE),
        ],
        [
            numpy_helper.from_array(weight, "w"),
            numpy_helper.from_array(np.array(0.5, np.float32), "scale"),
        ],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    return model, weight


@pytest.fixture(scope="module")
def narrow_bundle(tmp_path_factory):
    """Compiled with the check: its stored samples have been run in another process."""
    output = tmp_path_factory.mktemp("narrow") / "bundle"
    report = compile_to(output, narrow_model()[0], shapes=("rows=2",), verify=True)
    assert {error["output"] for error in report.errors} == {"total", "turned", "small"}
    return output


@pytest.fixture
def model(narrow_bundle):
    with hybridc.load(narrow_bundle) as loaded:
        yield loaded


def expected():
    weight = narrow_model()[1].astype(np.float32) * np.float32(0.5)
    total = INT4.astype(np.float32) * weight + FLOAT8.astype(np.float32)
    return {"total": total, "turned": INT4.T, "small": total.astype(ml_dtypes.float8_e5m2)}


def assert_right(outputs):
    for name, wanted in expected().items():
        assert outputs[name].dtype == wanted.dtype
        np.testing.assert_array_equal(
            outputs[name].astype(np.float32), wanted.astype(np.float32), name
        )


def test_the_manifest_names_the_types(model):
    assert [spec.dtype for spec in model.inputs] == ["int4", "float8_e4m3fn"]
    assert [spec.dtype for spec in model.outputs] == ["float32", "int4", "float8_e5m2"]


def test_arrays_of_ml_dtypes(model):
    assert_right(model(i=INT4, f=FLOAT8))


def test_carriers(model):
    assert_right(model(i=INT4.astype(np.int8), f=FLOAT8.view(np.uint8)))


def test_undefined_upper_bits_do_not_matter(model):
    noisy = (INT4.view(np.uint8) | 0x50).view(ml_dtypes.int4)
    assert_right(model(i=noisy, f=FLOAT8))


def test_tensors_of_other_libraries(model):
    codes = tvm_ffi.from_dlpack(FLOAT8.view(np.uint8))
    view = tvm_ffi.get_global_func("runtime.TVMTensorCreateView")
    typed = view(codes, tvm_ffi.Shape(SHAPE), tvm_ffi.dtype("float8_e4m3fn"), 0)
    carriers = tvm_ffi.from_dlpack(INT4.astype(np.int8))
    assert_right(model(i=carriers, f=typed))
    assert_right(model(i=carriers, f=codes))


@pytest.mark.parametrize(
    ("i", "f", "words"),
    [
        (INT4.astype(np.int16), FLOAT8, "int16[2x8] and must be i: int4[2x8], or the same of int8"),
        (INT4.astype(np.int8)[:1], FLOAT8, "int4[1x8] and must be i: int4[2x8]"),
        (np.full(SHAPE, 8, np.int8), FLOAT8, "holds 0..8, and as int4 it may hold -8..7"),
        (INT4, FLOAT8.astype(np.float32), "must be f: float8_e4m3fn"),
        (INT4, FLOAT8.astype(ml_dtypes.float8_e5m2), "is float8_e5m2[2x8]"),
        (INT4, FLOAT8.view(np.int8), "is int8[2x8] and must be f: float8_e4m3fn"),
    ],
)
def test_mistakes(model, i, f, words):
    with pytest.raises(UsageError) as refusal:
        model(i=i, f=f)
    assert words in str(refusal.value)


def test_without_the_package(narrow_bundle):
    """Carriers come and go where ml_dtypes is not installed."""
    code = """
import json, sys
sys.modules["ml_dtypes"] = None
import hybridc, numpy as np
i, f = (np.array(json.loads(text)) for text in sys.argv[2:])
outputs = hybridc.load(sys.argv[1])(i=i.astype(np.int8), f=f.astype(np.uint8))
print(json.dumps({name: [str(a.dtype), a.tolist()] for name, a in outputs.items()}))
"""
    arrays = [json.dumps(a.tolist()) for a in (INT4.astype(np.int8), FLOAT8.view(np.uint8))]
    command = [sys.executable, "-c", code, str(narrow_bundle), *arrays]
    answer = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    wanted = expected()
    assert answer["total"] == ["float32", wanted["total"].tolist()]
    assert answer["turned"] == ["int8", wanted["turned"].astype(int).tolist()]
    assert answer["small"] == ["uint8", wanted["small"].view(np.uint8).tolist()]


def test_files_hold_carriers(model, tmp_path):
    inputs = random_inputs(model, 0)
    assert [inputs[name].dtype.name for name in "if"] == ["int4", "float8_e4m3fn"]
    write_arrays(tmp_path / "in.npz", inputs)
    read = read_arrays(tmp_path / "in.npz", model.inputs)
    assert [read[name].dtype.name for name in "if"] == ["int8", "uint8"]
    for name, wanted in model.run(inputs).items():
        np.testing.assert_array_equal(model.run(read)[name], wanted)
