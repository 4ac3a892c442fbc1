"""The server's side: batches, and what Triton's Python back end calls."""

from __future__ import annotations

import json
import re
import sys
import types

import numpy as np
import pytest

import hybridc
from hybridc.bundle.read import open_bundle
from hybridc.errors import BundleError, RemoteMissing
from hybridc.runtime.remote_tensors import BUILD
from hybridc.runtime.serving import Asked, Served, TritonPythonModel, open_served
from tests.remote.conftest import SERVER, compile_hybrid
from tests.support import assert_compile_refused
from tests.support import hybridc as run_hybridc


@pytest.fixture(scope="module")
def batched(tmp_path_factory):
    folder = tmp_path_factory.mktemp("batched")
    options = ("--remote-batch", "4", "--remote-warm-up", "--no-verify")
    kserve = ("--kserve", "pvc://models/edge", "--remote-instances", "2", "--remote-delay", "2ms")
    return compile_hybrid(folder, *SERVER, *options, *kserve, batch="1..4")


@pytest.fixture(scope="module")
def cut(batched):
    """The folder of the version that the best cut needs, and what it needs."""
    manifest = open_bundle(batched.bundle).manifest
    plan = next(plan for plan in manifest.plans if plan.name == "cut1")
    (spec,) = [part.remote for part in plan.parts if part.remote]
    return batched.repository / spec.model / "1", spec


def requests(spec, *rows: int) -> list[Asked]:
    random = np.random.default_rng(3)
    shapes = [(count, *spec.inputs[0].shape[1:]) for count in rows]
    arrays = [random.standard_normal(shape).astype(np.float32) for shape in shapes]
    return [Asked({spec.inputs[0].name: array}, spec.build) for array in arrays]


def test_a_batch_gives_what_its_requests_would(cut):
    folder, spec = cut
    served = Served(open_served(folder), batches=True)
    asked = requests(spec, 1, 2, 1)
    together = served.run(asked)
    for request, result in zip(asked, together, strict=True):
        (alone,) = served.run([request])
        count = len(request.arrays[spec.inputs[0].name])
        assert result["y"].shape[0] == count
        assert result[BUILD].shape == (count, 40)
        np.testing.assert_allclose(result["y"], alone["y"], rtol=1e-4, atol=1e-5)


def test_a_request_for_another_build_is_refused_alone(cut):
    folder, spec = cut
    right, wrong = requests(spec, 1, 1)
    wrong = Asked(wrong.arrays, "00" * 32)
    first, second = Served(open_served(folder), batches=True).run([wrong, right])
    assert "another build" in first
    assert second["y"].shape == (1, 10, 1, 1)


def test_what_cannot_run_is_said_to_all_of_the_batch(cut):
    folder, spec = cut
    served = Served(open_served(folder), batches=True)
    results = served.run(requests(spec, 3, 3))
    assert all("compiled for 1..4" in result for result in results)


def test_triton_drives_it(cut, monkeypatch):
    folder, spec = cut
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", backend_utils())
    model = TritonPythonModel()
    model.initialize(arguments(folder, spec.build))
    (request,) = requests(spec, 2)
    parameters = json.dumps({BUILD: spec.build})
    asked = types.SimpleNamespace(arrays=request.arrays, parameters=lambda: parameters)
    wrong = types.SimpleNamespace(arrays=request.arrays, parameters=lambda: '{"hybridc_build":"x"}')
    first, second = model.execute([asked, wrong])
    assert [tensor.name for tensor in first.output_tensors] == ["y", BUILD]
    assert first.output_tensors[0].array.shape == (2, 10, 1, 1)
    assert "another build" in second.error
    model.finalize()
    with pytest.raises(BundleError, match=r"config\.pbtxt names"):
        TritonPythonModel().initialize(arguments(folder, "00" * 32))


