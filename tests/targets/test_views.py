"""Reshapes between kernels compute nothing, also where sizes are known only at run time."""

from __future__ import annotations

import numpy as np
import pytest

tvm = pytest.importorskip("tvm")

from hybridc.targets import relax_pipeline as pipeline  # noqa: E402
from tvm import tirx  # noqa: E402

import hybridc  # noqa: E402
from tests.models import make_model, node, run_reference  # noqa: E402
from tests.support import compile_to  # noqa: E402
from tests.targets.test_opencl import needs_device  # noqa: E402


def reshaped():
    """Reshapes of sizes that three halvings with odd paddings leave."""
    halving = {"kernel_shape": [3, 3], "strides": [2, 2]}
    nodes = [
        node("MaxPool", "x", "a", pads=[0, 0, 1, 1], **halving),
        node("AveragePool", "a", "b", pads=[1, 1, 0, 0], **halving),
        node("MaxPool", "b", "c", pads=[0, 1, 1, 0], **halving),
        node("Softmax", "c", "s"),
        node("Unsqueeze", "s front", "u"),
        node("Softmax", "u", "v", axis=2),
        node("Reshape", "v flat", "r"),
        node("Softmax", "r", "y"),
    ]
    weights = {"front": np.array([0]), "flat": np.array([0, -1, 6])}
    return make_model(nodes, {"x": ("n", 6, "h", "w")}, {"y": ("a", "b", "c")}, weights)


@pytest.fixture
def graphs(monkeypatch):
    """The finalized modules of all that is built."""
    found = []
    finalize = pipeline.finalize

    def kept(module, *more):
        found.append(finalize(module, *more))
        return found[-1]

    monkeypatch.setattr(pipeline, "finalize", kept)
    return found


def test_reshapes_of_sizes_at_run_time_are_views(tmp_path, graphs):
    model = reshaped()
    shapes = ("n=1..3", "h=20..90", "w=20..90")
    compile_to(tmp_path / "b", model, shapes=shapes, cache=None)
    (graph,) = graphs
    kernels = [f for f in graph.functions.values() if isinstance(f, tirx.PrimFunc)]
    assert kernels
    assert not any("T_reshape" in kernel.script() for kernel in kernels)
    assert graph["main"].script().count("vm.builtin.reshape") == 2
    with hybridc.load(tmp_path / "b") as bundle:
        for n, h, w in ((1, 20, 90), (3, 41, 37), (2, 64, 88)):
            x = np.random.default_rng(h).standard_normal((n, 6, h, w)).astype(np.float32)
            expected = run_reference(model, {"x": x})["y"]
            np.testing.assert_allclose(bundle.run({"x": x})["y"], expected, atol=1e-5)


def test_a_result_that_is_a_reshape_has_memory_of_its_own(tmp_path):
    nodes = [node("Reshape", "x s", "y"), node("Relu", "x", "r"), node("Reshape", "r s", "z")]
    outputs = {"y": ("m", 4), "z": ("k", 4)}
    model = make_model(nodes, {"x": ("n", 2, 4)}, outputs, {"s": np.array([-1, 4])})
    compile_to(tmp_path / "b", model, shapes=("n=1..9",))
    with hybridc.load(tmp_path / "b") as bundle:
        x = np.arange(-12, 12, dtype=np.float32).reshape(3, 2, 4)
        first = bundle.run({"x": x})
        kept = {name: array.copy() for name, array in first.items()}
        x += 100
        bundle.run({"x": x})
        for name, array in first.items():
            np.testing.assert_array_equal(array, kept[name])


@pytest.mark.parametrize("shapes", [(), ("n=1..6",)], ids=["fixed", "at run time"])
@pytest.mark.parametrize("target", ["llvm", pytest.param("opencl", marks=needs_device)])
@pytest.mark.parametrize("before", ["Identity", "Neg", "Transpose"])
def test_what_is_fused_with_a_reshape_is_computed(tmp_path, before, target, shapes):
    """A schedule makes one block of both, which has the reshape's name."""
    nodes = [
        node("Softmax", "x", "s"),
        node(before, "s", "t"),
        node("Reshape", "t flat", "r"),
        node("Softmax", "r", "y"),
    ]
    dims = ("n" if shapes else 6, 4, 5)
    model = make_model(nodes, {"x": dims}, {"y": ("a", "b")}, {"flat": np.array([-1, 4])})
    compile_to(tmp_path / "b", model, shapes=shapes, targets=(target,))
    x = np.random.default_rng(1).standard_normal((6, 4, 5)).astype(np.float32)
    with hybridc.load(tmp_path / "b") as bundle:
        expected = run_reference(model, {"x": x})["y"]
        np.testing.assert_allclose(bundle.run({"x": x})["y"], expected, atol=1e-6)
