"""A model between this machine and a real Triton server, over links of several speeds.

    python benchmarks/remote.py model.onnx --shape batch=1 -o result.json

compiles the model with ``--remote`` and makes two hosts out of network namespaces. On one, the
Triton server that ``make triton`` fetches serves the model repository; on the other, the loader
alone runs the bundle on one core. ``tc`` gives the cable between them so many bits per second each
way, and a proxy adds the delay. For each link ``remote_edge.py`` measures the plan without the
server, the plan that sends everything, and what the loader chooses by itself.

Both ends share this machine, of which the server has all cores. With ``--edge-target
llvm:x86-64-v2`` the edge is slower in another way, too: code without AVX. Wants Linux and root.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from remote_edge import Result, Settings, Switching

import hybridc
from hybridc.bundle.read import open_bundle
from hybridc.runtime.arrays import random_inputs
from hybridc.runtime.remote_encoding import BYTE, HALF, TOLERANCE
from tools import two_hosts

Inputs = Mapping[str, Any]

_LIMITS = {"fp32": 1e-3, "fp16": TOLERANCE[HALF], "int8": TOLERANCE[BYTE]}
"""Largest relative error of a result, by what crosses."""


def measure(
    bundle: Path, repository: Path, inputs: Inputs, options: argparse.Namespace, switching: bool
) -> tuple[list[Result], Switching | None]:
    """Serve the repository on one host, and measure on another that has the loader and one core."""
    from tools import triton

    if not triton.is_here():
        sys.exit("this needs a Triton server; run: make triton")
    if reason := two_hosts.reason_not_here():
        sys.exit(reason)
    with tempfile.TemporaryDirectory() as text, two_hosts.two_hosts(1000) as hosts:
        scratch = Path(text)
        np.savez(scratch / "inputs.npz", **inputs)
        address = two_hosts.SERVER_ADDRESS
        with triton.serve(repository, scratch, address, hosts.server) as server:
            settings = Settings(
                bundle=str(bundle),
                inputs=str(scratch / "inputs.npz"),
                server=server.grpc if options.protocol == "grpc" else server.http,
                protocol=options.protocol,
                ends=hosts.ends,
                megabits=options.megabits,
                round_trips=options.round_trips,
                threads=options.threads,
                seconds=options.seconds,
                limit=_LIMITS[options.precision],
                switching=switching,
            )
            lines = list(_edge(settings, hosts, server.packages))
    found = Switching(**lines.pop()) if switching else None
    return [Result(**line) for line in lines], found


def _edge(settings: Settings, hosts: two_hosts.Hosts, packages: Path) -> Iterator[dict[str, Any]]:
    """What the edge prints, as it comes."""
    script = Path(__file__).with_name("remote_edge.py")
    command = [*hosts.edge, *two_hosts.EDGE, str(script), json.dumps(asdict(settings))]
    environment = {**os.environ, "PYTHONPATH": str(packages)}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            yield json.loads(line)
    if process.returncode:
        sys.exit("the edge failed")


def compile_hybrid(model: Path, folder: Path, options: argparse.Namespace) -> Path:
    """The bundle with its plans, all here and all there among them; and its repository."""
    bundle = folder / "edge.hyb"
    command = [sys.executable, "-m", "hybridc", "compile", str(model), "-o", str(bundle)]
    command += [f"--shape={text}" for text in options.shape]
    command += ["--remote=server=llvm:host", f"--link=server={options.link}"]
    command += [f"--target={options.edge_target}", f"--profile=llvm:0={options.edge}"]
    command += [f"--remote-precision={options.precision}", f"--profile=server={options.server}"]
    command += [f"--tolerance={_LIMITS[options.precision]}", "--no-fallback"]
    command += [f"--repository={folder / 'repository'}"]
    subprocess.run(command, check=True)
    names = {plan.name for plan in open_bundle(bundle).manifest.plans}
    if not {"local", "remote"} <= names:
        sys.exit(f"the bundle has the plans {', '.join(sorted(names))}, and not both extremes")
    return bundle


def table(results: Sequence[Result]) -> str:
    """The results in Markdown."""
    lines = [
        "| Mbit/s | Round trip | All here | All there | Chosen | Plan | Over the better |",
        "|---|---|---|---|---|---|---|",
    ]
    for result in results:
        times = [f"{t * 1e3:.1f} ms" for t in (result.local, result.remote, result.chosen)]
        link = [f"{result.megabits:g}", f"{result.round_trip_ms:g} ms"]
        cells = [*link, *times, result.plan, f"{result.over_best:.2f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def add_options(parser: argparse.ArgumentParser) -> None:
    """What does not depend on the model."""
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--link", default="100mbit,0.5ms")
    parser.add_argument("--edge", default="cortex-a76", help="profile of this end")
    parser.add_argument("--edge-target", default="llvm:host", help="what this end is compiled for")
    parser.add_argument("--server", default="sapphire-rapids", help="profile of the server")
    parser.add_argument("--protocol", choices=["grpc", "http"], default="grpc")
    parser.add_argument("--precision", choices=["fp32", "fp16", "int8"], default="fp32")
    parser.add_argument("--seconds", type=float, default=1.5, help="of each way over each link")
    megabits, round_trips = [1, 10, 100, 1000, 10000], [1, 15, 60]
    parser.add_argument("--megabits", type=float, nargs="+", default=megabits)
    parser.add_argument("--round-trips", type=float, nargs="+", default=round_trips)


def main() -> None:
    """Compile, serve, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--shape", action="append", default=[])
    add_options(parser)
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        bundle = compile_hybrid(options.model, folder, options)
        with hybridc.load(bundle, threads=options.threads) as model:
            inputs = random_inputs(model, 0)
        results, _ = measure(bundle, folder / "repository", inputs, options, switching=False)
    print(table(results))
    if options.output is not None:
        options.output.write_text(json.dumps([asdict(result) for result in results], indent=1))


if __name__ == "__main__":
    main()
