"""The manifest: round trip, tolerance for what is newer, refusal of what is wrong."""

import hashlib
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridc.bundle.manifest import (
    DeviceSpec,
    FileSpec,
    Manifest,
    PartSpec,
    SampleSpec,
    TensorSpec,
    TransferSpec,
    from_json,
    to_json,
)
from hybridc.errors import BundleError

EXAMPLE = Manifest(
    schema="2.0",
    hybridc="0.1.0",
    tvm="0.27.0",
    tvm_ffi="0.1.14",
    model="model.onnx",
    model_sha256="00",
    inputs=(TensorSpec("x", "float32", ("batch", 3)),),
    outputs=(TensorSpec("y", "float32", ("batch", 3)),),
    dimensions={"batch": (1, 8)},
    devices=(DeviceSpec("llvm:0", "llvm", "x86-64-v3", "x86_64", ("avx2",), 64),),
    parts=(PartSpec("part0", "llvm:0", "parts/part0.so", ("x",), ("y",), ("w",), ("relu",), 64),),
    transfers=(TransferSpec("x", "input", "llvm:0", 0),),
    runtime={"x86_64": ("lib/x86_64/libtvm_runtime.so",)},
    weights="weights.safetensors",
    samples=(SampleSpec("samples/0-inputs", "samples/0-outputs", "onnxruntime"),),
    files=(FileSpec("weights.safetensors", 8, "00"),),
)


def sealed(body):
    """The text of a manifest with the digest that belongs to its contents."""
    content = {key: value for key, value in body.items() if key != "digest"}
    plain = json.dumps(content, indent=1, ensure_ascii=False) + "\n"
    digest = hashlib.sha256(plain.encode()).hexdigest()
    return (json.dumps({**content, "digest": digest}, indent=1, ensure_ascii=False) + "\n").encode()


def changed(steps, value):
    """The example's text with one entry replaced; steps lead to it."""
    body = json.loads(to_json(EXAMPLE))
    place = body
    for step in steps[:-1]:
        place = place[step]
    place[steps[-1]] = value
    return sealed(body)


manifests = st.builds(
    Manifest,
    schema=st.integers(0, 99).map(lambda minor: f"2.{minor}"),
    inputs=st.lists(st.from_type(TensorSpec), max_size=2).map(tuple),
    outputs=st.lists(st.from_type(TensorSpec), max_size=2).map(tuple),
    dimensions=st.dictionaries(st.text(), st.tuples(st.integers(), st.integers()), max_size=2),
    devices=st.lists(st.builds(DeviceSpec, cpu_flags=...), max_size=2).map(tuple),
    parts=st.lists(st.from_type(PartSpec), max_size=2).map(tuple),
    transfers=st.lists(st.from_type(TransferSpec), max_size=2).map(tuple),
    runtime=st.dictionaries(st.text(), st.lists(st.text(), max_size=2).map(tuple), max_size=2),
    samples=st.lists(st.from_type(SampleSpec), max_size=2).map(tuple),
    tolerance=st.floats(allow_nan=False),
    files=st.lists(st.from_type(FileSpec), max_size=2).map(tuple),
)


@settings(max_examples=50, deadline=None)
@given(manifests)
def test_round_trip(manifest):
    assert from_json(to_json(manifest), "manifest") == manifest


def test_sealed_by_the_documented_rule():
    assert sealed(json.loads(to_json(EXAMPLE))) == to_json(EXAMPLE)


def test_unknown_fields_and_later_minors_are_read():
    body = json.loads(to_json(EXAMPLE))
    body["schema"] = "2.99"
    body["inputs"][0]["layout"] = "NCHW"
    body["signature"] = {"by": "someone"}
    read = from_json(sealed(body), "manifest")
    assert read.schema == "2.99"
    assert read.inputs == EXAMPLE.inputs


def test_missing_defaults_are_filled_in():
    body = json.loads(to_json(EXAMPLE))
    del body["samples"]
    assert from_json(sealed(body), "manifest").samples == ()


@pytest.mark.parametrize("schema", ["3.0", "1.9", "10.0"])
def test_other_major_is_refused(schema):
    with pytest.raises(BundleError, match=rf"has schema {schema}, and this hybridc reads 2\.x"):
        from_json(changed(["schema"], schema), "manifest")


@pytest.mark.parametrize(
    ("steps", "value", "complaint"),
    [
        (["inputs"], {}, "manifest.inputs is not a list"),
        (["inputs", 0], "x", "manifest.inputs[0] is not an object"),
        (["inputs", 0, "name"], 1, "manifest.inputs[0].name is not str"),
        (["inputs", 0, "shape", 1], 1.5, "manifest.inputs[0].shape[1] is not int or str"),
        (["inputs", 0, "shape", 1], True, "manifest.inputs[0].shape[1] is not int or str"),
        (["dimensions", "batch"], [1, 2, 3], "manifest.dimensions.batch is not a list of 2"),
        (["dimensions"], [], "manifest.dimensions is not an object"),
        (["devices", 0, "cpu_flags", 0], None, "manifest.devices[0].cpu_flags[0] is not str"),
        (["parts", 0, "memory_bytes"], "64", "manifest.parts[0].memory_bytes is not int"),
        (["runtime", "x86_64"], "lib", "manifest.runtime.x86_64 is not a list"),
        (["tolerance"], "1e-4", "manifest.tolerance is not float"),
        (["files", 0, "sha256"], 0, "manifest.files[0].sha256 is not str"),
        (["schema"], "one", "damaged"),
    ],
)
def test_wrong_types_are_refused_with_their_path(steps, value, complaint):
    with pytest.raises(BundleError) as caught:
        from_json(changed(steps, value), "manifest")
    assert complaint in str(caught.value)


def test_a_number_too_large_is_refused():
    with pytest.raises(BundleError, match="too large"):
        from_json(changed(["tolerance"], 10**400), "manifest")


@pytest.mark.parametrize("field", ["schema", "inputs", "weights", "parts"])
def test_missing_field_is_refused_by_name(field):
    body = json.loads(to_json(EXAMPLE))
    del body[field]
    with pytest.raises(BundleError, match=f"{field} is missing"):
        from_json(sealed(body), "manifest")


@pytest.mark.parametrize(
    "text", [b"", b"null", b"[]", b"{", b"\xff\xfe", b'{"schema": "2.0"}', b"[" * 100_000]
)
def test_what_is_no_manifest_is_refused(text):
    with pytest.raises(BundleError, match="damaged"):
        from_json(text, "manifest")


def test_every_changed_byte_is_noticed():
    text = to_json(EXAMPLE)
    for index in range(len(text)):
        damaged = bytearray(text)
        damaged[index] ^= 1 << index % 8
        with pytest.raises(BundleError):
            from_json(bytes(damaged), "manifest")
