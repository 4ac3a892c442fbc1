"""Ctrl-C and SIGTERM in the middle of a compile: exit code 130, and nothing left behind."""

import os
import signal
import subprocess
import sys
import time

import pytest


@pytest.mark.parametrize(
    ("stage", "number"),
    [
        ("[1/6]", signal.SIGINT),
        ("[2/6]", signal.SIGINT),
        ("[4/6]", signal.SIGINT),
        ("[4/6]", signal.SIGTERM),
        ("[6/6]", signal.SIGINT),
        ("[6/6]", signal.SIGTERM),
    ],
)
def test_signal(model_file, tmp_path, stage, number):
    output, temporary = tmp_path / "output", tmp_path / "tmp"
    output.mkdir()
    temporary.mkdir()
    command = [sys.executable, "-m", "hybridc", "compile", str(model_file), "-o"]
    process = subprocess.Popen(
        [*command, str(output / "b.hyb")],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "TMPDIR": str(temporary)},
        start_new_session=True,  # so that the signal reaches its children, as from a terminal
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # ignored in background
    )
    for line in process.stderr:
        if line.startswith(stage):
            break
    time.sleep(0.05)
    os.killpg(process.pid, number)
    rest = process.communicate(timeout=60)[1].splitlines()
    # Python ends itself by the signal where the interrupt passed through exec(); for a shell,
    # both are 130
    assert process.returncode in (130, -signal.SIGINT)
    assert rest[-1] == "error: interrupted; nothing was left behind"
    assert not [line for line in rest if "Traceback" in line]
    assert list(output.iterdir()) == []
    # ONNX Runtime keeps a file .ses there, interrupted or not
    assert [path.name for path in temporary.iterdir() if path.name != ".ses"] == []
