"""What is built for AMX is refused where Linux does not let the process use it."""

import platform

import pytest

from hybridc.bundle.manifest import DeviceSpec
from hybridc.errors import DeviceError
from hybridc.runtime import amx, machine

SPEC = DeviceSpec(
    "cpu", "llvm", "sapphirerapids", platform.machine(), cpu_flags=("amx_int8", amx.FLAG)
)


def test_linux_refuses(monkeypatch):
    monkeypatch.setattr(machine, "cpu_flags", lambda: frozenset(SPEC.cpu_flags))
    monkeypatch.setattr(amx, "_TILE_DATA", 1000)  # a part of a CPU that there is not
    with pytest.raises(
        DeviceError, match=r"device cpu cannot run here.*Linux does not let"
    ) as raised:
        machine.require(SPEC)
    assert raised.value.exit_code == 7


def test_nothing_is_asked_without_need(monkeypatch):
    monkeypatch.setattr(machine, "cpu_flags", lambda: frozenset({"avx2"}))
    monkeypatch.setattr(amx, "why_not", lambda: pytest.fail("asked"))
    assert "lacks amx_int8, amx_tile" in str(machine.why_not(SPEC))