def arguments(folder, build):
    parameters = {f"{BUILD}_1": {"string_value": build}}
    config = {"max_batch_size": 4, "parameters": parameters}
    place = str(folder.parent)
    return {
        "model_config": json.dumps(config),
        "model_version": "1",
        "model_repository": place,
    }


def backend_utils():
    """Stands in for the module that only Triton has."""
    module = types.ModuleType("triton_python_backend_utils")

    def tensor(name, array):
        return types.SimpleNamespace(name=name, array=array, as_numpy=lambda: array)

    def find(request, name):
        return tensor(name, request.arrays[name])

    def response(output_tensors, error=None):
        return types.SimpleNamespace(output_tensors=output_tensors, error=error)

    module.Tensor, module.InferenceResponse, module.TritonError = tensor, response, str
    module.get_input_tensor_by_name = find
    return module


def test_the_repository(batched, cut):
    folder, spec = cut
    config = (folder.parent / "config.pbtxt").read_text()
    for text in (
        f'name: "{spec.model}"',
        'backend: "python"',
        "max_batch_size: 4",
        "max_queue_delay_microseconds: 2000",
        "count: 2",
        "model_warmup",
        f'key: "{BUILD}_1" value {{ string_value: "{spec.build}" }}',
    ):
        assert text in config
    assert config.count("{") == config.count("}")
    dims = ", ".join(map(str, spec.inputs[0].shape[1:]))
    assert f"data_type: TYPE_FP32 dims: [ {dims} ]" in config
    compile((folder / "model.py").read_text(), "model.py", "exec")
    manifest = (batched.repository / "kserve.yaml").read_text()
    assert 'storageUri: "pvc://models/edge"' in manifest
    assert "kind: InferenceService" in manifest


def test_a_second_version_stands_beside_the_first(batched, cut, tmp_path):
    folder, _ = cut
    model = batched.bundle.with_name("model.onnx")
    options = ("--shape", "batch=1..4", "--remote-batch", "4", "--no-verify", *SERVER)
    place = ("--repository", batched.repository, "-o", tmp_path / "edge.hyb")
    again = run_hybridc("compile", model, *place, *options)
    assert again.code == 2
    assert "--remote-version" in again.stderr
    before = (folder / "bundle.hyb").read_bytes()
    second = run_hybridc("compile", model, *place, *options, "--remote-version", "2")
    assert second.code == 0, second.stderr
    assert (folder / "bundle.hyb").read_bytes() == before
    config = (folder.parent / "config.pbtxt").read_text()
    assert re.findall(rf'"{BUILD}_(\d+)"', config) == ["1", "2"]
    manifest = open_bundle(tmp_path / "edge.hyb").manifest
    versions = {p.remote.version for plan in manifest.plans for p in plan.parts if p.remote}
    assert versions == {"2"}


def test_batches_need_a_range(batched, tmp_path):
    model = batched.bundle.with_name("model.onnx")
    options = ("--shape", "batch=1", "--remote-batch", "4", "--no-verify", *SERVER)
    assert_compile_refused(model, tmp_path, 2, "batch=1..4", options=options)


def test_without_a_server_everything_runs_here(batched):
    with hybridc.load(batched.bundle) as model:
        assert not hasattr(model, "status")
        assert batched.is_right(model(x=batched.x))


def test_a_bundle_without_a_local_plan_says_so(batched, tmp_path):
    model = batched.bundle.with_name("model.onnx")
    options = ("--shape", "batch=1", "--pin", "head=server", *SERVER, "--no-verify")
    place = ("-o", tmp_path / "edge.hyb")
    done = run_hybridc("compile", model, *place, *options)
    assert done.code == 0, done.stderr
    assert "no plan runs without the server" in done.stdout
    assert "--pin head=server" in done.stdout
    with pytest.raises(RemoteMissing, match="HYBRIDC_REMOTE"):
        hybridc.load(tmp_path / "edge.hyb")
    assert run_hybridc("run", tmp_path / "edge.hyb").code == 8
