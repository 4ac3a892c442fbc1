"""Results that are padded or cut off at once: whatever is fused with its reader has other elements.

The reader of an anchor's result may be computed in the anchor's loops only where both have the same
elements. A pad behind the result reads it at the same indices and has more of them, a slice from
the start has fewer.
"""

from __future__ import annotations

import numpy as np
import pytest

from hybridc import onnx_backend
from tests.models import make_model, node, random, run_reference
from tests.support import assert_close
from tests.targets.test_opencl import needs_device

ANCHORS = {
    "packed product": (node("MatMul", "x w", "t"), (6, 40), {"w": random(40, 32)}, (6, 32)),
    "product": (node("MatMul", "w x", "t"), (40, 32), {"w": random(6, 40)}, (6, 32)),
    "batched product": (node("MatMul", "x w", "t"), (3, 6, 9), {"w": random(3, 9, 16)}, (3, 6, 16)),
    "row": (node("MatMul", "x w", "t"), (1, 40), {"w": random(40, 32)}, (1, 32)),
    "convolution": (
        node("Conv", "x w", "t", pads=[1] * 4),
        (2, 16, 9, 9),
        {"w": random(32, 16, 3, 3)},
        (2, 32, 9, 9),
    ),
    "few filters": (
        node("Conv", "x w", "t", pads=[1] * 4),
        (2, 3, 9, 9),
        {"w": random(5, 3, 3, 3)},
        (2, 5, 9, 9),
    ),
    "pointwise": (node("Conv", "x w", "t"), (1, 3, 9, 9), {"w": random(5, 3, 1, 1)}, (1, 5, 9, 9)),
    "depthwise": (
        node("Conv", "x w", "t", group=16),
        (2, 16, 9, 9),
        {"w": random(16, 1, 3, 3)},
        (2, 16, 7, 7),
    ),
    "one axis": (node("Conv", "x w", "t"), (2, 16, 9), {"w": random(32, 16, 3)}, (2, 32, 7)),
    "pooling": (node("MaxPool", "x", "t", kernel_shape=[2, 2]), (2, 16, 9, 9), {}, (2, 16, 8, 8)),
    "average": (
        node("AveragePool", "x", "t", kernel_shape=[2, 2]),
        (2, 16, 9, 9),
        {},
        (2, 16, 8, 8),
    ),
    "sum": (
        node("ReduceSum", "x axis", "t", keepdims=0),
        (6, 40, 32),
        {"axis": np.array([1])},
        (6, 32),
    ),
    "softmax": (node("Softmax", "x", "t"), (6, 40), {}, (6, 40)),
}
READERS = (
    "pad behind",
    "pad in front",
    "pad the first axis",
    "shift",
    "cut the last",
    "cut the first",
    "append",
    "repeat",
    "gather",
)


def reader(kind, shape):
    """Nodes that change ``t`` of this shape to ``y``, their constants, and the shape of ``y``."""
    rank, first = len(shape), shape[0]
    if kind.startswith("pad") or kind == "shift":
        return padded(kind, shape)
    if kind.startswith("cut"):
        axis = rank - 1 if kind == "cut the last" else 0
        cut = {"from": np.array([0]), "to": np.array([-1]), "of": np.array([axis])}
        sizes = [size - (i == axis) for i, size in enumerate(shape)]
        return node("Slice", "t from to of", "y"), cut, sizes
    if kind == "append":
        more = {"more": random(2, *shape[1:], seed=2)}
        return node("Concat", "t more", "y", axis=0), more, [first + 2, *shape[1:]]
    if kind == "repeat":
        times = {"times": np.array([2] + [1] * (rank - 1))}
        return node("Tile", "t times", "y"), times, [2 * first, *shape[1:]]
    chosen = {"chosen": np.array([first - 1, 0, 0])}
    return node("Gather", "t chosen", "y", axis=0), chosen, [3, *shape[1:]]


def padded(kind, shape):
    """The same for a Pad."""
    none = [0] * (len(shape) - 1)
    before, behind = {
        "pad behind": ([0, *none], [*none[1:], 3, 2]),
        "pad in front": ([*none, 2], [0, *none]),
        "pad the first axis": ([0, *none], [1, *none]),
        "shift": ([*none, 1], [*none, -1]),
    }[kind]
    sizes = [sum(sizes) for sizes in zip(before, shape, behind, strict=True)]
    return node("Pad", "t pads", "y"), {"pads": np.array(before + behind)}, sizes


def check(name, kind, activation, target):
    anchor, shape, weights, result = ANCHORS[name]
    last, constants, sizes = reader(kind, result)
    if 0 in sizes:
        pytest.skip("nothing is left")
    if activation:
        last.input[0] = "u"
    nodes = [anchor, *([node(activation, "t", "u")] if activation else []), last]
    model = make_model(nodes, {"x": shape}, {"y": sizes}, {**weights, **constants})
    feeds = {"x": random(*shape, seed=1)}
    expected = run_reference(model, feeds)["y"]
    actual = onnx_backend.run_model(model, [feeds["x"]], target=target, fallback=False)[0]
    assert_close({"y": actual}, {"y": expected})


@pytest.mark.parametrize("kind", READERS)
@pytest.mark.parametrize("name", ANCHORS)
def test_cpu(name, kind):
    check(name, kind, None, "llvm:host")


@pytest.mark.parametrize("kind", READERS)
@pytest.mark.parametrize("name", ["packed product", "convolution", "few filters", "pooling"])
def test_cpu_behind_an_activation(name, kind):
    check(name, kind, "Relu", "llvm:host")


@needs_device
@pytest.mark.parametrize("kind", READERS)
@pytest.mark.parametrize("name", ["packed product", "batched product", "convolution", "one axis"])
def test_gpu_schedules(name, kind):
    check(name, kind, None, "opencl")


@pytest.mark.parametrize("pads", [[0, 0, 0, 1], [0, 1, 0, 0], [1, 2, 0, 0], [0, 1, 0, -1]])
@pytest.mark.parametrize("operator", ["Exp", "Tanh", "Erf", "Sigmoid"])
def test_functions_of_what_is_padded(operator, pads):
    """The padded value is used twice, by the function and by what follows it."""
    nodes = [node("Pad", "x pads", "t"), node(operator, "t", "f"), node("Mul", "t f", "y")]
    sizes = [3 + pads[0] + pads[2], 33 + pads[1] + pads[3]]
    model = make_model(nodes, {"x": (3, 33)}, {"y": sizes}, {"pads": np.array(pads)})
    feeds = {"x": random(3, 33)}
    actual = onnx_backend.run_model(model, [feeds["x"]], fallback=False)[0]
    assert_close({"y": actual}, run_reference(model, feeds))
