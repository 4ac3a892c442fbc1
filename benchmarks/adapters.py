"""One function for each engine: from a model and its inputs to something that runs it once.

Every engine computes in float32 with the given number of threads, and takes and gives numpy arrays
as its own documentation recommends for low latency.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

Feeds = Mapping[str, np.ndarray]
Engine = Callable[[], Any]


@dataclass(frozen=True)
class Asked:
    """What hybridc's bundle is asked for.

    Attributes:
        target: What it is compiled for.
        open_batch: Whether it takes 1 to 8 images, or whatever the first dimension counts.
    """

    target: str
    open_batch: bool = False

    def shape(self, name: str, array: np.ndarray) -> str:
        """The option for the shape of an input."""
        first, *rest = map(str, array.shape)
        return f"--shape={name}={'x'.join(['1..8' if self.open_batch else first, *rest])}"


def hybridc(path: Path, feeds: Feeds, threads: int, asked: Asked) -> Engine:
    """A bundle, compiled without a check and loaded."""
    import hybridc

    with tempfile.TemporaryDirectory() as folder:
        bundle = Path(folder) / "model.hyb"
        command = [sys.executable, "-P", "-m", "hybridc", "compile", str(path), "-o", str(bundle)]
        command += ["--target", asked.target, "--no-verify", "--no-fallback"]
        command += [asked.shape(name, array) for name, array in feeds.items() if array.ndim]
        subprocess.run(command, check=True, capture_output=True)
        model = hybridc.load(bundle, threads=threads)
    return lambda: model.run(feeds)


def onnxruntime(path: Path, feeds: Feeds, threads: int, _asked: Asked) -> Engine:
    """ONNX Runtime's CPU provider with all its optimizations."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return lambda: session.run(None, dict(feeds))


def openvino(path: Path, feeds: Feeds, threads: int, _asked: Asked) -> Engine:
    """OpenVINO's CPU plug-in, tuned for latency."""
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


def iree(path: Path, feeds: Feeds, threads: int, _asked: Asked) -> Engine:
    """IREE's llvm-cpu back end for this machine's CPU."""
    import onnx
    from iree import compiler, runtime

    model = onnx.load(path)
    for value in model.graph.input:  # IREE imports static shapes only, like our own compile
        if value.name in feeds:
            _set_shape(value, feeds[value.name].shape)
    with tempfile.TemporaryDirectory() as folder:
        source, imported = Path(folder) / "model.onnx", Path(folder) / "model.mlir"
        onnx.save(onnx.version_converter.convert_version(model, 17), source)
        importer = [sys.executable, "-m", "iree.compiler.tools.import_onnx", str(source)]
        subprocess.run([*importer, "-o", str(imported)], check=True, capture_output=True)
        options = ["--iree-llvmcpu-target-cpu=host", "--iree-opt-level=O3"]
        code = compiler.compile_file(
            str(imported), target_backends=["llvm-cpu"], extra_args=options, input_type="onnx"
        )
    runtime.flags.parse_flags(f"--task_topology_group_count={threads}")
    module = runtime.load_vm_flatbuffer(code, driver="local-task")
    function = getattr(module, model.graph.name)
    arrays = [feeds[value.name] for value in model.graph.input if value.name in feeds]
    return lambda: _to_host(function(*arrays))


def _set_shape(value: Any, shape: tuple[int, ...]) -> None:
    for dim, size in zip(value.type.tensor_type.shape.dim, shape, strict=True):
        dim.dim_value = size


def _to_host(results: Any) -> list[np.ndarray]:
    results = results if isinstance(results, list | tuple) else [results]
    return [result.to_host() for result in results]


ENGINES: dict[str, Callable[[Path, Feeds, int, Asked], Engine]] = {
    "hybridc": hybridc,
    "onnxruntime": onnxruntime,
    "openvino": openvino,
    "iree": iree,
}
