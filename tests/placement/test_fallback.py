"""Nodes that no target compiles are left to ONNX Runtime, never silently and with right results."""

import json
import os
import re
import shutil
import subprocess
import sys

import numpy as np
import onnx
import onnxruntime
import onnxruntime_extensions
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper

import hybridc
from hybridc.errors import DeviceError
from hybridc.runtime import machine
from tests.models import branched_model, make_model, node, random, run_reference, save
from tests.support import assert_close, assert_compile_refused, compile_to
from tests.support import hybridc as command

TENSOR = helper.make_tensor_value_info
WORDS = np.array([["a", "Zürich"], ["", "two words"]], object)


def model_of(nodes, inputs, outputs, opset=19, ml=3):
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid("ai.onnx.ml", ml)]
    graph = helper.make_graph(nodes, "graph", inputs, outputs)
    return helper.make_model(graph, opset_imports=opsets, ir_version=9)


def strings_between():
    """Numbers, then a comparison of strings, then numbers again."""
    nodes = [
        node("Relu", "x", "r", "relu"),
        node("Equal", "s t", "same", "same"),
        node("Cast", "same", "f", "cast", to=TensorProto.FLOAT),
        node("Add", "r f", "y", "add"),
    ]
    strings = [TENSOR(name, TensorProto.STRING, (2, 2)) for name in "st"]
    inputs = [TENSOR("x", TensorProto.FLOAT, (2, 2)), *strings]
    return model_of(nodes, inputs, [TENSOR("y", TensorProto.FLOAT, (2, 2))])


def classifier():
    """A linear model whose probabilities come as a sequence of maps, as scikit-learn exports."""
    scale = node("Mul", "x x", "square", "square")
    zip_map = helper.make_node(
        "ZipMap", ["square"], ["y"], "zip", domain="ai.onnx.ml", classlabels_int64s=[7, 8, 9]
    )
    kind = helper.make_sequence_type_proto(
        helper.make_map_type_proto(
            TensorProto.INT64, helper.make_tensor_type_proto(TensorProto.FLOAT, None)
        )
    )
    output = onnx.ValueInfoProto(name="y", type=kind)
    return model_of([scale, zip_map], [TENSOR("x", TensorProto.FLOAT, (2, 3))], [output])


def test_strings(tmp_path):
    feeds = {"x": random(2, 2), "s": WORDS, "t": WORDS[::-1]}
    report = compile_to(tmp_path / "m.hyb", strings_between(), verify=True)
    assert [item.node for item in report.manifest.fallbacks] == ["same"]
    assert "strings" in report.manifest.fallbacks[0].reason
    assert report.errors, "strings are compared with the reference too"
    with hybridc.load(tmp_path / "m.hyb") as model:
        assert model.plan["onnxruntime:0"] == ("same",)
        assert_close(model.run(feeds), run_reference(strings_between(), feeds))
        with pytest.raises(hybridc.errors.UsageError, match=r"'s' is float32.*string\[2x2\]"):
            model.run({**feeds, "s": random(2, 2)})


def test_maps(tmp_path):
    x = random(2, 3)
    report = compile_to(tmp_path / "m.hyb", classifier(), verify=True)
    assert report.manifest.outputs[0].dtype == "seq(map(int64,tensor(float)))"
    assert any("nothing was compared" in note for note in report.notes)
    (expected,) = onnxruntime.InferenceSession(classifier().SerializeToString()).run(None, {"x": x})
    with hybridc.load(tmp_path / "m.hyb") as model:
        assert model(x=x)["y"] == [pytest.approx(row) for row in expected]


