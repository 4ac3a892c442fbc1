"""Models that cannot be read are refused with a sentence, through the command line."""

import random

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import hybridc
from hybridc.frontend.read import NEWEST_OPSET, read_model
from tests.models import (
    branched_model,
    linear_model,
    make_model,
    node,
    relu_model,
    run_reference,
    save,
    scale_model,
)
from tests.support import assert_close, assert_compile_refused, assert_refused, compile_to
from tests.support import hybridc as command


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("empty.onnx", b""),
        ("text.onnx", b"This is a text and not a model.\n"),
        ("zeros.onnx", bytes(1000)),
        ("noise.onnx", random.Random(0).randbytes(1000)),
        ("package.json", b'{"name": "package"}'),
        ("notes.textproto", b"ir_version: 8 nonsense"),
        ("list.onnxtxt", b"<>"),
    ],
)
def test_not_onnx(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    assert_compile_refused(tmp_path / name, tmp_path, 3, name, "not an ONNX model")
    assert_refused(command("inspect", tmp_path / name), 3, "not an ONNX model")


@pytest.mark.parametrize("part", [0.1, 0.5, 0.9, 0.99])
def test_cut_off(tmp_path, part):
    data = branched_model().SerializeToString()
    (tmp_path / "cut.onnx").write_bytes(data[: int(len(data) * part)])
    assert_compile_refused(tmp_path / "cut.onnx", tmp_path, 3, "cut.onnx")


def test_every_cut_is_refused_or_a_model(tmp_path):
    """No length makes anything but a ModelError."""
    data = relu_model().SerializeToString()
    path = tmp_path / "cut.onnx"
    for length in range(len(data)):
        path.write_bytes(data[:length])
        outcome = command("inspect", path)
        assert outcome.code in (0, 2, 3), outcome


def test_no_file(tmp_path):
    assert_compile_refused(tmp_path / "none.onnx", tmp_path, 2, "there is no file")


def test_a_folder(tmp_path):
    assert_refused(command("compile", tmp_path, "-o", tmp_path / "b"), 2, "there is no file")


@pytest.mark.parametrize("opset", [0, 99])
def test_opset_out_of_range(tmp_path, opset):
    path = save(relu_model(opset=opset), tmp_path / "m.onnx")
    assert_compile_refused(path, tmp_path, 3, f"opset {opset}", f"1 to {NEWEST_OPSET}")


@pytest.mark.parametrize("opset", [1, 6, 7, 9, 13, 18, 21, 23, NEWEST_OPSET])
def test_opsets_in_range(tmp_path, opset):
    model = relu_model(opset=opset)
    model.ir_version = 3 if opset < 9 else 10
    compile_to(tmp_path / "b.hyb", model)
    with hybridc.load(tmp_path / "b.hyb") as loaded:
        result = loaded(x=np.array([[-1, 0, 1], [2, -2, 3]], "f"))
    np.testing.assert_array_equal(result["y"], [[0, 0, 1], [2, 0, 3]])


def test_unknown_operator(tmp_path):
    model = make_model([node("Frobnicate", "x", "y", "frob")], {"x": (2,)}, {"y": (2,)})
    path = save(model, tmp_path / "m.onnx")
    assert_compile_refused(path, tmp_path, 3, "Frobnicate")


def unknown_domain():
    """A valid model with one operator of a domain that nobody knows."""
    strange = helper.make_node("Frob", ["x"], ["y"], name="frob", domain="com.example")
    model = make_model([strange], {"x": (2,)}, {"y": (2,)})
    model.opset_import.append(helper.make_opsetid("com.example", 1))
    return model


@pytest.mark.parametrize("options", [(), ("--no-fallback",)])
def test_unknown_domain(options, tmp_path):
    path = save(unknown_domain(), tmp_path / "m.onnx")
    outcome = command("compile", path, "-o", tmp_path / "bundle", *options)
    assert outcome.code == 3
    assert "cannot be compiled" in outcome.complaint[0]
    assert outcome.complaint[1].startswith("  frob (Frob): com.example Frob")
    assert "Traceback" not in outcome.stderr
    assert not (tmp_path / "bundle").exists()


def test_inspect_shows_the_unknown_domain(tmp_path):
    outcome = command("inspect", save(unknown_domain(), tmp_path / "m.onnx"))
    assert outcome.code == 0
    assert "com.example.Frob" in outcome.stdout
    assert "no (1 of 1)" in outcome.stdout


def test_domain_without_an_import(tmp_path):
    model = unknown_domain()
    del model.opset_import[1]
    assert_compile_refused(save(model, tmp_path / "m.onnx"), tmp_path, 3, "com.example")


@pytest.mark.parametrize(
    "nodes",
    [
        [node("Relu", "nowhere", "y")],
        [node("Relu", "x", "y"), node("Neg", "x", "y")],
        [node("Relu", "y", "z"), node("Neg", "z", "y")],
        [node("Relu", "x x", "y")],
        [node("Relu", "x", "z")],
    ],
    ids=["undefined", "twice", "cycle", "arity", "no output"],
)
def test_invalid_graph(tmp_path, nodes):
    model = make_model(nodes, {"x": (2,)}, {"y": (2,)})
    assert_compile_refused(save(model, tmp_path / "m.onnx"), tmp_path, 3, "not a valid ONNX model")


def test_initializers_that_are_also_inputs(tmp_path):
    """Before IR version 4 every initializer had to be listed as an input."""
    model = branched_model()
    for tensor in model.graph.initializer:
        info = helper.make_tensor_value_info(tensor.name, TensorProto.FLOAT, tensor.dims)
        model.graph.input.append(info)
    model.ir_version = 3
    report = compile_to(tmp_path / "b.hyb", model)
    assert [spec.name for spec in report.manifest.inputs] == ["x"]
    inputs = {"x": np.ones((1, 3, 8, 8), "f")}
    with hybridc.load(tmp_path / "b.hyb") as loaded:
        assert_close(loaded.run(inputs), run_reference(branched_model(), inputs))


def external(tmp_path, **changes):
    """A model with its weights beside it; ``changes`` overwrite entries of the first reference."""
    path = save(scale_model((4,)), tmp_path / "m.onnx", external=True)
    model = onnx.load(path, load_external_data=False)
    entries = model.graph.initializer[0].external_data
    kept = {entry.key: entry.value for entry in entries} | changes
    del entries[:]
    for key, value in kept.items():
        if value is not None:
            entries.add(key=key, value=value)
    path.write_bytes(model.SerializeToString())
    return path


def test_external_data(tmp_path):
    path = save(linear_model(64), tmp_path / "m.onnx", external=True)
    assert path.stat().st_size < 1000 < (tmp_path / "weights.bin").stat().st_size
    compile_to(tmp_path / "b.hyb", path)
    inputs = {"x": np.ones((1, 64), "f")}
    with hybridc.load(tmp_path / "b.hyb") as loaded:
        assert_close(loaded.run(inputs), run_reference(linear_model(64), inputs))


def test_external_data_is_not_read_into_memory(tmp_path):
    """Weights stay in their file until they are needed: models may exceed protobuf's 2 GB."""
    source = read_model(save(linear_model(64), tmp_path / "m.onnx", external=True))
    (weight,) = source.model.graph.initializers.values()
    assert type(weight.const_value).__name__ == "ExternalTensor"


def test_checksum_covers_external_data(tmp_path):
    path = save(linear_model(8), tmp_path / "m.onnx", external=True)
    before = read_model(path).sha256
    data = tmp_path / "weights.bin"
    data.write_bytes(bytes(data.stat().st_size))
    assert read_model(path).sha256 != before


def test_external_data_missing(tmp_path):
    path = external(tmp_path)
    (tmp_path / "weights.bin").unlink()
    assert_compile_refused(path, tmp_path, 3, "weights.bin is missing")


@pytest.mark.parametrize("length", ["4", None])
def test_external_data_too_short(tmp_path, length):
    path = external(tmp_path, length=length)
    (tmp_path / "weights.bin").write_bytes(b"\0\0")
    assert_compile_refused(path, tmp_path, 3, "weights.bin", "too short")


@pytest.mark.parametrize("location", ["../weights.bin", "/etc/hostname", ""])
def test_external_data_elsewhere(tmp_path, location):
    (tmp_path / "weights.bin").write_bytes(bytes(100))
    path = external(tmp_path / "model", location=location)
    assert_compile_refused(path, tmp_path, 3, "outside the model's folder")


def test_external_data_behind_a_link(tmp_path):
    """A link that leads out of the model's folder is no way around."""
    path = external(tmp_path / "model")
    (tmp_path / "model" / "weights.bin").rename(tmp_path / "elsewhere.bin")
    (tmp_path / "model" / "weights.bin").symlink_to(tmp_path / "elsewhere.bin")
    assert_compile_refused(path, tmp_path, 3, "outside the model's folder")


@pytest.mark.parametrize(
    "changes",
    [{"offset": "-4"}, {"offset": "abc"}, {"length": "-1"}, {"length": "x"}, {"length": "400"}],
)
def test_external_data_with_odd_numbers(tmp_path, changes):
    assert_compile_refused(external(tmp_path, **changes), tmp_path, 3, "m.onnx")
