"""``hybridc run``."""

from __future__ import annotations

import dataclasses
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hybridc.cli.options import input_option, seed_option
from hybridc.cli.output import format_option, shape, show, table

if TYPE_CHECKING:
    from hybridc.bundle.tensors import Array
    from hybridc.runtime.chain import Chain
    from hybridc.runtime.loader import Model


@click.command("run")
@click.argument("bundle", type=click.Path(path_type=Path))
@input_option
@click.option(
    "-o",
    "--output",
    "destination",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write the outputs by name to an npz, or the only output to an npy.",
)
@click.option("--repeat", type=click.IntRange(min=1), default=1, help="Run so many times.")
@click.option(
    "--remote",
    metavar="HOST:PORT",
    help="The server of a hybrid bundle, or several with commas between. TLS and tokens come from "
    "the environment.",
)
@seed_option
@format_option
def command(
    bundle: Path,
    source: Path | None,
    destination: Path | None,
    repeat: int,
    remote: str | None,
    seed: int,
    format_: str,
) -> None:
    """Run the BUNDLE, or a chain of bundles, and print what comes out.

    Needs the loader only: no compiler, no ONNX.
    """
    import hybridc
    from hybridc.runtime.arrays import random_inputs, read_arrays, write_arrays
    from hybridc.runtime.chain import Chain, chain_folder, load_chain

    load = load_chain if chain_folder(bundle) else hybridc.load
    with load(bundle, remote=remote) as model:
        first = model.stages[0].model if isinstance(model, Chain) else model
        arrays = read_arrays(source, model.inputs) if source else random_inputs(first, seed)
        outputs, seconds = _timed(model, arrays, repeat)
        status = getattr(model, "status", None)
        plan = {device: len(nodes) for device, nodes in model.plan.items()}
        missed = list(model.missed)
    if destination is not None:
        write_arrays(destination, outputs)
    data = {
        "outputs": {name: _describe(array) for name, array in outputs.items()},
        "plan": plan,
        "missed": missed,
        "runs": repeat,
        "milliseconds": {
            "min": min(seconds) * 1e3,
            "median": statistics.median(seconds) * 1e3,
            "max": max(seconds) * 1e3,
        },
    }
    if status is not None:
        data["remote"] = dataclasses.asdict(status)
    show(format_, data, lambda: _as_lines(data))


def _timed(
    model: Model | Chain, arrays: dict[str, Array], repeat: int
) -> tuple[dict[str, Array], list[float]]:
    seconds = []
    outputs: dict[str, Array] = {}
    for _ in range(repeat):
        start = time.perf_counter()
        outputs = model.run(arrays)
        seconds.append(time.perf_counter() - start)
    return outputs, seconds


def _describe(array: Array) -> dict[str, Any]:
    text: dict[str, Any] = {"dtype": array.dtype.name, "shape": list(array.shape)}
    if array.size:
        text |= {"min": array.min().item(), "mean": float(array.mean()), "max": array.max().item()}
    return text


def _as_lines(data: dict[str, Any]) -> list[str]:
    rows = [["output", "type", "shape", "min", "mean", "max"]]
    for name, facts in data["outputs"].items():
        numbers = [f"{facts[key]:.6g}" if key in facts else "-" for key in ("min", "mean", "max")]
        rows.append([name, facts["dtype"], shape(facts["shape"]), *numbers])
    times = data["milliseconds"]
    runs = f"{data['runs']} run{'s' * (data['runs'] != 1)}"
    remote = data.get("remote")
    return [
        *table(rows, indent=0),
        *([_remote_line(remote)] if remote else []),
        *(f"note: {reason}; {' and '.join(data['plan'])} ran instead" for reason in data["missed"]),
        f"{runs}: min {times['min']:.3f} ms, median {times['median']:.3f} ms, "
        f"max {times['max']:.3f} ms",
    ]


def _remote_line(status: dict[str, Any]) -> str:
    runs = ", ".join(f"{name} {count}" for name, count in status["runs"].items() if count)
    link = f"{status['round_trip_seconds'] * 1e3:.3g} ms, {status['bytes_per_second'] * 8e-6:.4g}"
    state = f"{status['endpoint']} answers" if status["connected"] else status["trouble"]
    return f"plans that ran: {runs}; link: {link} Mbit/s; {state or 'the server was not asked yet'}"
