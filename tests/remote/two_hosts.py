"""What crosses the cable between two hosts, where one runs a bundle and the other its server.

    edge namespace                          server namespace
    veth ================= tbf ================= veth
    the loader, one core    ^                Triton
                            capture: every frame, as it is on the cable

The capture reads the edge's end of the cable, puts each TCP stream's bytes into their order, and
fails where one is missing, so that it cannot overlook anything.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.triton import ROOT, serve
from tools.two_hosts import EDGE, EDGE_ADDRESS, SERVER_ADDRESS, Hosts, two_hosts

_ALL_PROTOCOLS, _IPV4, _TCP = 0x0003, 0x0800, 6
_LARGEST_FRAME = 1 << 18
_BUFFER = 1 << 26


@contextlib.contextmanager
def capture(hosts: Hosts, file: Path) -> Iterator[None]:
    """Write every frame that passes the edge's end of the cable to a file."""
    command = [*hosts.edge, sys.executable, "-m", __name__, hosts.interface, str(file)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stdin=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    try:
        yield
    finally:
        process.communicate(timeout=30)  # the end of its input is the end of the capture


@dataclass(frozen=True)
class _Segment:
    """A TCP segment: its ports, its first byte's number, whether it opens a stream, contents."""

    ports: tuple[int, int]
    sequence: int
    opens: bool
    data: bytes


def run_captured(
    folder: Path, bundle: Path, repository: Path, megabits: float, repeat: int
) -> tuple[list[bytes], dict[str, Any]]:
    """Run a bundle on one host, with the loader alone, and its server on the other.

    Args:
        folder: Has ``x.npz`` with the inputs, and gets ``y.npz`` with the outputs.
        bundle: The edge's bundle.
        repository: What Triton serves.
        megabits: Mbit/s of the cable.
        repeat: How often it runs.

    Returns:
        The bytes of each stream that the edge sent, and what ``hybridc run`` said.
    """
    frames = folder / "frames"
    with two_hosts(megabits) as hosts:
        serving = serve(repository, folder, SERVER_ADDRESS, hosts.server)
        with serving as triton, capture(hosts, frames):
            options = ("--input", folder / "x.npz", "-o", folder / "y.npz", "--format", "json")
            place = ("--repeat", repeat, "--remote", triton.grpc)
            done = subprocess.run(
                [*hosts.edge, *EDGE, "-m", "hybridc", "run", *map(str, (bundle, *options, *place))],
                env={**os.environ, "PYTHONPATH": str(triton.packages)},
                capture_output=True,
                text=True,
                check=False,
            )
    assert done.returncode == 0, done.stderr
    return streams(frames, EDGE_ADDRESS), json.loads(done.stdout)


def streams(file: Path, source: str) -> list[bytes]:
    """The bytes of each TCP stream that a host sent, in their order.

    Raises:
        ValueError: Some of a stream were not captured.
    """
    found: dict[tuple[int, int], list[_Segment]] = {}
    for frame in _frames(file.read_bytes()):
        segment = _segment(frame, socket.inet_aton(source))
        if segment is not None:
            found.setdefault(segment.ports, []).append(segment)
    return [_joined(own) for own in found.values()]


def _frames(data: bytes) -> Iterator[bytes]:
    place = 0
    while place < len(data):
        (length,) = struct.unpack_from("!I", data, place)
        yield data[place + 4 : place + 4 + length]
        place += 4 + length


def _segment(frame: bytes, source: bytes) -> _Segment | None:
    """The TCP segment from a host in a frame: RFC 791, section 3.1; RFC 9293, section 3.1."""
    if struct.unpack_from("!H", frame, 12)[0] != _IPV4:
        return None
    length = struct.unpack_from("!H", frame, 16)[0]
    if frame[23] != _TCP or frame[26:30] != source:
        return None
    start = 14 + (frame[14] & 15) * 4
    sequence, offset, flags = struct.unpack_from("!I4xBB", frame, start + 4)
    data = frame[start + (offset >> 4) * 4 : 14 + length if length else None]
    opens = bool(flags & 2)  # which takes a number too
    return _Segment(struct.unpack_from("!HH", frame, start), sequence + opens, opens, data)


def _joined(segments: Sequence[_Segment]) -> bytes:
    """Contents in their order; what was sent again counts once."""
    origin = next((own.sequence for own in segments if own.opens), None)
    if origin is None:
        raise ValueError("the start of a stream was not captured")
    stream = bytearray()
    filled = [own for own in segments if own.data]  # the end of a stream takes a number, too
    for place, data in sorted(((own.sequence - origin) % 2**32, own.data) for own in filled):
        if place > len(stream):
            raise ValueError(f"{place - len(stream)} bytes of a stream were not captured")
        stream[place : place + len(data)] = data
    return bytes(stream)


def _record(interface: str, file: str) -> None:
    """Write frames, each behind its length, until the standard input ends."""
    import select

    reader = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ALL_PROTOCOLS))
    reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER)
    reader.bind((interface, 0))
    print("ready", flush=True)
    with open(file, "wb") as output:
        while True:
            ready, _, _ = select.select([reader, sys.stdin], [], [])
            if reader in ready:
                frame = reader.recv(_LARGEST_FRAME)
                output.write(struct.pack("!I", len(frame)) + frame)
            elif ready:
                break


if __name__ == "__main__":
    _record(*sys.argv[1:])
