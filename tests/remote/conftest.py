"""A hybrid bundle, compiled once: a private picture, of which the server may see a small map."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import hybridc
from tests.models import make_model, node, save
from tests.support import hybridc as run_hybridc

LINK = "server=200mbit,1ms"
SERVER = ("--remote", "server=llvm", "--link", LINK)


def hybrid_model() -> onnx.ModelProto:
    """A light stem with a small output, and a heavy head."""
    rng = np.random.default_rng(0)

    def weight(*shape: int) -> np.ndarray:
        return (rng.standard_normal(shape) / np.sqrt(np.prod(shape[1:]))).astype(np.float32)

    weights = {
        "w1": weight(8, 3, 3, 3),
        "w2": weight(512, 8, 1, 1),
        "w3": weight(1024, 512, 1, 1),
        "w4": weight(10, 1024, 1, 1),
    }
    nodes = [
        node("Conv", "x w1", "a", "stem", strides=[4, 4], pads=[1, 1, 1, 1]),
        node("Relu", "a", "map", "stem.relu"),
        node("Conv", "map w2", "b", "wide"),
        node("Relu", "b", "c", "wide.relu"),
        node("Conv", "c w3", "d", "wider"),
        node("Relu", "d", "e", "wider.relu"),
        node("GlobalAveragePool", "e", "f", "pool"),
        node("Conv", "f w4", "y", "head"),
    ]
    return make_model(nodes, {"x": ("batch", 3, 96, 96)}, {"y": ("batch", 10, 1, 1)}, weights)


@dataclass(frozen=True)
class Hybrid:
    """A compiled model: both ends, an input, and what the model gives for it."""

    bundle: Path
    repository: Path
    x: np.ndarray
    y: np.ndarray

    def is_right(self, results: dict[str, np.ndarray]) -> bool:
        return bool(np.allclose(results["y"], self.y, rtol=1e-4, atol=1e-5))


def compile_hybrid(folder: Path, *options: str, batch: str = "1") -> Hybrid:
    model = save(hybrid_model(), folder / "model.onnx")
    bundle = folder / "edge.hyb"
    outcome = run_hybridc("compile", model, "-o", bundle, "--shape", f"batch={batch}", *options)
    assert outcome.code == 0, outcome.stderr
    x = np.random.default_rng(7).standard_normal((1, 3, 96, 96)).astype(np.float32)
    with hybridc.load(bundle) as local:
        return Hybrid(bundle, folder / "edge-repository", x, local(x=x)["y"])


@pytest.fixture(scope="session")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Hybrid:
    folder = tmp_path_factory.mktemp("hybrid")
    return compile_hybrid(folder, *SERVER, "--private", "x", "--release", "map")


@pytest.fixture(scope="session")
def tensors(hybrid: Hybrid, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The private input, what is computed from it before the release, and what is released.

    They are computed by the same code, so that they are equal bit by bit.
    """
    folder = tmp_path_factory.mktemp("stem")
    model = hybrid_model()
    del model.graph.node[2:], model.graph.output[:]
    for name in ("a", "map"):
        shape = ("batch", 8, 24, 24)
        model.graph.output.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, shape))
    save(model, folder / "stem.onnx")
    place = ("-o", folder / "stem.hyb", "--shape", "batch=1")
    assert run_hybridc("compile", folder / "stem.onnx", *place).code == 0
    with hybridc.load(folder / "stem.hyb") as stem:
        found = {"x": hybrid.x, **stem(x=hybrid.x)}
    return {name: array.tobytes() for name, array in found.items()}


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An authority with a certificate for the server and one for the client, and a stranger."""
    from tests.remote.certificates import make_certificates

    folder = tmp_path_factory.mktemp("certificates")
    make_certificates(folder)
    return folder
