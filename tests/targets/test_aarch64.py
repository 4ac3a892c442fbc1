"""A bundle for another architecture holds that architecture's code and runtime."""

import shutil
import struct

import pytest
from hybridc.targets.llvm.link import linker_name

from tests.support import assert_refused, compile_to
from tests.support import hybridc as command

pytestmark = pytest.mark.slow

AARCH64 = 183
"""The ELF header's e_machine."""


def machine_of(path):
    """Machine that an ELF file is for."""
    header = path.read_bytes()[:20]
    assert header[:4] == b"\x7fELF"
    return struct.unpack_from("<H", header, 18)[0]


@pytest.mark.skipif(linker_name("aarch64") is None, reason="no linker for aarch64: install lld")
def test_bundle_for_aarch64(model_file, tmp_path):
    report = compile_to(tmp_path / "b", model_file, targets=("llvm:aarch64",), verify=True)
    libraries = sorted((tmp_path / "b").rglob("*.so"))
    assert len(libraries) == 2
    assert {machine_of(library) for library in libraries} == {AARCH64}
    (device,) = report.manifest.devices
    assert device.architecture == "aarch64"
    assert device.cpu_flags == ("asimd",)
    assert report.notes[0].startswith("the bundle was not run: llvm:0: it was built for aarch64")
    assert command("verify", "--no-run", tmp_path / "b").code == 0
    assert_refused(command("run", tmp_path / "b"), 7, "built for aarch64", "--target")


@pytest.mark.skipif(shutil.which("ld.lld") is not None, reason="there is a linker for aarch64")
def test_a_missing_linker_is_named(model_file, tmp_path):
    options = ("--target", "llvm:aarch64", "--no-verify")
    refused = command("compile", model_file, "-o", tmp_path / "b", *options)
    assert_refused(refused, 7, "no linker for aarch64", "install lld")
    assert not (tmp_path / "b").exists()
