"""The same command gives the same bytes, whoever runs it and wherever."""

import hashlib
import os
import subprocess
import sys

import pytest

from tests.models import branched_model, save


def compiled(folder, name, **environment):
    """Hash of the bundle that a fresh process makes in a folder and home of its own."""
    home = folder / "home"
    home.mkdir(parents=True)
    save(branched_model(), folder / "branched.onnx")
    command = [sys.executable, "-m", "hybridc", "compile", "branched.onnx", "-o", name]
    command += "--target llvm:0 --target llvm:1 --pin right=llvm:1".split()
    variables = {**os.environ, "HOME": str(home), "TMPDIR": str(home), **environment}
    subprocess.run(command, cwd=folder, env=variables, check=True, capture_output=True)
    digest = hashlib.sha256()
    path = folder / name
    for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
        if file.is_file():
            digest.update(str(file.relative_to(folder)).encode() + file.read_bytes())
    return digest.hexdigest()


@pytest.mark.parametrize("name", ["b.hyb", "b"])
def test_same_bytes(tmp_path, name):
    first = compiled(tmp_path / "one", name, PYTHONHASHSEED="1")
    second = compiled(tmp_path / "another" / "deeper", name, PYTHONHASHSEED="2", LC_ALL="C")
    assert first == second
