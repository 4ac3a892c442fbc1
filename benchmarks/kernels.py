"""Speed of each convolution and matrix product against the machine's measured peak.

    python benchmarks/kernels.py                      of all models of engines.py
    python benchmarks/kernels.py --model resnet50 --target llvm:x86-64-v3

Each distinct kernel of the models is compiled as a model of its own, with its weights as weights,
and run on one core. The peak is measured anew beside each kernel, since machines change their
speed, and both figures are the best of many runs. Kernels below 20 MFLOP are left out: the issue
with those is the cost of a call.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from engines import CATALOG, LIGHT, RESULTS, find_model
from peak import peak_flops
from report import machine

ANCHORS = ("Conv", "ConvTranspose", "Gemm", "MatMul")
LEAST = 20e6


def kernels(name: str) -> Iterator[tuple[str, float, onnx.ModelProto]]:
    """Each anchor of a model: its signature, its operations, and it alone as a model."""
    from hybridc.cost_models.work import count_work
    from hybridc.passes.pipeline import run_passes

    from hybridc.frontend.read import read_model
    from hybridc.frontend.shapes import specialize
    from hybridc.lowering.ops import default_table

    path, feeds = find_model(name, 1)
    source = read_model(path)
    specialize(source.model, {name: array.shape for name, array in feeds.items() if array.ndim})
    model, _ = run_passes(source.model, default_table().lowers)
    for node in model.graph:
        work = count_work(node) if node.op_type in ANCHORS else None
        if work is not None and work.operations >= LEAST:
            yield signature(node), work.operations, alone(node, model)


def signature(node: ir.Node) -> str:
    """Operator, shapes and attributes in one line."""
    shapes = " ".join(
        "x".join(map(str, value.shape or ())) for value in node.inputs if value is not None
    )
    attributes = " ".join(f"{name}={node.attributes[name].value}" for name in node.attributes)
    return f"{node.op_type} {shapes} {attributes}"


def alone(node: ir.Node, model: ir.Model) -> onnx.ModelProto:
    """A model of one node; what is constant in the original stays constant."""
    proto = ir.to_proto(node)
    values = [value for value in node.inputs if value is not None]
    weights = [_random_weight(value) for value in values if value.const_value is not None]
    inputs = [ir.to_proto(value) for value in values if value.const_value is None]
    outputs = [onnx.ValueInfoProto(name=value.name) for value in node.outputs]
    graph = onnx.helper.make_graph([proto], "kernel", inputs, outputs, weights)
    opset = onnx.helper.make_opsetid("", model.graph.opset_imports[""])
    return onnx.helper.make_model(graph, opset_imports=[opset], ir_version=8)


def _random_weight(value: ir.Value) -> onnx.TensorProto:
    assert value.shape is not None
    array = np.random.RandomState(0).standard_normal(value.shape.numpy()).astype(np.float32)
    return onnx.numpy_helper.from_array(array, value.name)


def speed(model: onnx.ModelProto, operations: float, target: str) -> tuple[float, float]:
    """The kernel's and the machine's best operations per second, measured in turns."""
    from hybridc import onnx_backend
    from hybridc.runtime.tensors import to_tensor

    compiled = onnx_backend.prepare(onnx.shape_inference.infer_shapes(model), target=target).model
    random = np.random.RandomState(1)
    tensors = [
        to_tensor(random.standard_normal(spec.shape).astype(np.float32)) for spec in compiled.inputs
    ]
    best, peak = float("inf"), 0.0
    for _ in range(3):
        peak = max(peak, peak_flops(target))
        end = time.perf_counter() + 0.3
        while time.perf_counter() < end:
            begin = time.perf_counter()
            compiled.run_tensors(tensors)
            best = min(best, time.perf_counter() - begin)
    return operations / best, peak


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", action="append", choices=[*LIGHT, *CATALOG])
    parser.add_argument("--target", default="llvm:host")
    parser.add_argument("--output", type=Path, default=RESULTS / "kernels.json")
    options = parser.parse_args()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])
    rows: dict[str, dict[str, Any]] = {}
    for name in options.model or [*LIGHT, *CATALOG]:
        for text, operations, model in kernels(name):
            row = rows.setdefault(text, {"kernel": text, "models": [], "MFLOP": operations / 1e6})
            if name not in row["models"]:
                row["models"].append(name)
            if "share" in row:
                continue
            own, peak = speed(model, operations, options.target)
            row |= {"GFLOP/s": own / 1e9, "peak": peak / 1e9, "share": own / peak}
            print(f"{own / 1e9:7.1f} of {peak / 1e9:6.1f} GFLOP/s {own / peak:6.1%}  {text}")
    median = statistics.median(row["share"] for row in rows.values())
    print(f"median share of the peak over {len(rows)} kernels: {median:.1%}")
    report = {"machine": machine(), "target": options.target, "median": median}
    options.output.write_text(json.dumps(report | {"kernels": list(rows.values())}, indent=1))


if __name__ == "__main__":
    main()
