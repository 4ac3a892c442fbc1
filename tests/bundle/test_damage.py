"""A bundle that was changed in any way is refused, whichever way it is opened."""

import lzma
import random
import shutil
import struct
import zipfile
from dataclasses import replace

import numpy as np
import pytest

import hybridc
from hybridc.bundle.manifest import MANIFEST, SampleSpec, to_json
from hybridc.bundle.read import open_bundle
from hybridc.bundle.storage import MOST_DEFLATED, SMALL, open_storage, write_archive
from hybridc.bundle.write import BundleWriter
from hybridc.errors import BundleError, UsageError
from tests.bundle.test_manifest import EXAMPLE
from tests.support import assert_refused, changed_byte
from tests.support import hybridc as command

CONTENTS = {
    "parts/part0.so": b"code",
    "weights.safetensors": bytes(100),
    "lib/x86_64/libtvm_runtime.so": b"runtime",
    "samples/0-inputs": b"in",
    "samples/0-outputs": b"out",
    "NOTICE": b"notice",
}


def write_bundle(folder, manifest=EXAMPLE):
    """A well-formed bundle of arbitrary contents: to be checked, not to be run."""
    folder.mkdir()
    writer = BundleWriter(folder)
    for name, content in CONTENTS.items():
        writer.put(name, [content])
    writer.finish(manifest)
    return folder


@pytest.fixture
def small(tmp_path):
    return write_bundle(tmp_path / "small")


def places(path):
    """File to change, and offset and length of each of a bundle's files in it."""
    if path.is_dir():
        files = [file for file in path.rglob("*") if file.is_file()]
        return {str(file.relative_to(path)): (file, 0, file.stat().st_size) for file in files}
    return {
        # The last bits of a deflated file mean nothing.
        name: (path, place.offset, place.stored - place.deflated)
        for name, place in open_storage(path).places.items()
    }


@pytest.mark.parametrize("form", ["bundle", "archive"])
def test_one_changed_byte_in_each_file(form, request):
    path = request.getfixturevalue(form)
    dice = random.Random(0)
    files = places(path)
    assert len(files) >= 8
    for file, start, size in files.values():
        for offset in (0, size - 1, dice.randrange(size), dice.randrange(size)):
            with changed_byte(file, start + offset, 1 << dice.randrange(8)):
                assert_refused(command("verify", path), 6)
    assert command("verify", path).code == 0


@pytest.mark.parametrize("form", ["bundle", "archive"])
def test_load_refuses_what_it_would_use(form, request):
    path = request.getfixturevalue(form)
    for name, (file, start, size) in places(path).items():
        if name.startswith(("samples", "plan", "LICENSE", "NOTICE")):
            continue
        with changed_byte(file, start + size // 2), pytest.raises(BundleError):
            hybridc.load(path)


@pytest.mark.parametrize(("first", "mask"), [(0, 0x01), (1, 0x40)])
def test_every_byte_of_an_archive(small, tmp_path, first, mask):
    """A changed byte in the archive's own structure is refused, or changes no file's bytes."""
    path = tmp_path / "small.hyb"
    write_archive(small, path)
    noticed = 0
    for offset in range(first, path.stat().st_size, 2):
        with changed_byte(path, offset, mask):
            try:
                opened = open_bundle(path)
                opened.check_all()
            except BundleError:
                noticed += 1
            else:
                assert {name: bytes(opened.read(name)) for name in CONTENTS} == CONTENTS
    assert noticed > 500


def test_every_length_of_a_cut_archive(small, tmp_path):
    write_archive(small, tmp_path / "small.hyb")
    data = (tmp_path / "small.hyb").read_bytes()
    path = tmp_path / "cut.hyb"
    for length in range(0, len(data), 7):
        path.write_bytes(data[:length])
        with pytest.raises(BundleError):
            open_bundle(path).check_all()


@pytest.mark.parametrize("name", ["extra", "parts/part1.so", ".hidden"])
def test_added_file(small, name):
    (small / name).write_bytes(b"")
    assert_refused(command("verify", "--no-run", small), 6, name)


def test_added_member(small, tmp_path):
    write_archive(small, tmp_path / "small.hyb")
    with zipfile.ZipFile(tmp_path / "small.hyb", "a") as archive:
        archive.writestr("extra", b"")
    assert_refused(command("verify", "--no-run", tmp_path / "small.hyb"), 6, "extra")


@pytest.mark.parametrize("name", [*CONTENTS, MANIFEST])
@pytest.mark.parametrize("form", ["folder", "archive"])
def test_missing_file(small, tmp_path, name, form):
    (small / name).unlink()
    path = small
    if form == "archive":
        path = tmp_path / "small.hyb"
        write_archive(small, path)
    assert_refused(command("verify", "--no-run", path), 6, name)


def test_an_unknown_compression(small, tmp_path):
    path = tmp_path / "small.hyb"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_BZIP2) as archive:
        for file in small.rglob("*"):
            archive.write(file, file.relative_to(small))
    with pytest.raises(BundleError, match="unknown way"):
        open_bundle(path)


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_an_archive_by_an_ordinary_tool(small, tmp_path, method):
    path = tmp_path / "small.hyb"
    with zipfile.ZipFile(path, "w", method) as archive:
        for file in small.rglob("*"):
            if file.is_file():
                archive.write(file, file.relative_to(small))
    open_bundle(path).check_all()


