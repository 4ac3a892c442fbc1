"""Models for GPU tests: each makes kernels of another kind, and all have seeded weights.

Weights of the large ones have few different values, so that bundles with them compress well.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper

from tests.models import Array, Dims, branched_model, make_model, node, random

Maker = Callable[[], onnx.ModelProto]


def _weights(**shapes: tuple[int, ...]) -> dict[str, Array]:
    return {
        name: random(*shape, seed=seed) / np.float32(np.sqrt(max(np.prod(shape[1:]), 1)))
        for seed, (name, shape) in enumerate(shapes.items())
    }


def _matmul(rows: int, depth: int, columns: int) -> onnx.ModelProto:
    nodes = [node("MatMul", "x w", "p"), node("Add", "p b", "s"), node("Relu", "s", "y")]
    weights = _weights(w=(depth, columns), b=(columns,))
    return make_model(nodes, {"x": (rows, depth)}, {"y": (rows, columns)}, weights)


def _tiles(rows: int, depth: int, columns: int, transposed: int = 0) -> onnx.ModelProto:
    """A product in tiles that do not divide it, and the means of its columns, which are few."""
    nodes = [
        node("Gemm", "x w b", "p", transB=transposed),
        node("Relu", "p", "r"),
        node("ReduceMean", "r", "y", axes=[0]),
    ]
    shape = (columns, depth) if transposed else (depth, columns)
    weights = _weights(w=shape, b=(columns,))
    return make_model(nodes, {"x": (rows, depth)}, {"y": (1, columns)}, weights)


def _linear() -> onnx.ModelProto:
    """The last layer of a classifier, whose kernel by TVM's rules does not compile."""
    nodes = [
        node("GlobalAveragePool", "x", "pooled"),
        node("Flatten", "pooled", "flat"),
        node("Gemm", "flat w b", "y", transB=1),
    ]
    weights = _weights(w=(1000, 512), b=(1000,))
    return make_model(nodes, {"x": (1, 512, 7, 7)}, {"y": (1, 1000)}, weights)


