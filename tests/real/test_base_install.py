"""With the base install alone, in an environment of its own, bundles load and run."""

import json
import shutil
import subprocess
import venv
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    """The hybridc program of an environment with nothing but the loader."""
    folder = tmp_path_factory.mktemp("base")
    # a copy, since building leaves files in the source tree
    ignored = shutil.ignore_patterns(".*", "tests", "docs", "build", "*.egg-info")
    shutil.copytree(ROOT, folder / "source", ignore=ignored)
    venv.create(folder / "venv", with_pip=True)
    python = folder / "venv" / "bin" / "python"
    command = [python, "-m", "pip", "install", "--quiet", str(folder / "source")]
    subprocess.run(command, check=True)
    return python.with_name("hybridc")


def run(program, *arguments):
    return subprocess.run(
        [program, *map(str, arguments)], capture_output=True, text=True, check=False, cwd="/"
    )


def test_what_works(program, archive):
    verified = run(program, "verify", archive)
    assert verified.returncode == 0, verified.stderr
    assert run(program, "run", archive, "--repeat", "3").returncode == 0
    assert run(program, "inspect", archive).returncode == 0


def test_doctor_says_what_is_missing(program):
    result = run(program, "doctor", "--format", "json")
    data = json.loads(result.stdout)
    assert data["can"] == {"run bundles": True, "compile": False}
    assert data["packages"]["compiler"]["apache-tvm"] is None
    assert "pip install 'hybridc[compiler]'" in run(program, "doctor").stdout


@pytest.mark.parametrize("verb", ["compile", "inspect"])
def test_the_compilers_verbs_say_what_to_install(program, model_file, tmp_path, verb):
    output = ["-o", tmp_path / "b"] if verb == "compile" else []
    result = run(program, verb, model_file, *output)
    assert result.returncode == 2
    assert result.stderr == "error: this needs the compiler; run: pip install 'hybridc[compiler]'\n"