def test_code_is_packed_and_so_are_few_integers(small, tmp_path):
    random = np.random.default_rng(0)
    contents = {
        "code.so": bytes(range(256)) * 8,
        "random.so": random.bytes(999),
        "zeros.so": bytes(SMALL + 1),
        "integers.safetensors": random.normal(0, 20, 9999).astype(np.int8).tobytes(),
        "floats.safetensors": random.standard_normal(999, np.float32).tobytes(),
        "many.safetensors": bytes(MOST_DEFLATED + 1),
    }
    for name, content in contents.items():
        (small / name).write_bytes(content)
    path = tmp_path / "small.hyb"
    write_archive(small, path)
    with zipfile.ZipFile(path) as archive:
        stored = {i.filename: bool(i.compress_type) for i in archive.infolist()}
    assert not stored["code.so.xz"]
    assert not stored["random.so"]
    assert not stored["zeros.so"]
    assert stored["integers.safetensors"]
    assert not stored["floats.safetensors"]
    assert not stored["many.safetensors"]
    folder, packed = open_storage(small), open_storage(path)
    assert packed.names() == folder.names()
    assert all(packed.map(name) == folder.map(name) for name in folder.names())


def test_a_folder_with_packed_code(small, tmp_path):
    (small / "code.so").write_bytes(bytes(range(256)) * 8)
    path, place = tmp_path / "small.hyb", tmp_path / "place"
    write_archive(small, path)
    with zipfile.ZipFile(path) as archive:
        archive.extractall(place)
    folder, unpacked = open_storage(small), open_storage(place)
    assert unpacked.names() == folder.names()
    assert all(unpacked.map(name) == folder.map(name) for name in folder.names())
    (place / "code.so").write_bytes(b"other")
    assert "code.so.xz" in open_storage(place).names()  # not hidden behind the other


def test_what_unpacks_to_far_more_is_refused(small, tmp_path):
    path = tmp_path / "small.hyb"
    write_archive(small, path)
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("bomb.so.xz", lzma.compress(bytes(SMALL + 1)))
    with pytest.raises(BundleError, match="too large"):
        open_storage(path).map("bomb.so")
    with zipfile.ZipFile(path, "a", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("bomb.json", bytes(SMALL + 1))
    with pytest.raises(BundleError, match="too large"):
        open_bundle(path)


def test_a_wrong_size_of_what_is_deflated(tmp_path):
    path = tmp_path / "small.hyb"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("code.so", bytes(range(100)) * 3)
    data = path.read_bytes()
    path.write_bytes(data.replace(struct.pack("<I", 300), struct.pack("<I", 299)))
    with pytest.raises(BundleError, match="its size"):
        open_storage(path).map("code.so")


@pytest.mark.parametrize("name", ["../outside", "/etc/hostname", "parts/../../outside", "a\\b"])
def test_names_that_lead_outside(small, tmp_path, name):
    (tmp_path / "outside").write_bytes(b"secret")
    writer = BundleWriter(small)
    with pytest.raises(BundleError, match="may not name the path"):
        writer.put(name, [b""])
    with pytest.raises(BundleError, match="may not name the path"):
        open_storage(small).map(name)


@pytest.mark.parametrize("content", [b"", b"PK\5\6", b"not a bundle at all", bytes(1000)])
def test_what_is_no_archive(tmp_path, content):
    path = tmp_path / "x.hyb"
    path.write_bytes(content)
    assert_refused(command("verify", path), 6, "x.hyb")


def test_a_folder_that_is_no_bundle(tmp_path):
    assert_refused(command("verify", tmp_path), 6, MANIFEST)


def test_nothing_there(tmp_path):
    with pytest.raises(UsageError, match="there is no bundle"):
        hybridc.load(tmp_path / "none.hyb")


def test_newer_major_schema(bundle, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(bundle, copy)
    text = (copy / MANIFEST).read_bytes()
    (copy / MANIFEST).write_bytes(text.replace(b'"schema": "2.', b'"schema": "3.'))
    for verb in ("verify", "run", "inspect"):
        assert_refused(command(verb, copy), 6, "schema 3.", "install")


PART = EXAMPLE.parts[0]


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"weights": "other"}, "does not list other"),
        ({"devices": ()}, "part0 is on llvm:0"),
        ({"inputs": ()}, "part0 reads x"),
        ({"parts": ()}, "no part computes the output y"),
        ({"dimensions": {}}, "batch has no range"),
        ({"runtime": {}}, "no runtime for x86_64"),
        ({"runtime": {"x86_64": ("lib",)}}, "does not list lib"),
        ({"samples": (SampleSpec("in", "out", ""),)}, "does not list in"),
        ({"parts": (replace(PART, library="none.so"),)}, "does not list none.so"),
        ({"parts": (PART, replace(PART, inputs=("z",)))}, "part0 reads z"),
    ],
)
def test_a_manifest_that_does_not_fit_together(tmp_path, changes, complaint):
    """Right digest, wrong contents: as after a change by hand, or a fault in what wrote it."""
    path = write_bundle(tmp_path / "small", replace(EXAMPLE, **changes))
    assert_refused(command("verify", path), 6, "does not fit together", complaint)


def test_missing_weights(bundle, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(bundle, copy)
    manifest = open_bundle(copy).manifest
    part = replace(manifest.parts[0], weights=("none",))
    (copy / MANIFEST).write_bytes(to_json(replace(manifest, parts=(part,))))
    with pytest.raises(BundleError, match="lacks the weights"):
        hybridc.load(copy)
