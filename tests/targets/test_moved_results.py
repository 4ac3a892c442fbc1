"""Results that are padded or cut off at once: whatever is fused with its reader has other elements.

The reader of an anchor's result may be computed in the anchor's loops only where both have the same
elements. A pad behind the result reads it at the same indices and has more of them, a slice from
the start has fewer.
"""

from __future__ import annotations

import numpy as np
import pytest

from hybridc import onnx_backend
from hybridc.runtime.opencl import OpenclError, devices
from tests.models import make_model, node, random, run_reference
from tests.support import assert_close

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
)


def reader(kind, shape):
    """Nodes that change ``t`` of this shape to ``y``, their constants, and the shape of ``y``."""
    rank, none = len(shape), [0] * len(shape)
    if kind.startswith("cut"):
        axis = rank - 1 if kind == "cut the last" else 0
        cut = {"from": np.array([0]), "to": np.array([-1]), "of": np.array([axis])}
        sizes = [max(size - (i == axis), 0) for i, size in enumerate(shape)]
        return [node("Slice", "t from to of", "y")], cut, sizes
    pads = {
        "pad behind": none + [0] * (rank - 2) + [3, 2],
        "pad in front": [0] * (rank - 1) + [2] + none,
        "pad the first axis": none + [1] + [0] * (rank - 1),
        "shift": [0] * (rank - 1) + [1] + [0] * (rank - 1) + [-1],
    }[kind]
    sizes = [size + pads[i] + pads[rank + i] for i, size in enumerate(shape)]
    return [node("Pad", "t pads", "y")], {"pads": np.array(pads)}, sizes


def check(name, kind, activation, target):
    anchor, shape, weights, result = ANCHORS[name]
    nodes, constants, sizes = reader(kind, result)
    if 0 in sizes:
        pytest.skip("nothing is left")
    first = [anchor]
    if activation:
        first = [node(anchor.op_type, " ".join(anchor.input), "s"), node(activation, "s", "t")]
        first[0].attribute.extend(anchor.attribute)
    model = make_model([*first, *nodes], {"x": shape}, {"y": sizes}, {**weights, **constants})
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


def has_device():
    try:
        return bool(devices())
    except OpenclError:
        return False


@pytest.mark.skipif(not has_device(), reason="no OpenCL device on this machine")
@pytest.mark.parametrize("kind", READERS)
@pytest.mark.parametrize("name", ["packed product", "batched product", "convolution", "one axis"])
def test_gpu_schedules(name, kind):
    check(name, kind, None, "opencl")