def test_sequences_as_inputs(tmp_path):
    nodes = [node("SequenceAt", "s i", "x", "at"), node("Exp", "x", "y", "exp")]
    sequence = helper.make_tensor_sequence_value_info("s", TensorProto.FLOAT, None)
    index = TENSOR("i", TensorProto.INT64, ())
    model = model_of(nodes, [sequence, index], [TENSOR("y", TensorProto.FLOAT, (2, None))])
    compile_to(tmp_path / "m.hyb", model, verify=True)
    tensors = [random(2, 2), random(2, 5)]
    with hybridc.load(tmp_path / "m.hyb") as loaded:
        for number in (0, -1):
            result = loaded.run({"s": tensors, "i": np.array(number)})["y"]
            np.testing.assert_allclose(result, np.exp(tensors[number]), rtol=1e-6)


def test_strings_handed_through(tmp_path):
    """An input that is an output takes no node and no device."""
    nodes = [node("Relu", "x", "y", "relu")]
    inputs = [TENSOR("x", TensorProto.FLOAT, (2,)), TENSOR("s", TensorProto.STRING, (2, 2))]
    outputs = [TENSOR("y", TensorProto.FLOAT, (2,)), TENSOR("s", TensorProto.STRING, (2, 2))]
    model = model_of(nodes, inputs, outputs)
    report = compile_to(tmp_path / "m.hyb", model, verify=True)
    assert not report.manifest.fallbacks
    with hybridc.load(tmp_path / "m.hyb") as loaded:
        assert (loaded.run({"x": random(2), "s": WORDS})["s"] == WORDS).all()


def test_no_fallback_lists_the_nodes(tmp_path):
    path = save(strings_between(), tmp_path / "m.onnx")
    outcome = command("compile", path, "-o", tmp_path / "m.hyb", "--no-fallback")
    assert outcome.code == 3
    (reason,) = outcome.complaint[1:]
    assert re.fullmatch(r"  same \(Equal\): '[st]' holds strings", reason)
    assert not (tmp_path / "m.hyb").exists()


def test_the_report_names_the_nodes(tmp_path):
    path = save(strings_between(), tmp_path / "m.onnx")
    outcome = command("compile", path, "-o", tmp_path / "m.hyb")
    assert outcome.code == 0
    assert "1 of them are left to ONNX Runtime" in outcome.stderr
    shown = command("inspect", tmp_path / "m.hyb").stdout
    for text in (outcome.stdout, shown):
        assert re.search("same  Equal  '[st]' holds strings", text)
    assert "packages: onnxruntime>=" in shown
    data = json.loads(command("inspect", tmp_path / "m.hyb", "--format", "json").stdout)
    assert data["fallbacks"][0]["node"] == "same"


def test_a_pin_on_another_device_is_kept_or_refused(tmp_path):
    path = save(strings_between(), tmp_path / "m.onnx")
    outcome = command("compile", path, "-o", tmp_path / "m.hyb", "--pin", "same=llvm:0")
    assert outcome.code == 3
    assert "--pin same=llvm:0 cannot be kept" in outcome.stderr
    assert "holds strings" in outcome.stderr


def test_without_the_package(tmp_path, monkeypatch):
    compile_to(tmp_path / "m.hyb", strings_between(), verify=True)

    def older(_name):
        return "1.3.0"

    def missing(name):
        raise machine.PackageNotFoundError(name)

    for version, words in ((older, "is of version 1.3.0"), (missing, "is not installed")):
        monkeypatch.setattr(machine, "version", version)
        with pytest.raises(DeviceError, match=words) as caught:
            hybridc.load(tmp_path / "m.hyb")
        assert "pip install 'hybridc[onnxruntime]'" in str(caught.value)


