"""Small ONNX models, made on the spot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import NodeProto, helper, numpy_helper

from hybridc.reference import precise_session

Array = np.ndarray[Any, Any]
Dims = Sequence[int | str | None]


def node(operator: str, inputs: str, outputs: str, name: str = "", **attributes: Any) -> NodeProto:
    """A node; inputs and outputs are names with spaces between, ``-`` stands for one left out."""
    names = ["" if text == "-" else text for text in inputs.split()]
    return helper.make_node(operator, names, outputs.split(), name=name, **attributes)


def make_model(
    nodes: Sequence[NodeProto],
    inputs: Mapping[str, Dims],
    outputs: Mapping[str, Dims],
    weights: Mapping[str, Array] | None = None,
    opset: int = 17,
    dtype: str = "float32",
) -> onnx.ModelProto:
    """A model whose inputs and outputs are all of one type."""
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    graph = helper.make_graph(
        nodes,
        "graph",
        [helper.make_tensor_value_info(name, kind, dims) for name, dims in inputs.items()],
        [helper.make_tensor_value_info(name, kind, dims) for name, dims in outputs.items()],
        [numpy_helper.from_array(array, name) for name, array in (weights or {}).items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


def relu_model(dims: Dims = (2, 3), opset: int = 17) -> onnx.ModelProto:
    """``y = relu(x)``."""
    return make_model([node("Relu", "x", "y", "relu")], {"x": dims}, {"y": dims}, opset=opset)


def scale_model(dims: Dims, dtype: str = "float32") -> onnx.ModelProto:
    """``y = 2 x``."""
    weights = {"two": np.array([2], dtype)}
    nodes = [node("Mul", "x two", "y", "mul")]
    return make_model(nodes, {"x": dims}, {"y": dims}, weights, dtype=dtype)


def sum_model(opset: int = 17) -> onnx.ModelProto:
    """``total = left + right`` over a dynamic dimension that both share."""
    nodes = [node("Add", "left right", "total", "add")]
    dims = ("rows", 4)
    return make_model(nodes, {"left": dims, "right": dims}, {"total": dims}, opset=opset)


def linear_model(size: int) -> onnx.ModelProto:
    """``y = x w`` with ``size * size`` float32 weights."""
    nodes = [node("MatMul", "x w", "y", "matmul")]
    dims = (1, size)
    return make_model(nodes, {"x": dims}, {"y": dims}, {"w": random(size, size)})


def branched_model() -> onnx.ModelProto:
    """Two convolution branches that meet again, and a linear layer: something worth splitting."""
    nodes = [
        node("Conv", "x stem.w", "stem.c", "stem", pads=[1, 1, 1, 1]),
        node("Relu", "stem.c", "stem.y", "stem.relu"),
        node("Conv", "stem.y left.w left.b", "left.y", "left"),
        node("Conv", "stem.y right.w", "right.c", "right"),
        node("Sigmoid", "right.c", "right.y", "right.sigmoid"),
        node("Add", "left.y right.y", "sum", "join"),
        node("GlobalAveragePool", "sum", "pooled", "pool"),
        node("Flatten", "pooled", "flat", "flatten"),
        node("Gemm", "flat head.w head.b", "y", "head"),
    ]
    weights = {
        "stem.w": random(4, 3, 3, 3, seed=1),
        "left.w": random(4, 4, 1, 1, seed=2),
        "left.b": random(4, seed=3),
        "right.w": random(4, 4, 1, 1, seed=4),
        "head.w": random(4, 5, seed=5),
        "head.b": random(5, seed=6),
    }
    return make_model(nodes, {"x": (1, 3, 8, 8)}, {"y": (1, 5)}, weights)


def random(*shape: int, seed: int = 0, dtype: str = "float32") -> Array:
    """Seeded normal numbers."""
    return np.random.RandomState(seed).standard_normal(shape).astype(dtype)


def save(model: onnx.ModelProto, path: Path, external: bool = False) -> Path:
    """Write a model, if asked with its weights in ``weights.bin`` beside it; returns the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if external:
        copy = onnx.ModelProto.FromString(model.SerializeToString())
        onnx.save(copy, path, save_as_external_data=True, location="weights.bin", size_threshold=0)
    else:
        onnx.save(model, path)
    return path


def run_reference(model: onnx.ModelProto | Path, inputs: Mapping[str, Array]) -> dict[str, Array]:
    """Outputs by name from ONNX Runtime."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    options.add_session_config_entry("session.disable_quant_qdq", "1")
    source = model if isinstance(model, Path) else model.SerializeToString()
    session = precise_session(source, options)
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, dict(inputs)), strict=True))
