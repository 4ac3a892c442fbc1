"""Two hosts: the loader alone calls Triton over a cable, and nothing private is on it."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from tests.remote.test_wire import leaks
from tests.remote.two_hosts import run_captured, streams
from tools.triton import is_here
from tools.two_hosts import EDGE_ADDRESS, SERVER_ADDRESS, reason_not_here


@pytest.mark.skipif(not is_here(), reason="there is no Triton server: make triton")
def test_a_capture_has_nothing_private(hybrid, tensors, tmp_path):
    if reason := reason_not_here():
        pytest.skip(reason)
    np.savez(tmp_path / "x.npz", x=hybrid.x)
    sent, said = run_captured(tmp_path, hybrid.bundle, hybrid.repository, megabits=100, repeat=5)
    assert said["remote"]["runs"]["cut1"] > 0
    assert hybrid.is_right(dict(np.load(tmp_path / "y.npz")))
    captured = b"\0".join(sent)
    assert leaks(tensors["x"], captured) == []
    assert leaks(tensors["a"], captured, known=tensors["map"]) == []
    assert len(leaks(tensors["map"], captured)) > 0.9 * len(tensors["map"]) / 32


def test_a_capture_with_a_hole_is_refused(tmp_path):
    whole = [segment(1000, b"", start=True), segment(1001, b"abcd"), segment(1005, b"efgh")]
    again = [*whole[::-1], segment(1003, b"cd")]
    for frames, contents in (
        (whole, b"abcdefgh"),
        (whole[::-1], b"abcdefgh"),
        (again, b"abcdefgh"),
    ):
        (tmp_path / "frames").write_bytes(b"".join(frames))
        assert streams(tmp_path / "frames", EDGE_ADDRESS) == [contents]
    (tmp_path / "frames").write_bytes(whole[0] + whole[2])
    with pytest.raises(ValueError, match="4 bytes of a stream were not captured"):
        streams(tmp_path / "frames", EDGE_ADDRESS)


def segment(sequence: int, data: bytes, start: bool = False) -> bytes:
    """A frame as it is recorded, with a TCP segment from the edge."""
    tcp = struct.pack("!HHIIBBHHH", 5000, 8001, sequence, 0, 5 << 4, 2 * start, 0, 0, 0) + data
    addresses = bytes(map(int, f"{EDGE_ADDRESS}.{SERVER_ADDRESS}".split(".")))
    ip = struct.pack("!BBHIBBH", 0x45, 0, 20 + len(tcp), 0, 64, 6, 0) + addresses + tcp
    frame = bytes(12) + struct.pack("!H", 0x0800) + ip
    return struct.pack("!I", len(frame)) + frame
