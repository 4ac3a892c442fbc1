"""Random small ONNX graphs over the operator table, as a hypothesis strategy.

A graph grows node by node. Each kind of node picks operands among the values so far and adds its
results. A value is *exact* while it was only moved about: what jumps at a threshold (ArgMax, Cast
to integers, comparisons) reads exact values only, since elsewhere a rounding error would count as
a wrong result.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

OPSET = 17
MAX_ELEMENTS = 4096


@dataclass(frozen=True)
class Item:
    """A value of the graph under construction."""

    name: str
    shape: tuple[int, ...]
    exact: bool


@dataclass
class Graph:
    """A graph under construction; every value is a float tensor."""

    draw: Callable[..., Any]
    random: np.random.RandomState
    items: list[Item] = field(default_factory=list)
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    weights: list[onnx.TensorProto] = field(default_factory=list)

    def pick(self, fits: Callable[[Item], bool] = lambda item: True) -> Item | None:
        fitting = [item for item in self.items if fits(item)]
        return self.draw(st.sampled_from(fitting)) if fitting else None

    def constant(self, array: Any) -> str:
        name = f"w{len(self.weights)}"
        self.weights.append(numpy_helper.from_array(np.asarray(array), name))
        return name

    def weight(self, *shape: int) -> str:
        return self.constant((self.random.standard_normal(shape) * 0.5).astype(np.float32))

    def emit(
        self, operator: str, inputs: list[str], shape: tuple[int, ...], exact: bool, **options: Any
    ) -> None:
        if math.prod(shape) > MAX_ELEMENTS:
            return
        name = f"v{len(self.nodes)}"
        self.nodes.append(helper.make_node(operator, inputs, [name], **options))
        self.items.append(Item(name, shape, exact))


def unary(graph: Graph) -> None:
    smooth = (
        "Relu Sigmoid Tanh Neg Abs LeakyRelu Elu HardSigmoid Softplus Erf Exp HardSwish".split()
    )
    item = graph.pick()
    operator = graph.draw(st.sampled_from(smooth))
    if operator == "Exp":  # squashed first, so that chains of it do not overflow
        graph.emit("Tanh", [item.name], item.shape, False)
        item = graph.items[-1]
    graph.emit(operator, [item.name], item.shape, item.exact and operator in ("Neg", "Abs", "Relu"))


def binary(graph: Graph) -> None:
    left = graph.pick()
    right = graph.pick(lambda item: _broadcast(left.shape, item.shape) is not None)
    operator = graph.draw(st.sampled_from(["Add", "Sub", "Mul", "Max", "Min"]))
    shape = _broadcast(left.shape, right.shape)
    graph.emit(operator, [left.name, right.name], shape, False)


def _broadcast(left: tuple[int, ...], right: tuple[int, ...]) -> tuple[int, ...] | None:
    try:
        return np.broadcast_shapes(left, right)
    except ValueError:
        return None


def with_constant(graph: Graph) -> None:
    item = graph.pick(lambda item: item.shape)
    dims = [graph.draw(st.sampled_from([1, dim])) for dim in item.shape]
    operator = graph.draw(st.sampled_from(["Add", "Mul", "Sub", "PRelu"]))
    graph.emit(operator, [item.name, graph.weight(*dims)], item.shape, False)


def compare_and_choose(graph: Graph) -> None:
    item = graph.pick(lambda item: item.exact)
    other = item and graph.pick(lambda other: other.shape == item.shape)
    if item is None or other is None:
        return
    condition = f"c{len(graph.nodes)}"
    operator = graph.draw(st.sampled_from(["Greater", "Less", "GreaterOrEqual"]))
    graph.nodes.append(helper.make_node(operator, [item.name, graph.weight()], [condition]))
    graph.emit("Where", [condition, item.name, other.name], item.shape, False)


def transpose(graph: Graph) -> None:
    item = graph.pick(lambda item: bool(item.shape))
    order = graph.draw(st.permutations(range(len(item.shape))))
    shape = tuple(item.shape[axis] for axis in order)
    graph.emit("Transpose", [item.name], shape, item.exact, perm=order)


def reshape(graph: Graph) -> None:
    item = graph.pick()
    size = math.prod(item.shape)
    first = graph.draw(st.sampled_from([d for d in range(1, size + 1) if size % d == 0] or [1]))
    target = [first, -1] if graph.draw(st.booleans()) and size else [first, size // first]
    graph.emit(
        "Reshape", [item.name, graph.constant(np.array(target))], (first, size // first), item.exact
    )


def slice_(graph: Graph) -> None:
    item = graph.pick(lambda item: item.shape)
    axis = graph.draw(st.integers(-len(item.shape), len(item.shape) - 1))
    dim = item.shape[axis]
    start = graph.draw(st.integers(-dim - 1, dim))
    step = graph.draw(st.sampled_from([-2, -1, 1, 2]))
    stop = graph.draw(st.sampled_from([-(2**40), -dim, -1, 0, dim, 2**40]))
    count = len(range(*slice(start, stop, step).indices(dim)))
    if count == 0:
        return
    bounds = [graph.constant(np.array([value])) for value in (start, stop, axis, step)]
    shape = list(item.shape)
    shape[axis] = count
    graph.emit("Slice", [item.name, *bounds], tuple(shape), item.exact)


def concat(graph: Graph) -> None:
    item = graph.pick(lambda item: item.shape)
    other = graph.pick(lambda other: other.shape == item.shape)
    axis = graph.draw(st.integers(-len(item.shape), len(item.shape) - 1))
    shape = list(item.shape)
    shape[axis] *= 2
    exact = item.exact and other.exact
    graph.emit("Concat", [item.name, other.name], tuple(shape), exact, axis=axis)


def gather(graph: Graph) -> None:
    item = graph.pick(lambda item: item.shape)
    axis = graph.draw(st.integers(0, len(item.shape) - 1))
    dim = item.shape[axis]
    indices = graph.draw(st.lists(st.integers(-dim, dim - 1), min_size=1, max_size=3))
    shape = (*item.shape[:axis], len(indices), *item.shape[axis + 1 :])
    graph.emit(
        "Gather", [item.name, graph.constant(np.array(indices))], shape, item.exact, axis=axis
    )


def pad(graph: Graph) -> None:
    item = graph.pick(lambda item: item.shape)
    rank = len(item.shape)
    amounts = graph.draw(st.lists(st.integers(0, 2), min_size=2 * rank, max_size=2 * rank))
    shape = tuple(dim + amounts[i] + amounts[i + rank] for i, dim in enumerate(item.shape))
    graph.emit("Pad", [item.name, graph.constant(np.array(amounts))], shape, item.exact)


def reduce(graph: Graph) -> None:
    item = graph.pick(lambda item: item.shape)
    rank = len(item.shape)
    axes = sorted(graph.draw(st.sets(st.integers(0, rank - 1), min_size=1)))
    keep = graph.draw(st.booleans())
    operator = graph.draw(st.sampled_from(["ReduceMean", "ReduceMax", "ReduceMin", "ReduceL2"]))
    dims = [1 if i in axes else dim for i, dim in enumerate(item.shape) if keep or i not in axes]
    graph.emit(operator, [item.name], tuple(dims), False, axes=axes, keepdims=int(keep))


def normalize(graph: Graph) -> None:
    item = graph.pick(lambda item: item.shape)
    axis = graph.draw(st.integers(-len(item.shape), len(item.shape) - 1))
    operator = graph.draw(st.sampled_from(["Softmax", "LogSoftmax"]))
    graph.emit(operator, [item.name], item.shape, False, axis=axis)


def layer_normalize(graph: Graph) -> None:
    item = graph.pick(lambda item: bool(item.shape) and item.shape[-1] > 1)
    if item is not None:
        inputs = [item.name, graph.weight(item.shape[-1]), graph.weight(item.shape[-1])]
        graph.emit("LayerNormalization", inputs, item.shape, False, epsilon=0.1)


def matmul(graph: Graph) -> None:
    item = graph.pick(lambda item: item.shape)
    columns = graph.draw(st.sampled_from([1, 3, 8, 17]))
    inputs = [item.name, graph.weight(item.shape[-1], columns)]
    graph.emit("MatMul", inputs, (*item.shape[:-1], columns), False)


def gemm(graph: Graph) -> None:
    item = graph.pick(lambda item: len(item.shape) == 2)
    if item is None:
        return
    columns = graph.draw(st.sampled_from([1, 5, 16]))
    turned = graph.draw(st.booleans())
    dims = (columns, item.shape[1]) if turned else (item.shape[1], columns)
    inputs = [item.name, graph.weight(*dims), graph.weight(columns)]
    graph.emit("Gemm", inputs, (item.shape[0], columns), False, transB=int(turned), alpha=0.5)


def convolve(graph: Graph) -> None:
    item = graph.pick(lambda item: len(item.shape) == 4)
    if item is None:
        return
    batch, channels, height, width = item.shape
    group = graph.draw(st.sampled_from([g for g in range(1, channels + 1) if channels % g == 0]))
    filters = group * graph.draw(st.integers(1, 4))
    kernel, stride = graph.draw(st.sampled_from([1, 2, 3])), graph.draw(st.sampled_from([1, 2]))
    begin, end = graph.draw(st.integers(0, kernel - 1)), graph.draw(st.integers(0, kernel - 1))
    sizes = [(dim + begin + end - kernel) // stride + 1 for dim in (height, width)]
    if min(height, width) + begin + end < kernel:
        return
    weights = [graph.weight(filters, channels // group, kernel, kernel), graph.weight(filters)]
    graph.emit(
        "Conv",
        [item.name, *weights[: graph.draw(st.integers(1, 2))]],
        (batch, filters, *sizes),
        False,
        group=group,
        strides=[stride, stride],
        pads=[begin, begin, end, end],
    )


def pool(graph: Graph) -> None:
    item = graph.pick(lambda item: len(item.shape) == 4 and min(item.shape[2:]) >= 2)
    if item is None:
        return
    operator = graph.draw(st.sampled_from(["MaxPool", "AveragePool"]))
    stride = graph.draw(st.sampled_from([1, 2]))
    sizes = [(dim - 2) // stride + 1 for dim in item.shape[2:]]
    exact = item.exact and operator == "MaxPool"
    options = {"kernel_shape": [2, 2], "strides": [stride, stride]}
    graph.emit(operator, [item.name], (*item.shape[:2], *sizes), exact, **options)


def resize(graph: Graph) -> None:
    item = graph.pick(lambda item: len(item.shape) == 4)
    if item is None:
        return
    sizes = [graph.draw(st.integers(1, 2 * dim)) for dim in item.shape[2:]]
    mode = graph.draw(st.sampled_from(["nearest", "linear"]))
    coordinates = graph.draw(st.sampled_from(["half_pixel", "asymmetric", "pytorch_half_pixel"]))
    shape = (*item.shape[:2], *sizes)
    inputs = [item.name, "", "", graph.constant(np.array(shape))]
    options = {"mode": mode, "coordinate_transformation_mode": coordinates}
    graph.emit("Resize", inputs, shape, item.exact and mode == "nearest", **options)


def expand(graph: Graph) -> None:
    item = graph.pick()
    shape = (graph.draw(st.integers(1, 3)), *item.shape)
    graph.emit("Expand", [item.name, graph.constant(np.array(shape))], shape, item.exact)


def clip(graph: Graph) -> None:
    item = graph.pick()
    bounds = [graph.constant(np.float32(-0.5)), graph.constant(np.float32(0.75))]
    graph.emit("Clip", [item.name, *bounds], item.shape, item.exact)


def round_trip(graph: Graph) -> None:
    item = graph.pick(lambda item: item.exact)
    if item is not None:
        whole = f"i{len(graph.nodes)}"
        graph.nodes.append(helper.make_node("Cast", [item.name], [whole], to=TensorProto.INT32))
        graph.emit("Cast", [whole], item.shape, True, to=TensorProto.FLOAT)


KINDS = (
    unary, binary, with_constant, compare_and_choose, transpose, reshape, slice_, concat, gather,
    pad, reduce, normalize, layer_normalize, matmul, gemm, convolve, pool, resize, expand, clip,
    round_trip,
)  # fmt: skip


NEED_AXES = (transpose, with_constant, slice_, concat, gather, pad, reduce, normalize, matmul)
"""Kinds that read a value of rank 1 or more."""


@st.composite
def graphs(
    draw: Callable[..., Any], kinds: tuple[Callable[[Graph], None], ...] = KINDS, most: int = 8
) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """A valid model of at most ``most`` nodes with up to three outputs, and inputs for it."""
    random = np.random.RandomState(draw(st.integers(0, 2**16)))
    graph = Graph(draw, random)
    for index in range(draw(st.integers(1, 2))):
        shape = draw(st.one_of(_shapes(4, 4), _shapes(0, 3)))
        graph.items.append(Item(f"x{index}", shape, True))
    inputs = list(graph.items)
    for kind in draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=most)):
        if kind not in NEED_AXES or any(item.shape for item in graph.items):
            kind(graph)
    outputs = [graph.items[-1]] if len(graph.items) > len(inputs) else inputs
    outputs += draw(st.lists(st.sampled_from(graph.items[len(inputs) :] or inputs), max_size=2))
    infos = [[_info(item) for item in dict.fromkeys(group)] for group in (inputs, outputs)]
    built = helper.make_graph(graph.nodes, "random", *infos, graph.weights)
    model = helper.make_model(built, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=8)
    feeds = {item.name: random.standard_normal(item.shape).astype(np.float32) for item in inputs}
    return model, feeds


def _shapes(low: int, high: int) -> st.SearchStrategy[tuple[int, ...]]:
    return st.lists(st.integers(1, 9), min_size=low, max_size=high).map(tuple)


def _info(item: Item) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(item.name, TensorProto.FLOAT, item.shape)
