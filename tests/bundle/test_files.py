"""Files that are written as a whole or not at all."""

from __future__ import annotations

import os

import pytest

from hybridc.bundle.files import replacing


def test_replaces(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")
    with replacing(path) as beside:
        beside.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert os.listdir(tmp_path) == ["file"]


def fail_half_way(path, failure):
    with replacing(path) as beside:
        beside.write_text("half")
        raise failure


@pytest.mark.parametrize("failure", [OSError, KeyboardInterrupt])
def test_failure_leaves_what_was_there(tmp_path, failure):
    path = tmp_path / "file"
    path.write_text("old")
    with pytest.raises(failure):
        fail_half_way(path, failure)
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["file"]


def test_a_pipe_is_written_to_as_it_is(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    with replacing(path) as beside:
        assert beside == path
    assert path.is_fifo()
