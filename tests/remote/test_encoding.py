"""Tensors that cross in fewer bytes: how far they are off, what is refused, the whole way."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

import hybridc
from hybridc.bundle.manifest import EncodingSpec, TensorSpec
from hybridc.bundle.read import open_bundle
from hybridc.errors import RemoteMissing
from hybridc.runtime.remote_encoding import (
    BYTE,
    HALF,
    decode,
    encode,
    encoded_bytes,
    encodings_of,
    wire_specs,
)
from hybridc.runtime.remote_settings import RemoteSettings
from hybridc.runtime.serving import Asked, Served, open_served
from tests.remote.conftest import SERVER, compile_hybrid
from tests.remote.http_server import HttpServer
from tests.remote.server import Server
from tests.support import hybridc as run_hybridc

FLOATS = st.floats(-1e4, 1e4, width=32)


def around(array: np.ndarray, dtype: str) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """An array after the whole way, and what was sent for it."""
    specs = [TensorSpec("t", array.dtype.name, array.shape)]
    encodings = [EncodingSpec("t", dtype)]
    sent = encode(specs, encodings, {"t": array})
    for spec in wire_specs(specs, encodings):
        assert (sent[spec.name].shape, sent[spec.name].dtype) == (spec.shape, spec.dtype)
    return decode(specs, encodings, sent)["t"], sent


def images() -> st.SearchStrategy[np.ndarray]:
    shapes = st.tuples(st.integers(0, 3), st.integers(1, 3), st.just(4), st.integers(4, 6))
    return shapes.flatmap(
        lambda s: arrays.arrays(np.float32, s, elements=FLOATS, fill=st.nothing())
    )


@given(images())
@settings(max_examples=100, deadline=None)
def test_a_byte_is_off_by_half_a_step_of_its_channel(array):
    found, _ = around(array, BYTE)
    assert found.dtype == np.float32
    assert found.shape == array.shape
    if array.size:
        low, high = (f(array, axis=(2, 3), keepdims=True) for f in (np.min, np.max))
        slack = 1e-5 * np.maximum(abs(low), abs(high))
        assert (abs(found - array) <= (high - low) / 510 + slack).all()


@given(images())
@settings(max_examples=50, deadline=None)
def test_half_rounds_each_number(array):
    found, _ = around(array, HALF)
    np.testing.assert_allclose(found, array, rtol=2**-10, atol=2**-24)


def test_rows_do_not_depend_on_each_other():
    """So a server may run rows of several requests at once."""
    rows = np.random.default_rng(0).standard_normal((3, 2, 5, 7)).astype(np.float32)
    rows[1] *= 1000
    together, _ = around(rows, BYTE)
    for index in range(3):
        np.testing.assert_array_equal(around(rows[index : index + 1], BYTE)[0][0], together[index])


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("dtype", [HALF, BYTE])
def test_what_cannot_be_encoded_is_refused(dtype, value):
    array = np.zeros((1, 2, 4, 4), np.float32)
    array[0, 1, 2, 3] = value
    with pytest.raises(ValueError, match="'t'"):
        around(array, dtype)


def test_numbers_beyond_half_are_refused():
    with pytest.raises(ValueError, match="float16"):
        around(np.full((1, 300), 1e6, np.float32), HALF)


@pytest.mark.parametrize("shape", [(1, 8, 24, 24), (1, 7, 384), (4, 512), (1, 300, 2)])
def test_bytes_are_those_that_are_sent(shape):
    array = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    (spec,) = [TensorSpec("t", "float32", shape)]
    for dtype in (HALF, BYTE):
        _, sent = around(array, dtype)
        count = sum(part.nbytes for part in sent.values())
        assert encoded_bytes(spec, dtype, array.nbytes) == count


def test_small_and_whole_tensors_stay_as_they_are():
    specs = [
        TensorSpec("small", "float32", (1, 10)),
        TensorSpec("ids", "int64", (1, 512)),
        TensorSpec("flat", "float32", (4096,)),
        TensorSpec("thin", "float32", (4096, 2)),
        TensorSpec("text", "float32", ("batch", "length", 384)),
        TensorSpec("wide", "float64", ("batch", 512)),
    ]
    assert [encoding.tensor for encoding in encodings_of(specs, BYTE)] == ["text", "wide"]


@pytest.fixture(scope="module")
def encoded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("encoded")
    options = ("--private", "x", "--release", "map", "--remote-precision", "int8")
    return compile_hybrid(folder, *SERVER, *options, "--remote-batch", "4", batch="1..4")


@pytest.mark.parametrize("kind", [Server, HttpServer])
def test_the_whole_way(encoded, kind):
    with kind(encoded.repository) as server:
        remote = RemoteSettings((server.address,), plan="cut1")
        with hybridc.load(encoded.bundle, remote=remote) as model:
            (plan,) = [plan for plan in model.manifest.plans if plan.name == "cut1"]
            result = model(x=encoded.x)["y"]
            assert 0 < abs(result - encoded.y).max() < 0.02 * abs(encoded.y).max()
            with pytest.raises(RemoteMissing, match="cannot be spread"):
                model(x=np.full_like(encoded.x, 3e38))
        count = 8 * 24 * 24 + 8 * 8
        assert sum(map(len, server.received)) - remote.probe_bytes * (kind is Server) == count
        assert plan.bytes == 4 * (count + 40)


def test_without_a_way_to_encode_the_local_plan_runs(encoded):
    with (
        Server(encoded.repository) as server,
        hybridc.load(encoded.bundle, remote=server.address) as model,
    ):
        model.probe()
        model._chooser.current = next(p for p in model.manifest.plans if p.name == "cut1")
        model(x=np.full_like(encoded.x, 3e38))
        assert model.status.fallbacks == 1


def test_batches_of_encoded_tensors(encoded):
    manifest = open_bundle(encoded.bundle).manifest
    (spec,) = [p.remote for plan in manifest.plans for p in plan.parts if p.remote]
    served = Served(open_served(encoded.repository / spec.model / "1"), batches=True)
    rows = np.random.default_rng(5).standard_normal((3, 8, 24, 24)).astype(np.float32)
    sent = [encode(spec.inputs, spec.encodings, {"map": rows[i : i + 1]}) for i in range(3)]
    together = served.run([Asked(tensors, spec.build) for tensors in sent])
    for tensors, result in zip(sent, together, strict=True):
        (alone,) = served.run([Asked(tensors, spec.build)])
        np.testing.assert_allclose(result["y"], alone["y"], rtol=1e-4, atol=1e-5)


def test_what_is_written(encoded):
    manifest = open_bundle(encoded.bundle).manifest
    plans = {plan.name: plan for plan in manifest.plans}
    (crossing, _) = plans["cut1"].crossings
    assert crossing.reason == "released by --release map, as uint8"
    assert crossing.share == pytest.approx(crossing.bytes / (4 * encoded.x.nbytes))
    assert plans["cut1"].tolerance == 0.1
    assert plans["local"].tolerance is None
    config = next(encoded.repository.glob("*/config.pbtxt")).read_text()
    assert 'name: "map" data_type: TYPE_UINT8 dims: [ 8, 24, 24 ]' in config
    assert 'name: "hybridc_range_map" data_type: TYPE_FP32 dims: [ 8, 2 ]' in config


def test_the_error_is_reported_and_judged(encoded, tmp_path):
    model = encoded.bundle.with_name("model.onnx")
    options = ("--shape", "batch=1", "--remote-precision", "int8", *SERVER)
    place = ("--repository", tmp_path / "repository", "-o", tmp_path / "edge.hyb")
    done = run_hybridc("compile", model, *place, *options)
    assert done.code == 0, done.stderr
    errors = dict(
        line.partition("onnxruntime ")[2].split(" by ")[1].split(": ")
        for line in done.stdout.splitlines()
        if line.startswith("largest error")
    )
    assert float(errors["local"].split()[0]) < 1e-5 < float(errors["cut1"].split()[0]) < 0.1
    more = (*options, "--tolerance", "1e-5", "--repository", tmp_path / "other")
    refused = run_hybridc("compile", model, "-o", tmp_path / "refused.hyb", *more)
    assert refused.code == 4
    assert "more than 1e-05" in refused.stderr
    assert "output 'y' of sample 0 by cut1" in refused.stderr
