"""Each verb: what it prints, as text and as JSON, and its exit code."""

import dataclasses
import json
import subprocess
import sys

import numpy as np
import onnx
import pytest

import hybridc as package
from hybridc.bundle.manifest import MANIFEST, to_json
from hybridc.cli.main import VERBS, commands
from tests.models import branched_model, random, run_reference, save, sum_model
from tests.support import assert_close, assert_refused, compile_to, hybridc

SHAPE = (1, 3, 8, 8)


def json_of(*arguments):
    """What a verb prints with ``--format json``."""
    outcome = hybridc(*arguments, "--format", "json")
    assert outcome.code == 0, outcome
    assert outcome.complaint == []
    return json.loads(outcome.stdout)


def test_help_names_every_verb_and_exit_code():
    outcome = hybridc("--help")
    assert outcome.code == 0
    for text in (*VERBS, *(f" {code} " for code in range(9))):
        assert text in outcome.stdout


@pytest.mark.parametrize("words", sorted(commands()), ids=" ".join)
def test_help_of_a_verb(words):
    outcome = hybridc(*words, "--help")
    assert outcome.code == 0
    assert "--format [text|json]" in outcome.stdout


def test_version():
    assert package.__version__ in hybridc("--version").stdout


def test_module_and_program():
    """``python -m hybridc`` is the same as ``hybridc``."""
    command = [sys.executable, "-m", "hybridc", "--version"]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert package.__version__ in result.stdout


@pytest.mark.parametrize(
    "arguments",
    [
        ["nonsense"],
        ["compile"],
        ["compile", "model.onnx"],
        ["run", "bundle", "--repeat", "0"],
        ["verify", "bundle", "--nonsense"],
        ["compile", "model.onnx", "-o", "b", "--tolerance", "-1"],
        ["inspect", "x", "--format", "yaml"],
    ],
)
def test_wrong_usage(arguments):
    outcome = hybridc(*arguments)
    assert outcome.code == 2
    assert "Error: " in outcome.stderr
    assert "Traceback" not in outcome.stderr


def test_compile_as_text(model_file, tmp_path):
    outcome = hybridc("compile", model_file, "-o", tmp_path / "b.hyb")
    assert outcome.code == 0
    assert outcome.complaint == []
    assert outcome.stdout.startswith(f"{tmp_path / 'b.hyb'}: ")
    assert "part0  llvm:0" in outcome.stdout
    assert "largest error against onnxruntime" in outcome.stdout
    steps = [line.partition(" ")[0] for line in outcome.stderr.splitlines()]
    assert steps == [f"[{number}/6]" for number in range(1, 7)]


def test_compile_as_json(model_file, tmp_path):
    data = json_of("compile", model_file, "-o", tmp_path / "b.hyb", "--no-verify")
    assert data["output"] == str(tmp_path / "b.hyb")
    assert data["manifest"]["inputs"] == [{"name": "x", "dtype": "float32", "shape": list(SHAPE)}]
    assert data["errors"] == []
    assert data["notes"] == ["the bundle was not run: --no-verify"]


def test_inspect_a_model_as_text(model_file):
    text = hybridc("inspect", model_file, "--nodes").stdout
    for word in ("ai.onnx 17", "9 nodes", "1x3x8x8", "Conv", "yes", "stem.relu", "head"):
        assert word in text


def test_inspect_a_model_as_json(model_file):
    data = json_of("inspect", model_file)
    assert data["opsets"] == {"": 17}
    assert data["inputs"] == [{"name": "x", "dtype": "float32", "shape": list(SHAPE)}]
    assert data["weight_bytes"] == 4 * (108 + 16 + 4 + 16 + 20 + 5)
    stem = next(row for row in data["nodes"] if row["name"] == "stem")
    assert stem["operations"] == 2 * 4 * 64 * 27
    assert data["targets"]["llvm"]["unsupported"] == 0


def test_inspect_shows_dynamic_dimensions(tmp_path):
    path = save(sum_model(), tmp_path / "m.onnx")
    outcome = hybridc("inspect", path)
    assert outcome.code == 0
    assert "rowsx4" in outcome.stdout
    assert "--shape" in outcome.stdout
    assert "nodes after simplification" in hybridc("inspect", path, "--shape", "rows=2").stdout
    assert_refused(hybridc("inspect", path, "--shape", "columns=2"), 2, "columns")


@pytest.mark.parametrize("form", ["bundle", "archive"])
def test_inspect_a_bundle(form, request):
    path = request.getfixturevalue(form)
    text = hybridc("inspect", path, "--nodes").stdout
    for word in ("schema 2.", "apache-tvm-ffi", "1x3x8x8", "avx2", "part0", "stem", "input  ->"):
        assert word in text
    data = json_of("inspect", path)
    assert data["schema"].startswith("2.")
    assert data["parts"][0]["library"] == "parts/part0.so"
    assert {file["path"] for file in data["files"]} >= {"LICENSE", "NOTICE"}


@pytest.mark.parametrize("verb", ["inspect", "run", "verify"])
def test_nothing_there(verb, tmp_path):
    assert_refused(hybridc(verb, tmp_path / "none.hyb"), 2, "none.hyb")


def test_verify(archive):
    outcome = hybridc("verify", archive)
    assert outcome.code == 0
    assert "files are as they were written" in outcome.stdout
    assert "ok" in outcome.stdout
    data = json_of("verify", archive)
    assert [error["output"] for error in data["errors"]] == ["y"]
    assert all(error["within"] for error in data["errors"])
    assert json_of("verify", "--no-run", archive)["errors"] == []


