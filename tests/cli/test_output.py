"""Where a bundle goes: what is in the way, what is replaced, and what is left when it fails."""

import builtins
import errno
import io
import os

import pytest

from hybridc.bundle import write
from tests.models import relu_model, save
from tests.support import assert_refused, compile_to, hybridc


@pytest.fixture
def model(tmp_path):
    return save(relu_model(), tmp_path / "m.onnx")


@pytest.fixture
def output(tmp_path):
    folder = tmp_path / "output"
    folder.mkdir()
    return folder


@pytest.mark.parametrize("name", ["b", "b.hyb"])
def test_a_bundle_is_replaced(model, output, name):
    for target in ("llvm:x86-64-v2", "llvm:x86-64-v3"):
        assert hybridc("compile", model, "-o", output / name, "--target", target).code == 0
        assert target.partition(":")[2] in hybridc("inspect", output / name).stdout
    assert [path.name for path in output.iterdir()] == [name]


def test_an_empty_folder_is_filled(model, output):
    assert hybridc("compile", model, "-o", output, "--no-verify").code == 0
    assert hybridc("verify", output).code == 0


def test_what_is_written_can_be_read_by_others(model, output):
    before = os.umask(0o022)
    try:
        compile_to(output / "b", model)
        compile_to(output / "b.hyb", model)
    finally:
        os.umask(before)
    assert (output / "b").stat().st_mode & 0o777 == 0o755
    for file in (output / "b" / "manifest.json", output / "b.hyb"):
        assert file.stat().st_mode & 0o777 == 0o644


def folder_with_files(path):
    path.mkdir()
    (path / "thesis.txt").write_text("years of work")


def file_with_text(path):
    path.write_text("years of work")


@pytest.mark.parametrize(
    ("name", "make"),
    [("b", folder_with_files), ("b", file_with_text), ("b.hyb", folder_with_files)],
)
def test_something_else_is_in_the_way(model, output, name, make):
    make(output / name)
    before = sorted(output.rglob("*"))
    assert_refused(hybridc("compile", model, "-o", output / name), 2, "in the way")
    assert sorted(output.rglob("*")) == before


def test_the_model_is_not_overwritten(model):
    before = model.read_bytes()
    assert_refused(hybridc("compile", model, "-o", model), 2, "in the way")
    assert model.read_bytes() == before


@pytest.mark.parametrize("below", ["m.onnx/b", "none/b", "none/b.hyb"])
def test_a_folder_that_cannot_be(model, tmp_path, below):
    before = sorted(tmp_path.rglob("*"))
    refused = hybridc("compile", model, "-o", tmp_path / below)
    assert_refused(refused, 2, "cannot write to", str(tmp_path / below.partition("/")[0]))
    assert "[2/6]" not in refused.stderr  # said before the work and not after it
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_may_not_be_written(model, output):
    output.chmod(0o555)
    assert_refused(hybridc("compile", model, "-o", output / "b"), 2, "cannot write to")


class FullDisk(io.FileIO):
    """A file on a disk with room for 100 bytes."""

    def write(self, data):
        if self.tell() + len(data) > 100:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().write(data)


@pytest.mark.parametrize("name", ["b", "b.hyb"])
def test_a_full_disk(model, output, monkeypatch, name):
    def open_small(path, mode="r", **options):
        return FullDisk(path, "w") if mode == "wb" else builtins.open(path, mode, **options)

    monkeypatch.setattr(write, "open", open_small, raising=False)
    assert_refused(hybridc("compile", model, "-o", output / name), 2, "the disk is full")
    assert list(output.iterdir()) == []


def test_a_full_disk_leaves_the_bundle_that_was_there(model, output, monkeypatch):
    compile_to(output / "b.hyb", model)
    before = (output / "b.hyb").read_bytes()

    def full(*_arguments):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(write, "write_archive", full)
    assert_refused(hybridc("compile", model, "-o", output / "b.hyb"), 2, "the disk is full")
    assert (output / "b.hyb").read_bytes() == before
    assert [path.name for path in output.iterdir()] == ["b.hyb"]


def test_results_that_are_off_leave_nothing(model, output, monkeypatch):
    """A compile whose bundle disagrees with the reference: exit code 4 and no bundle."""
    from hybridc import compiler
    from hybridc.reference import Sample

    def wrong(_path, inputs, *_rest):
        return Sample(inputs, {"y": inputs["x"] + 1}, "a wrong reference")

    monkeypatch.setattr(compiler, "run_reference", wrong)
    outcome = hybridc("compile", model, "-o", output / "b")
    assert outcome.code == 4
    assert "output 'y' of sample 0" in outcome.stderr
    assert list(output.iterdir()) == []
