"""Latency of hybridc beside PyTorch on an NVIDIA GPU, on the same models and inputs.

    python benchmarks/gpu/engines.py                      all models, batch 1 and 32, fp32
    python benchmarks/gpu/engines.py --precision tf32 --precision fp16 --jobs 8
    python benchmarks/gpu/engines.py --model resnet50 --batch 1 --mode reduce-overhead

For each model, batch and precision one process is started. PyTorch's model, with seeded weights, is
exported to ONNX and compiled by hybridc; then the engines take turns, round by round. Inputs are on
the GPU before a call, and results are on the host after it. Processes prepare ``--jobs`` at a time,
and one measures as soon as it is ready, while the others are stopped. Ratios are PyTorch's time
over hybridc's, medians of the rounds; above 1 hybridc is faster. Errors are relative to the largest
result of float32 on the CPU.

    fp32    float32, TF32 off
    tf32    float32, products with TF32: ``cuda:sm_90,tf32``
    fp16    hybridc: the model as --precision fp16 makes it, with inputs and outputs in float32;
            PyTorch: the model and its input as half

Needs a GPU, hybridc[compiler], torch, torchvision, transformers and onnxscript.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

sys.path.append(str(Path(__file__).resolve().parent.parent))

from turns import run_all, turn

MODELS = ("resnet50", "squeezenet1_0", "mobilenet_v2", "bert")
PRECISIONS = ("fp32", "tf32", "fp16")
MODES = ("eager", "reduce-overhead", "max-autotune")
TOKENS, WIDTH = 128, 768

Engine: TypeAlias = Callable[[], Any]
Case: TypeAlias = tuple[str, int, str]
"""A model, a batch and a precision."""


def make_model(name: str, batch: int) -> tuple[Any, Any]:
    """A PyTorch model with seeded weights, and its input, both on the host."""
    import torch

    torch.manual_seed(0)
    if name == "bert":
        from transformers import BertConfig, BertModel

        class Encoder(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                config = BertConfig(attn_implementation="eager")
                self.encoder = BertModel(config).encoder

            def forward(self, states: Any) -> Any:
                return self.encoder(states).last_hidden_state

        return Encoder().eval(), torch.randn(batch, TOKENS, WIDTH)
    import torchvision

    model = getattr(torchvision.models, name)(weights=None)
    return model.eval(), torch.randn(batch, 3, 224, 224)


def hybridc_engine(model: Any, example: Any, precision: str, folder: Path) -> Engine:
    """The model exported, compiled and loaded."""
    import onnx
    import torch
    from hybridc.targets.registry import parse_targets

    import hybridc
    from hybridc.compiler import Options, compile_model
    from hybridc.precision.half import convert_floats

    path = folder / "model.onnx"
    torch.onnx.export(model, (example,), str(path), dynamo=False, opset_version=17)
    if precision == "fp16":
        onnx.save(convert_floats(onnx.load(path)), path)
    target = "cuda:sm_90,tf32" if precision == "tf32" else "cuda:sm_90"
    options = Options(devices=parse_targets([target]), fallback=False, verify=False)
    compile_model(path, folder / "bundle", options)
    loaded = hybridc.load(folder / "bundle")
    (entry,), (result,) = loaded.inputs, loaded.outputs
    tensor = example.cuda()
    torch.cuda.synchronize()
    return lambda: loaded.run({entry.name: tensor})[result.name]


def torch_engine(model: Any, example: Any, mode: str) -> Engine:
    """PyTorch, eager or compiled in a mode."""
    import torch

    function = model if mode == "eager" else torch.compile(model, mode=mode)
    tensor = example.cuda()

    def call() -> Any:
        with torch.inference_mode():
            return function(tensor).cpu().numpy()

    return call


def time_rounds(engines: dict[str, Engine], rounds: int) -> dict[str, list[float]]:
    """Milliseconds of a call of each engine in each round."""
    times: dict[str, list[float]] = {name: [] for name in engines}
    calls = {name: _calls(engine) for name, engine in engines.items()}
    for _ in range(rounds):
        for name, engine in engines.items():
            begin = time.perf_counter()
            for _ in range(calls[name]):
                engine()
            times[name].append((time.perf_counter() - begin) / calls[name] * 1e3)
    return times


def _calls(engine: Engine) -> int:
    """Calls that take about 40 ms, after a warm-up."""
    for _ in range(5):
        engine()
    begin = time.perf_counter()
    engine()
    return max(1, int(0.04 / (time.perf_counter() - begin)))


def measure(name: str, batch: int, precision: str, modes: list[str], rounds: int) -> dict[str, Any]:
    """Medians and ratios of one model at one batch."""
    import torch

    tf32 = precision == "tf32"
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = tf32
    torch.backends.cudnn.benchmark = True
    model, example = make_model(name, batch)
    with torch.inference_mode():
        expected = model(example).numpy()
    with tempfile.TemporaryDirectory() as folder:
        engines = {"hybridc": hybridc_engine(model, example, precision, Path(folder))}
        model = model.cuda()
        if precision == "fp16":
            model, example = model.half(), example.half()
        engines |= {mode: torch_engine(model, example, mode) for mode in modes}
        scale = np.abs(expected).max()
        errors = {n: float(np.abs(e() - expected).max() / scale) for n, e in engines.items()}
        with turn():
            times = time_rounds(engines, rounds)
    ratios = {
        mode: statistics.median(a / b for a, b in zip(times[mode], times["hybridc"], strict=True))
        for mode in modes
    }
    medians = {engine: statistics.median(values) for engine, values in times.items()}
    found = {"model": name, "batch": batch, "precision": precision}
    return {**found, "ms": medians, "ratios": ratios, "errors": errors}


def command_of(case: Case, modes: list[str], rounds: int) -> list[str]:
    """The command line that measures one case."""
    name, batch, precision = case
    command = [sys.executable, __file__, "--one", "--model", name, "--batch", str(batch)]
    command += ["--precision", precision, "--rounds", str(rounds)]
    return command + [word for mode in modes for word in ("--mode", mode)]


def show(row: dict[str, Any]) -> None:
    """Print the measurements of a case."""
    times = "  ".join(f"{engine} {ms:.3f} ms" for engine, ms in row["ms"].items())
    ratios = "  ".join(f"{mode} {ratio:.2f}" for mode, ratio in row["ratios"].items())
    errors = "  ".join(f"{engine} {error:.1e}" for engine, error in row["errors"].items())
    print(
        f"{row['model']:13} batch {row['batch']:2} {row['precision']}  {times}  ratios: {ratios}  "
        f"errors: {errors}",
        flush=True,
    )


def measure_all(cases: Iterable[Case], modes: list[str], rounds: int, jobs: int) -> Iterator[Any]:
    """Measurements of all cases that do not fail, in the order in which they are ready."""
    commands = ((case, command_of(case, modes, rounds)) for case in cases)
    for case, ended in run_all(commands, jobs):
        if ended.code:
            print(f"{case} failed: " + "\n".join(ended.lines)[-1500:], flush=True)
            continue
        row = json.loads(ended.lines[-1])
        show(row)
        yield row


def main() -> None:
    """Measure all that is asked for, each in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", action="append", choices=MODELS)
    parser.add_argument("--batch", action="append", type=int)
    parser.add_argument("--mode", action="append", choices=MODES)
    parser.add_argument("--precision", action="append", choices=PRECISIONS)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    models, batches = arguments.model or MODELS, arguments.batch or (1, 32)
    modes = arguments.mode or list(MODES)
    precisions = arguments.precision or ["fp32"]
    if arguments.one:
        case = (models[0], batches[0], precisions[0])
        print(json.dumps(measure(*case, modes, arguments.rounds)))
        return
    results = []
    for row in measure_all(
        itertools.product(models, batches, precisions), modes, arguments.rounds, arguments.jobs
    ):
        results.append(row)
        if arguments.output:
            arguments.output.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