def test_verify_when_results_are_off(tmp_path, model_file):
    """A reference that the bundle does not meet: exit code 4, with the error shown."""
    report = compile_to(tmp_path / "b", model_file, verify=True)
    strict = dataclasses.replace(report.manifest, tolerance=1e-30)
    (tmp_path / "b" / MANIFEST).write_bytes(to_json(strict))
    outcome = hybridc("verify", tmp_path / "b")
    assert outcome.code == 4
    assert "TOO LARGE" in outcome.stdout
    assert "differ from the reference" in outcome.complaint[0]


def test_run_on_random_inputs(archive):
    outcome = hybridc("run", archive)
    assert outcome.code == 0
    assert "float32" in outcome.stdout
    assert "1 run: min" in outcome.stdout
    data = json_of("run", archive, "--repeat", "5", "--seed", "3")
    assert data["runs"] == 5
    times = data["milliseconds"]
    assert 0 < times["min"] <= times["median"] <= times["max"]
    assert data["outputs"]["y"]["shape"] == [1, 5]
    assert data["outputs"] == json_of("run", archive, "--seed", "3")["outputs"]
    assert data["outputs"] != json_of("run", archive, "--seed", "4")["outputs"]


@pytest.mark.parametrize("source", ["npz", "npy"])
@pytest.mark.parametrize("destination", ["npz", "npy"])
def test_run_on_files(archive, tmp_path, source, destination):
    inputs = {"x": random(*SHAPE)}
    given, written = tmp_path / f"in.{source}", tmp_path / f"out.{destination}"
    if source == "npz":
        np.savez(given, **inputs)
    else:
        np.save(given, inputs["x"])
    assert hybridc("run", archive, "-i", given, "-o", written).code == 0
    loaded = np.load(written)
    results = {"y": loaded} if destination == "npy" else dict(loaded)
    assert_close(results, run_reference(branched_model(), inputs))
    assert {file.name for file in tmp_path.iterdir()} == {given.name, written.name}


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("none.npz", None, ["No such file"]),
        ("empty.npy", b"", ["cannot be read"]),
        ("text.npy", b"1 2 3", ["cannot be read"]),
        ("broken.npz", b"PK\3\4 and no more", ["cannot be read"]),
        ("cut.npy", b"\x93NUMPY\1\0v\0{'descr': '<f4'", ["cannot be read"]),
    ],
)
def test_run_on_files_that_cannot_be_read(archive, tmp_path, name, content, words):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    assert_refused(hybridc("run", archive, "-i", tmp_path / name), 2, name, *words)


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"z": random(*SHAPE)}, ["'x' is missing"]),
        ({"x": random(2, 2)}, ["float32[2x2]", "1x3x8x8"]),
        ({"x": np.array([{}])}, ["cannot be read"]),
    ],
)
def test_run_on_wrong_arrays(archive, tmp_path, arrays, words):
    np.savez(tmp_path / "in.npz", **arrays)
    assert_refused(hybridc("run", archive, "-i", tmp_path / "in.npz"), 2, *words)


def test_run_cannot_write_two_outputs_to_npy(tmp_path):
    model = sum_model()
    model.graph.node.append(onnx.helper.make_node("Neg", ["total"], ["file"], "neg"))
    extra = model.graph.output.add()
    extra.CopyFrom(model.graph.output[0])
    extra.name = "file"
    compile_to(tmp_path / "b.hyb", model, shapes=("rows=2",))
    refused = hybridc("run", tmp_path / "b.hyb", "-o", tmp_path / "out.npy")
    assert_refused(refused, 2, "there are 2")
    assert hybridc("run", tmp_path / "b.hyb", "-o", tmp_path / "out.npz").code == 0
    assert sorted(np.load(tmp_path / "out.npz")) == ["file", "total"]


def test_run_into_a_folder_that_is_not_there(archive, tmp_path):
    refused = hybridc("run", archive, "-o", tmp_path / "none" / "out.npz")
    assert_refused(refused, 2, "cannot be written")


def test_doctor():
    outcome = hybridc("doctor")
    assert outcome.code == 0
    for word in (package.__version__, "apache-tvm", "target llvm", "linker"):
        assert word in outcome.stdout
    data = json_of("doctor")
    assert data["can"] == {"run bundles": True, "compile": True}
    assert data["packages"]["loader"]["numpy"] == np.__version__
    assert data["targets"]["llvm"]


BASE_INSTALL = """
import sys
for name in "tvm onnx onnx_ir onnxruntime onnxsim networkx ml_dtypes google".split():
    sys.modules[name] = None
from hybridc.cli.main import main
main(sys.argv[1:])
"""


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["compile", "MODEL", "-o", "OUTPUT"], 2),
        (["inspect", "MODEL"], 2),
        (["inspect", "BUNDLE"], 0),
        (["run", "BUNDLE"], 0),
        (["verify", "BUNDLE"], 0),
    ],
)
def test_base_install(arguments, code, model_file, archive, tmp_path):
    """With the loader alone bundles run, and the compiler's verbs say what to install."""
    paths = {"MODEL": model_file, "BUNDLE": archive, "OUTPUT": tmp_path / "b"}
    command = [sys.executable, "-c", BASE_INSTALL, *(str(paths.get(a, a)) for a in arguments)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == code, result.stderr
    if code:
        assert "pip install 'hybridc[compiler]'" in result.stderr
        assert "Traceback" not in result.stderr