def _conv(
    channels: int, filters: int, size: int, side: int, **attributes: object
) -> onnx.ModelProto:
    nodes = [node("Conv", "x w b", "c", **attributes), node("Relu", "c", "y")]
    groups = int(str(attributes.get("group", 1)))
    weights = _weights(w=(filters, channels // groups, side, side), b=(filters,))
    result = (1, filters, None, None)
    return make_model(nodes, {"x": (1, channels, size, size)}, {"y": result}, weights)


def _unary(operator: str, shape: Dims, **attributes: object) -> onnx.ModelProto:
    result = (None,) * len(shape)
    return make_model([node(operator, "x", "y", **attributes)], {"x": shape}, {"y": result})


def _softmax_inner() -> onnx.ModelProto:
    return _unary("Softmax", (2, 33, 9, 5), axis=1)


def _layer_norm() -> onnx.ModelProto:
    nodes = [node("LayerNormalization", "x scale bias", "y", axis=-1)]
    weights = {"scale": random(300, seed=1), "bias": random(300, seed=2)}
    return make_model(nodes, {"x": (4, 50, 300)}, {"y": (4, 50, 300)}, weights)


def _reduction() -> onnx.ModelProto:
    nodes = [
        node("ReduceMean", "x", "rows", axes=[1], keepdims=0),
        node("ReduceMax", "x", "columns", axes=[0], keepdims=0),
        node("ReduceSum", "x", "all", keepdims=0),
        node("ReduceProd", "small", "product", axes=[0], keepdims=0),
        node("ArgMax", "x", "place", axis=1, keepdims=0),
        node("Cast", "place", "place_f", to=1),
    ]
    inputs: dict[str, Dims] = {"x": (257, 1000), "small": (3, 7)}
    outputs: dict[str, Dims] = {
        "rows": (257,), "columns": (1000,), "all": (), "product": (7,), "place_f": (257,)
    }  # fmt: skip
    return make_model(nodes, inputs, outputs)


def _gather() -> onnx.ModelProto:
    nodes = [
        node("Gather", "x places", "g", axis=1),
        node("Transpose", "g", "t", perm=[2, 0, 1]),
        node("Concat", "t t", "c", axis=2),
        node("Pad", "c pads", "y"),
    ]
    weights = {
        "places": np.array([3, 0, 7, 7, 1]),
        "pads": np.array([1, 0, 2, 0, 3, 0]),
    }
    return make_model(nodes, {"x": (6, 9, 11)}, {"y": (None,) * 3}, weights)


def _attention() -> onnx.ModelProto:
    """Four heads of 16 over 40 tokens, with the projections around it."""
    nodes = [
        *(node("MatMul", f"x w{i}", f"p{i}") for i in "qkv"),
        *(node("Reshape", f"p{i} split", f"s{i}") for i in "qkv"),
        node("Transpose", "sq", "q", perm=[0, 2, 1, 3]),
        node("Transpose", "sk", "k", perm=[0, 2, 3, 1]),
        node("Transpose", "sv", "v", perm=[0, 2, 1, 3]),
        node("MatMul", "q k", "scores"),
        node("Mul", "scores scale", "scaled"),
        node("Softmax", "scaled", "weights", axis=-1),
        node("MatMul", "weights v", "mixed"),
        node("Transpose", "mixed", "together", perm=[0, 2, 1, 3]),
        node("Reshape", "together join", "joined"),
        node("MatMul", "joined wo", "y"),
    ]
    weights = _weights(wq=(64, 64), wk=(64, 64), wv=(64, 64), wo=(64, 64))
    weights |= {"split": np.array([2, 40, 4, 16]), "join": np.array([2, 40, 64])}
    weights["scale"] = np.array(0.25, "float32")
    return make_model(nodes, {"x": (2, 40, 64)}, {"y": (2, 40, 64)}, weights)


def _cumsum(exclusive: int, reverse: int) -> onnx.ModelProto:
    nodes = [node("CumSum", "x axis", "y", exclusive=exclusive, reverse=reverse)]
    return make_model(nodes, {"x": (3, 1000)}, {"y": (3, 1000)}, {"axis": np.array(1)})


def _topk() -> onnx.ModelProto:
    nodes = [node("TopK", "x k", "values places", axis=1), node("Cast", "places", "p", to=1)]
    weights = {"k": np.array([7])}
    return make_model(nodes, {"x": (5, 300)}, {"values": (5, 7), "p": (5, 7)}, weights)


def _lstm() -> onnx.ModelProto:
    nodes = [node("LSTM", "x w r b", "y h c", hidden_size=32)]
    weights = _weights(w=(1, 128, 16), r=(1, 128, 32), b=(1, 256))
    outputs: dict[str, Dims] = {"y": (12, 1, 3, 32), "h": (1, 3, 32), "c": (1, 3, 32)}
    return make_model(nodes, {"x": (12, 3, 16)}, outputs, weights)


def _functions() -> onnx.ModelProto:
    """Functions that fast approximations get wrong far from zero."""
    names = ["Sin", "Cos", "Exp", "Tanh", "Erf", "Sigmoid", "Softplus", "Atan"]
    nodes = [node("Mul", "x far", "z"), node("Abs", "z", "a"), node("Add", "a one", "positive")]
    nodes += [node(name, "x" if name == "Exp" else "z", name) for name in names]
    nodes += [node("Log", "positive", "Log"), node("Sqrt", "positive", "Sqrt")]
    outputs: dict[str, Dims] = dict.fromkeys([*names, "Log", "Sqrt"], (40, 50))
    weights = {"far": np.array(100, "float32"), "one": np.array(1e-3, "float32")}
    return make_model(nodes, {"x": (40, 50)}, outputs, weights)


def _resize() -> onnx.ModelProto:
    nodes = [
        node("Resize", "x - scales", "r", mode="linear"),
        node("MaxPool", "r", "m", kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1]),
        node("AveragePool", "m", "y", kernel_shape=[2, 2]),
    ]
    weights = {"scales": np.array([1, 1, 2, 2], "float32")}
    return make_model(nodes, {"x": (1, 8, 20, 20)}, {"y": (None,) * 4}, weights)


def _norms() -> onnx.ModelProto:
    nodes = [
        node("InstanceNormalization", "x scale bias", "i"),
        node("LRN", "i", "l", size=5),
        node("LpNormalization", "l", "y", axis=1),
    ]
    weights = {"scale": random(6, seed=1), "bias": random(6, seed=2)}
    return make_model(nodes, {"x": (2, 6, 15, 15)}, {"y": (2, 6, 15, 15)}, weights)


SMALL: dict[str, Maker] = {
    "add": lambda: _unary("Relu", (3, 1001)),
    "argmax-reductions": _reduction,
    "attention": _attention,
    "batched-matmul": lambda: _matmul(33, 70, 45),
    "branches": branched_model,
    "conv-1x1": lambda: _conv(64, 128, 28, 1),
    "conv-3x3": lambda: _conv(16, 32, 30, 3, pads=[1, 1, 1, 1]),
    "conv-3x3-strided": lambda: _conv(3, 64, 57, 3, strides=[2, 2]),
    "conv-depthwise": lambda: _conv(32, 32, 40, 3, pads=[1, 1, 1, 1], group=32),
    "conv-grouped": lambda: _conv(24, 48, 19, 3, group=3, dilations=[2, 2]),
    "cumsum": lambda: _cumsum(0, 0),
    "cumsum-exclusive-reverse": lambda: _cumsum(1, 1),
    "functions": _functions,
    "gather": _gather,
    "layer-norm": _layer_norm,
    "linear": _linear,
    "lstm": _lstm,
    "matmul": lambda: _matmul(128, 256, 512),
    "matmul-row": lambda: _matmul(1, 2048, 1000),
    "norms": _norms,
    "resize-pool": _resize,
    "softmax": lambda: _unary("Softmax", (64, 1000), axis=-1),
    "softmax-inner": _softmax_inner,
    "tiles-16": lambda: _tiles(50, 33, 70),
    "tiles-32": lambda: _tiles(301, 40, 500),
    "tiles-64": lambda: _tiles(1001, 70, 1100),
    "tiles-128": lambda: _tiles(1401, 24, 1500),
    "tiles-convolution": lambda: _conv(24, 70, 56, 3, pads=[1, 1, 1, 1]),
    "tiles-transposed": lambda: _tiles(301, 100, 520, transposed=1),
    "topk": _topk,
}
"""Small models by name."""


def coarse(model: onnx.ModelProto, levels: int = 4) -> onnx.ModelProto:
    """The model with every large weight rounded to few values of its spread."""
    for tensor in model.graph.initializer:
        array = numpy_helper.to_array(tensor)
        if array.dtype == np.float32 and array.size > 1000:
            step = np.float32(array.std() * 3 / levels)
            rounded = np.clip(np.round(array / step), -levels, levels) * step
            tensor.CopyFrom(numpy_helper.from_array(rounded.astype("float32"), tensor.name))
    return model


def coarse_light_model(name: str) -> onnx.ModelProto:
    """A classic topology with seeded coarse weights."""
    from tools.models import light_model

    return coarse(onnx.load(Path(light_model(name))))
