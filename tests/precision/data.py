"""A small network and samples for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
from hybridc.targets.protocol import Device

from tests.models import make_model, node, random

Array = np.ndarray[Any, Any]

SHAPE = (1, 3, 8, 8)
DEVICE = Device("llvm", "llvm", "x86-64-v3")


def network() -> onnx.ModelProto:
    """Two convolutions with a residual, a mean, and a linear layer."""
    nodes = [
        node("Conv", "x a.w a.b", "a.c", "a", pads=[1, 1, 1, 1]),
        node("Relu", "a.c", "a.y", "a.relu"),
        node("Conv", "a.y b.w b.b", "b.c", "b", pads=[1, 1, 1, 1]),
        node("Add", "b.c a.y", "s", "join"),
        node("GlobalAveragePool", "s", "p", "pool"),
        node("Flatten", "p", "f", "flatten"),
        node("Gemm", "f c.w c.b", "y", "c"),
    ]
    weights = {
        "a.w": random(16, 3, 3, 3, seed=1) * np.float32(0.3),
        "a.b": random(16, seed=2),
        "b.w": random(16, 16, 3, 3, seed=3) * np.float32(0.1),
        "b.b": random(16, seed=4),
        "c.w": random(16, 10, seed=5),
        "c.b": random(10, seed=6),
    }
    return make_model(nodes, {"x": SHAPE}, {"y": (1, 10)}, weights)


def samples(count: int = 10) -> list[Array]:
    return [random(*SHAPE, seed=seed) for seed in range(count)]


def write_samples(folder: Path, arrays: list[Array], name: str = "x") -> Path:
    folder.mkdir()
    for index, array in enumerate(arrays):
        np.savez(folder / f"{index:03d}.npz", **{name: array})
    return folder