def test_a_compiled_bundle_does_not_import_onnxruntime(tmp_path):
    compile_to(tmp_path / "m.hyb", branched_model(), verify=True)
    code = (
        "import sys, hybridc, numpy\n"
        "hybridc.load(sys.argv[1])(x=numpy.zeros((1, 3, 8, 8), 'float32'))\n"
        "assert 'onnxruntime' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "m.hyb")], check=True)


def custom_operator():
    """A model with an operator that only a library for ONNX Runtime knows."""
    invert = helper.make_node("Inverse", ["x"], ["i"], "invert", domain="ai.onnx.contrib")
    nodes = [invert, node("MatMul", "x i", "y", "product")]
    square = [TENSOR(name, TensorProto.FLOAT, (3, 3)) for name in "xy"]
    model = model_of(nodes, square[:1], square[1:])
    model.opset_import.append(helper.make_opsetid("ai.onnx.contrib", 1))
    return model


def test_custom_operators(tmp_path):
    path = save(custom_operator(), tmp_path / "m.onnx")
    np.save(tmp_path / "x.npy", np.diag([1, 2, 3]).astype(np.float32) + 0.25)
    arguments = ("compile", path, "-o", tmp_path / "m.hyb", "--sample", tmp_path / "x.npy")
    outcome = command(*arguments)
    assert outcome.code == 3
    assert "invert (Inverse): ai.onnx.contrib Inverse" in outcome.stderr
    library = shutil.copy(onnxruntime_extensions.get_library_path(), tmp_path / "operators.so")
    targets = ("--target", "llvm", "--target", f"onnxruntime:{library}")
    outcome = command(*arguments, *targets)
    assert outcome.code == 0, outcome.stderr
    os.remove(library)
    with hybridc.load(tmp_path / "m.hyb") as loaded:
        assert loaded.plan["onnxruntime:0"][0] == "invert"
        result = loaded(x=np.load(tmp_path / "x.npy"))["y"]
    np.testing.assert_allclose(result, np.eye(3), atol=1e-6)


def test_narrow_types_are_not_left_to_onnxruntime(tmp_path):
    """It takes and gives no arrays of them; an error while running would come too late."""
    x, y = (TENSOR(name, TensorProto.FLOAT8E4M3FN, (2, 2)) for name in "xy")
    path = save(model_of([node("Relu", "x", "y", "relu")], [x], [y]), tmp_path / "m.onnx")
    outcome = command("compile", path, "-o", tmp_path / "m.hyb")
    assert outcome.code == 3
    reason, native = outcome.complaint
    assert "'x' is float8_e4m3fn" in reason
    assert "Relu of float8_e4m3fn" in native


def test_a_library_without_operators(tmp_path):
    path = save(branched_model(), tmp_path / "m.onnx")
    target = ("--target", f"onnxruntime:{path}")
    assert_compile_refused(path, tmp_path, 2, "custom operators", "m.onnx", options=target)


@pytest.mark.parametrize("dims", [(2, 3), ()])
def test_a_whole_model_on_onnxruntime(tmp_path, dims):
    model = make_model([node("Relu", "x", "y", "relu")], {"x": dims}, {"y": dims})
    path = save(model, tmp_path / "m.onnx")
    assert command("compile", path, "-o", tmp_path / "m.hyb", "--target", "onnxruntime").code == 0
    with hybridc.load(tmp_path / "m.hyb") as loaded:
        assert not loaded.manifest.runtime
        x = random(*dims)
        assert_close(loaded(x=x), run_reference(model, {"x": x}))


NAMES = ("stem", "left", "right", "pool", "flatten", "head")


@settings(max_examples=8, deadline=None)
@given(st.sets(st.sampled_from(NAMES)))
def test_any_split_gives_the_same_results(tmp_path_factory, there):
    folder = tmp_path_factory.mktemp("split")
    pins = [option for name in sorted(there) for option in ("--pin", f"{name}=onnxruntime:0")]
    path = save(branched_model(), folder / "m.onnx")
    targets = ("--target", "llvm", "--target", "onnxruntime")
    outcome = command("compile", path, "-o", folder / "m.hyb", *targets, *pins)
    assert outcome.code == 0, outcome.stderr
    feeds = {"x": random(1, 3, 8, 8)}
    with hybridc.load(folder / "m.hyb") as loaded:
        assert_close(loaded.run(feeds), run_reference(branched_model(), feeds))
