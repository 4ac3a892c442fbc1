"""Attention of some sizes as a model, and what it is."""

from __future__ import annotations

import dataclasses

import numpy as np

from tests.models import make_model, node, random


@dataclasses.dataclass(frozen=True)
class Case:
    """Attention of some sizes; a mask of the given shape is added to the scores."""

    batch: int
    heads: int
    queries: int
    keys: int
    size: int
    values: int
    mask: tuple[int, ...] | None = None

    def feeds(self):
        shapes = {"q": (self.queries, self.size), "k": (self.keys, self.size)}
        shapes["v"] = (self.keys, self.values)
        feeds = {
            name: random(self.batch, length, self.heads, width, seed=ord(name))
            for name, (length, width) in shapes.items()
        }
        if self.mask is not None:
            added = random(*self.mask, seed=4)
            feeds["mask"] = np.where(added < -0.4, np.float32(-np.inf), added)
        return feeds

    def model(self, dtype, *, extra=False):
        masked = self.mask is not None
        nodes = [
            node("Transpose", "q", "qt", perm=[0, 2, 1, 3]),
            node("Transpose", "k", "kt", perm=[0, 2, 3, 1]),
            node("Transpose", "v", "vt", perm=[0, 2, 1, 3]),
            node("MatMul", "qt kt", "products"),
            node("Mul", "products factor", "scores"),
            *([node("Add", "scores mask", "masked")] if masked else []),
            node("Softmax", "masked" if masked else "scores", "weights", axis=-1),
            node("MatMul", "weights vt", "sums"),
            node("Transpose", "sums", "y", perm=[0, 2, 1, 3]),
        ]
        results = {"y": (self.batch, self.queries, self.heads, self.values)}
        if extra:
            results["weights"] = (self.batch, self.heads, self.queries, self.keys)
        inputs = {name: array.shape for name, array in self.feeds().items()}
        weights = {"factor": np.array(self.size**-0.5, dtype)}
        return make_model(nodes, inputs, results, weights, dtype=dtype)

    def expected(self, feeds):
        q, k, v = (feeds[name].astype("d").transpose(0, 2, 1, 3) for name in "qkv")
        scores = q @ k.swapaxes(-1, -2) * self.size**-0.5 + feeds.get("mask", np.float64(0))
        with np.errstate(invalid="ignore"):
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            return (weights / weights.sum(-1, keepdims=True) @ v).transpose(0, 2, 1, 3)
