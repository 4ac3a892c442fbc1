"""A child process gives its result, and its end does not harm the parent."""

import os
import signal
import time

import pytest
from hybridc.passes import simplify
from hybridc.passes.isolation import ChildError, in_child

from tests.models import branched_model, save
from tests.support import hybridc as command


def test_a_result_of_any_size():
    data = os.urandom(3_000_000)
    assert in_child(lambda: data, 60) == data
    assert in_child(lambda: b"", 60) == b""


def fail():
    raise ValueError("no good")


def crash():
    os.kill(os.getpid(), signal.SIGSEGV)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (fail, "ValueError: no good"),
        (crash, "ended by signal 11"),
        (lambda: os._exit(3), "^$"),
        (lambda: time.sleep(60), "took over 1 s"),
    ],
)
def test_what_goes_wrong(function, words):
    with pytest.raises(ChildError, match=words):
        in_child(function, 1)


def test_a_crash_ends_the_child_whatever_the_parent_does_with_it():
    before = signal.signal(signal.SIGSEGV, lambda *_: None)
    try:
        with pytest.raises(ChildError, match="ended by signal 11"):
            in_child(crash, 1)
    finally:
        signal.signal(signal.SIGSEGV, before)


def test_a_child_without_a_result_does_not_go_on():
    with pytest.raises(ChildError, match=r"^$"):
        in_child(lambda: None, 1)


def test_a_crash_of_onnxsim_leaves_the_step_out(tmp_path, monkeypatch):
    monkeypatch.setattr(simplify, "_simplify", lambda _proto: crash())
    path = save(branched_model(), tmp_path / "m.onnx")
    outcome = command("compile", path, "-o", tmp_path / "m.hyb")
    assert outcome.code == 0
    assert "step 'simplify' was left out: ended by signal 11" in outcome.stdout
