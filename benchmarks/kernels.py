"""Speed of each convolution and matrix product against the machine's measured peak.

    python benchmarks/kernels.py                      of all models of engines.py
    python benchmarks/kernels.py --model resnet50 --target llvm:x86-64-v3

Each distinct node of the models is compiled as a model of its own, with its weights as weights,
and run on one core. Such a model also changes the layout of what comes and goes, which a whole
model seldom does; so the kernel in it is run by itself, too, and its share of the peak is what
counts. The peak is measured anew beside each kernel, since machines change their speed, and all
figures are the best of many runs. Nodes below 20 MFLOP are left out: the issue with those is the
cost of a call.

Operations are those of the definition. Winograd's algorithm needs fewer, and may pass the peak, so
there is a median without it, too.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
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


def speed(model: onnx.ModelProto, operations: float, target: str) -> dict[str, Any]:
    """Best operations per second of the node, of its kernel and of the machine, in turns."""
    model = onnx.shape_inference.infer_shapes(model)
    node = run_of_node(model, target)
    kernel, winograd = run_of_kernel(model, target) or (node, False)
    runs = {"node": node, "kernel": kernel}
    best = dict.fromkeys(runs, float("inf"))
    peak = 0.0
    for _ in range(3):
        peak = max(peak, peak_flops(target))
        for name, run in runs.items():
            end = time.perf_counter() + 0.3
            while time.perf_counter() < end:
                begin = time.perf_counter()
                run()
                best[name] = min(best[name], time.perf_counter() - begin)
    own = operations / min(best.values())
    shares = {"share": own / peak, "node_share": operations / best["node"] / peak}
    return {"GFLOP/s": own / 1e9, "peak": peak / 1e9, **shares, "winograd": winograd}


def run_of_node(model: onnx.ModelProto, target: str) -> Callable[[], Any]:
    """Runs a model on random inputs."""
    from hybridc import onnx_backend
    from hybridc.runtime.tensors import to_tensor

    compiled = onnx_backend.prepare(model, target=target).model
    random = np.random.RandomState(1)
    tensors = [
        to_tensor(random.standard_normal(spec.shape).astype(np.float32)) for spec in compiled.inputs
    ]
    return lambda: compiled.run_tensors(tensors)


def run_of_kernel(model: onnx.ModelProto, target: str) -> tuple[Callable[[], Any], bool] | None:
    """Runs the one convolution or product that a model's code has; ``None`` if it is not one.

    Returns:
        The run, and whether it is by Winograd's algorithm.
    """
    from hybridc.targets.registry import parse_targets

    from hybridc.compiler import Options, plan_model, target_of
    from hybridc.frontend.read import source_of
    from hybridc.runtime.threads import use_threads

    options = Options(parse_targets([target]))
    _, placed, _, _ = plan_model(source_of(model), options)
    (device,) = options.devices
    builder = target_of(device, options)
    kernels = [k for part in placed.lowered for k in builder.kernels(part, device)]
    if len(kernels) != 1:
        return None
    use_threads(1)
    choice = kernels[0].candidates[0]
    run = kernels[0].build(choice)
    return lambda: run(1), bool(dict(choice).get("winograd"))


def line(row: Mapping[str, Any]) -> str:
    """A kernel's figures in a line."""
    speeds = f"{row['GFLOP/s']:7.1f} of {row['peak']:6.1f} GFLOP/s {row['share']:6.1%}"
    algorithm = " by Winograd" if row["winograd"] else ""
    return f"{speeds}{algorithm}, with its layouts {row['node_share']:6.1%}  {row['kernel']}"


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Median shares of the peak by what they are of."""
    direct = [row for row in rows if not row["winograd"]]
    return {
        f"median share of the peak over {len(rows)} kernels": _median(rows, "share"),
        f"over the {len(direct)} of them that are not by Winograd": _median(direct, "share"),
        "over all, with changes of layout around each": _median(rows, "node_share"),
    }


def _median(rows: Sequence[Mapping[str, Any]], name: str) -> float:
    return statistics.median([row[name] for row in rows] or [float("nan")])


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
            row |= speed(model, operations, options.target)
            print(line(row), flush=True)
    medians = summary(list(rows.values()))
    print("\n".join(f"{name}: {median:.1%}" for name, median in medians.items()))
    report = {"machine": machine(), "target": options.target, "medians": medians}
    options.output.write_text(json.dumps(report | {"kernels": list(rows.values())}, indent=1))


if __name__ == "__main__":
    main()
