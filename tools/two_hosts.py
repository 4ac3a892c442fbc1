"""Two hosts on one machine: network namespaces with a cable between them.

    edge namespace                          server namespace
    10.213.0.1  veth ====== tbf ====== veth  10.213.0.2

``tc`` keeps each end of the cable to a rate; a delay is not its part. Wants Linux and root.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

EDGE_ADDRESS, SERVER_ADDRESS = "10.213.0.1", "10.213.0.2"

EDGE = ("taskset", "-c", "0", sys.executable, "-S")
"""Python on one core, without packages but those that it is given."""

_LEAST_BURST, _BURST_SECONDS = 32 * 1024, 2e-3
"""Bytes that may pass at once: some, and what passes between two ticks of the kernel's clock."""


@dataclass(frozen=True)
class Hosts:
    """Both namespaces.

    Attributes:
        edge: What a command starts with to run at the edge.
        server: The same for the server.
        interface: The edge's end of the cable.
        ends: Commands that give each end a rate, but for that rate.
    """

    edge: Sequence[str]
    server: Sequence[str]
    interface: str
    ends: Sequence[Sequence[str]]


def reason_not_here() -> str | None:
    """Why there can be no namespaces; ``None`` if there can."""
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        return "network namespaces want Linux and root"
    if shutil.which("ip") is None or shutil.which("tc") is None:
        return "network namespaces want the package iproute2"
    name = f"hybridc-try-{os.getpid()}"
    tries = (
        f"ip netns add {name}",
        f"ip netns exec {name} ip link add hybridc-try type veth peer name hybridc-end",
        f"ip netns exec {name} tc qdisc add dev hybridc-try root {' '.join(_limit(1))}",
    )
    try:
        for command in tries:
            _run(command.split())
    except subprocess.CalledProcessError:
        return "this machine allows no network namespaces, or none with a link of a given speed"
    finally:
        subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)
    return None


@contextlib.contextmanager
def two_hosts(megabits: float) -> Iterator[Hosts]:
    """Two namespaces with a cable of so many Mbit/s each way."""
    own = os.getpid()
    edge, server = f"hybridc-edge-{own}", f"hybridc-server-{own}"
    ends = {edge: (f"hce{own}", EDGE_ADDRESS), server: (f"hcs{own}", SERVER_ADDRESS)}
    try:
        for name in ends:
            _run(["ip", "netns", "add", name])
        (one, _), (other, _) = ends.values()
        _run(f"ip link add {one} netns {edge} type veth peer name {other} netns {server}".split())
        inside = {name: ["ip", "netns", "exec", name] for name in ends}
        for name, (end, address) in ends.items():
            _run([*inside[name], *f"ip address add {address}/30 dev {end}".split()])
            _run([*inside[name], *f"ip link set {end} up".split()])
            _run([*inside[name], *"ip link set lo up".split()])
        shapers = [
            [*inside[name], *f"tc qdisc replace dev {end} root".split()]
            for name, (end, _) in ends.items()
        ]
        set_rate(shapers, megabits)
        yield Hosts(inside[edge], inside[server], one, shapers)
    finally:
        for name in ends:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


def set_rate(ends: Sequence[Sequence[str]], megabits: float) -> None:
    """Give the ends of a cable another rate; see :attr:`Hosts.ends`."""
    for end in ends:
        _run([*end, *_limit(megabits)])


def _limit(megabits: float) -> list[str]:
    burst = max(_LEAST_BURST, int(megabits * 1e6 / 8 * _BURST_SECONDS))
    return f"tbf rate {megabits}mbit burst {burst} latency 400ms".split()


def _run(command: Sequence[str]) -> None:
    subprocess.run(command, check=True, capture_output=True)
