"""Latency of 8-bit products on an NVIDIA GPU, beside the same ones in fp16.

    python benchmarks/gpu/integers.py

Each model is a chain of QLinearMatMul or QLinearConv nodes with random weights over the whole range
of int8. Beside it runs a chain of MatMul or Conv nodes of the same sizes in fp16. Both take turns,
round by round, with their input on the GPU and their result on the host, which has half as many
bytes for int8. Ratios are fp16's time over int8's, medians of the rounds.

Needs a GPU, hybridc[compiler] and torch.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from engines import Engine, time_rounds
from onnx import helper, numpy_helper

LAYERS, ROUNDS = 8, 9

Chain = tuple[tuple[int, ...], Callable[[int], tuple[int, ...]]]
"""Shape of the input, and that of the weights of each layer."""


def matrices(rows: int, narrow: int, wide: int) -> Chain:
    """Products with matrices that widen and narrow rows in turn."""
    return (rows, narrow), lambda layer: (wide, narrow) if layer % 2 else (narrow, wide)


def images(batch: int, channels: int, size: int) -> Chain:
    """Convolutions with filters of 3 x 3."""
    return (batch, channels, size, size), lambda _: (channels, channels, 3, 3)


CHAINS = {
    "128 rows, 768 and 3072": matrices(128, 768, 3072),
    "4096 rows, 768 and 3072": matrices(4096, 768, 3072),
    "1 image, 64 channels, 56 x 56": images(1, 64, 56),
    "32 images, 64 channels, 56 x 56": images(32, 64, 56),
    "32 images, 256 channels, 14 x 14": images(32, 256, 14),
}


def make_model(chain: Chain, quantized: bool) -> onnx.ModelProto:
    """The chain in uint8 and int8, or in float16."""
    shape, weights = chain
    rng, nodes, initializers = np.random.default_rng(0), [], _scales() if quantized else {}
    convolves = len(shape) == 4
    operator = "Conv" if convolves else "MatMul"
    attributes = {"pads": [1] * 4} if convolves else {}
    for layer in range(LAYERS):
        data = rng.integers(-128, 128, weights(layer))
        name = f"w{layer}"
        if quantized:
            initializers[name] = data.astype(np.int8)
            operands = ["a", "a_zero", name, "b", "b_zero", "a", "a_zero"]
        else:
            initializers[name] = (data / 128 / data[0].size ** 0.5).astype(np.float16)
            operands = [name]
        kind = f"QLinear{operator}" if quantized else operator
        nodes.append(
            helper.make_node(kind, [f"x{layer}", *operands], [f"x{layer + 1}"], **attributes)
        )
    dtype = onnx.TensorProto.UINT8 if quantized else onnx.TensorProto.FLOAT16
    graph = helper.make_graph(
        nodes,
        "chain",
        [helper.make_tensor_value_info("x0", dtype, shape)],
        [helper.make_tensor_value_info(f"x{LAYERS}", dtype, None)],
        [numpy_helper.from_array(array, name) for name, array in initializers.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def _scales() -> dict[str, Any]:
    zeros = {"a_zero": np.array(128, np.uint8), "b_zero": np.array(0, np.int8)}
    return zeros | {"a": np.array(0.02, np.float32), "b": np.array(0.0004, np.float32)}


def make_engine(model: onnx.ModelProto, folder: Path) -> Engine:
    """The model compiled and loaded, with random input."""
    import torch
    from hybridc.targets.registry import parse_targets

    import hybridc
    from hybridc.compiler import Options, compile_model

    folder.mkdir()
    onnx.save(model, folder / "model.onnx")
    options = Options(devices=parse_targets(["cuda:sm_90"]), fallback=False, verify=False)
    compile_model(folder / "model.onnx", folder / "bundle", options)
    loaded = hybridc.load(folder / "bundle")
    (entry,), (result,) = loaded.inputs, loaded.outputs
    dtype = helper.tensor_dtype_to_np_dtype(model.graph.input[0].type.tensor_type.elem_type)
    shape = [dim.dim_value for dim in model.graph.input[0].type.tensor_type.shape.dim]
    data = np.random.default_rng(1).integers(0, 255, shape).astype(dtype)
    tensor = torch.from_numpy(data).cuda()
    torch.cuda.synchronize()
    return lambda: loaded.run({entry.name: tensor})[result.name]


def main() -> None:
    """Measure all chains, one after the other."""
    for name, chain in CHAINS.items():
        with tempfile.TemporaryDirectory() as folder:
            engines = {
                kind: make_engine(make_model(chain, kind == "int8"), Path(folder) / kind)
                for kind in ("int8", "fp16")
            }
            times = time_rounds(engines, ROUNDS)
        ratio = statistics.median(b / a for a, b in zip(times["int8"], times["fp16"], strict=True))
        medians = "  ".join(f"{kind} {statistics.median(ms):.3f} ms" for kind, ms in times.items())
        print(f"{name:34} {medians}  ratio {ratio:.2f}", flush=True)


if __name__ == "__main__":
    main()
