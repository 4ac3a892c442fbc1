"""Schedules for GPUs: what they compute, run on the CPU, and where barriers stand."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hybridc.targets.cuda.architectures import parse_gpu
from hybridc.targets.gpu.schedules import apply_rule, schedule_rows, tiles
from hybridc.targets.gpu.schedules.tile_choice import rank_tiles
from hypothesis import given
from hypothesis import strategies as st
from tvm import te, tirx
from tvm.te import create_prim_func

from hybridc.errors import UnsupportedError
from tests.gpu.emulation import cuda_source, divergent_barriers, lowered_model, run_serially
from tests.gpu.models import SMALL
from tests.models import make_model, node, random, run_reference
from tests.support import assert_close

LIMITS = parse_gpu("sm_90").limits


def feeds_of(model, seed=0):
    weights = {tensor.name for tensor in model.graph.initializer}
    feeds = {}
    for value in model.graph.input:
        if value.name not in weights:
            dims = [dim.dim_value for dim in value.type.tensor_type.shape.dim]
            feeds[value.name] = random(*dims, seed=seed)
    return feeds


@pytest.mark.parametrize("name", SMALL)
def test_schedules_compute_what_onnx_runtime_does(name):
    model = SMALL[name]()
    feeds = feeds_of(model)
    results = run_serially(model, feeds)
    for output, expected in run_reference(model, feeds).items():
        scale = max(float(np.abs(expected).max(initial=0)), 1e-30)
        assert results[output].shape == expected.shape
        assert np.abs(results[output] - expected).max(initial=0) <= 1e-4 * scale, output


@pytest.mark.parametrize("name", SMALL)
def test_every_thread_comes_by_every_barrier(name):
    source = cuda_source(SMALL[name]())
    assert "__global__" in source
    assert list(divergent_barriers(source)) == []


@pytest.mark.parametrize("name", [name for name in SMALL if name != "lstm"])
def test_a_thread_keeps_its_own_results_only(name):
    """Also where they lie apart: a box around them would hold those of other threads."""
    sizes = [
        int(size) for size in re.findall(r"local_ptr\w*\[(\d+)\];", cuda_source(SMALL[name]()))
    ]
    assert max(sizes, default=0) <= 64


@pytest.mark.parametrize(
    ("name", "side", "slices"),
    [
        *(("matmul", side, slices) for side in (16, 32, 64, 128) for slices in (1, 4)),
        ("tiles-convolution", 32, 2),
        ("tiles-transposed", 64, 1),
    ],
)
def test_tiles_of_every_size(monkeypatch, name, side, slices):
    model = SMALL[name]()
    monkeypatch.setattr(tiles, "rank_tiles", lambda *_shape: [(side, slices)])
    source = cuda_source(model)
    assert re.search(rf"shared_ptr\[{side * 16}\]", source)
    assert f"local_ptr[{(side // 16) ** 2}];" in source
    assert list(divergent_barriers(source)) == []
    feeds = feeds_of(model)
    results = run_serially(model, feeds)
    for output, expected in run_reference(model, feeds).items():
        assert_close({output: results[output]}, {output: expected}, 1e-5)


@pytest.mark.parametrize("side", [16, 64])
@pytest.mark.parametrize("shape", [(10, 40, 100), (100, 40, 10), (17, 20, 16), (8, 8, 8)])
def test_fewer_results_than_threads(monkeypatch, shape, side):
    """A tile that TVM cannot cut for them is passed over."""
    monkeypatch.setattr(tiles, "rank_tiles", lambda *_shape: [(side, 1), (16, 1), (64, 2)])
    rows, depth, columns = shape
    model = _product(rows, depth, columns)
    feeds = feeds_of(model)
    assert_close(run_serially(model, feeds), run_reference(model, feeds), 1e-5)


def _product(rows, depth, columns):
    nodes = [node("MatMul", "x w", "p"), node("Relu", "p", "y")]
    weights = {"w": random(depth, columns, seed=1)}
    return make_model(nodes, {"x": (rows, depth)}, {"y": (rows, columns)}, weights)


def test_the_next_step_is_fetched_before_this_one_is_multiplied(monkeypatch):
    monkeypatch.setattr(tiles, "rank_tiles", lambda *_shape: [(64, 1)])
    source = cuda_source(SMALL["tiles-64"]())
    _, first, step, *_ = source.split("__syncthreads();")
    assert "input_0_ptr[" in first
    assert "input_0_ptr[" not in step
    assert re.search(r"shared_ptr\[.*\* .*shared_ptr\[", step)


@given(st.integers(1, 4), st.integers(1, 5000), st.integers(1, 50000), st.integers(1, 9000))
def test_tiles_are_ranked_with_slices_that_have_work(batch, rows, columns, depth):
    ranked = rank_tiles(batch, rows, columns, depth)
    assert len(set(ranked)) == len(ranked)
    assert {tile for tile, _ in ranked} == {16, 32, 64, 128}
    assert all(slices == 1 or slices * 16 * 4 <= depth + 15 for _, slices in ranked)


def test_a_barrier_in_a_branch_is_found():
    source = "if (((int)threadIdx.x) < 3) {\n  for (;;) {\n    __syncthreads();\n  }\n}\n"
    assert list(divergent_barriers(source)) == ["if (((int)threadIdx.x) < 3) {"]
    assert list(divergent_barriers(source.replace("threadIdx", "blockIdx"))) == []


def test_a_long_softmax_shares_its_rows_among_threads():
    source = cuda_source(SMALL["softmax"]())
    assert source.count("__syncthreads()") >= 2
    assert "__shared__" in source


@pytest.mark.parametrize("name", ["cumsum", "cumsum-exclusive-reverse"])
def test_a_running_sum_does_not_scan_inside_a_warp(name):
    source = cuda_source(SMALL[name]())
    assert "totals" in source
    assert "before" in source


@pytest.mark.parametrize("size", [1, 5, 128, 129, 1000])
@pytest.mark.parametrize("exclusive", [0, 1])
def test_running_sums_of_any_length(size, exclusive):
    nodes = [node("CumSum", "x axis", "y", exclusive=exclusive)]
    model = make_model(nodes, {"x": (2, size, 3)}, {"y": (2, size, 3)}, {"axis": np.array(1)})
    feeds = feeds_of(model)
    expected = run_reference(model, feeds)["y"]
    assert np.allclose(run_serially(model, feeds)["y"], expected, atol=1e-4)


@pytest.mark.parametrize("largest", [0, 1])
def test_equal_elements_keep_their_order(largest):
    nodes = [
        node("TopK", "x k", "values places", axis=0, largest=largest),
        node("Cast", "places", "p", to=1),
    ]
    model = make_model(nodes, {"x": (9,)}, {"values": (4,), "p": (4,)}, {"k": np.array([4])})
    feeds = {"x": np.array([2, 1, 2, 1, 3, 3, 1, 0, 0], "float32")}
    results, expected = run_serially(model, feeds), run_reference(model, feeds)
    assert np.array_equal(results["values"], expected["values"])
    assert np.array_equal(results["p"], expected["p"])


def test_the_largest_of_nothing_but_minus_infinity():
    nodes = [node("ReduceMax", "x", "y", axes=[1], keepdims=0)]
    model = make_model(nodes, {"x": (3, 200)}, {"y": (3,)})
    feeds = {"x": np.full((3, 200), -np.inf, "float32")}
    assert np.array_equal(run_serially(model, feeds)["y"], np.full(3, -np.inf, "float32"))
    assert "__syncthreads" in cuda_source(model)


def test_dynamic_sizes():
    nodes = [node("Softmax", "x", "s", axis=-1), node("ReduceSum", "s", "y", keepdims=0)]
    model = make_model(nodes, {"x": ("n", "m")}, {"y": ()})
    feeds = {"x": random(3, 70)}
    results = run_serially(model, feeds, "n=1..8", "m=1..100")
    assert np.allclose(results["y"], 3, atol=1e-4)
    assert list(divergent_barriers(cuda_source(model, "n=1..8", "m=1..100"))) == []


def test_a_reduction_over_columns_is_no_chain_over_rows():
    x = te.placeholder((8, 16), name="x")
    k = te.reduce_axis((0, 8), "k")
    total = te.compute((16,), lambda i: te.sum(x[k, i], axis=k), "total")
    y = te.compute((8, 16), lambda i, j: x[i, j] / total[j] + tirx.exp(total[j]), "y")
    assert apply_rule(schedule_rows, create_prim_func([x, y]), LIMITS) is None


def test_a_node_whose_sizes_are_checked_at_run_time_is_refused():
    """Two dimensions that must be equal and may differ: the check raises, and a kernel cannot."""
    model = make_model([node("Add", "x y", "z", "add")], {"x": ("n",), "y": ("m",)}, {"z": (None,)})
    with pytest.raises(UnsupportedError, match="a GPU's kernel cannot raise"):
        lowered_model(model, "n=2..8", "m=2..8")


def test_a_program_may_not_need_much_memory_for_each_thread():
    nodes = [node("LSTM", "x w r", "y", hidden_size=2000)]
    lowered_model(SMALL["lstm"]())
    weights = {"w": random(1, 8000, 3), "r": np.zeros((1, 8000, 2000), "float32")}
    large = make_model(nodes, {"x": (1, 8, 3)}, {"y": (1, 1, 8, 2000)}, weights)
    with pytest.raises(UnsupportedError, match="each thread of its kernel would need"):
        lowered_model(large)


def test_empty_tensors():
    nodes = [
        node("Slice", "x start end", "none"),
        node("Concat", "none y", "c", axis=0),
        node("Relu", "c", "z"),
        node("Exp", "none", "e"),
        node("ReduceSum", "e", "s", keepdims=0),
    ]
    weights = {"start": np.array([1]), "end": np.array([1])}
    outputs = {"z": (2, 3), "e": (0, 3), "s": ()}
    model = make_model(nodes, {"x": (4, 3), "y": (2, 3)}, outputs, weights)
    feeds = {"x": random(4, 3), "y": random(2, 3)}
    results = run_serially(model, feeds)
    assert np.array_equal(results["z"], np.maximum(feeds["y"], 0))
    assert results["e"].shape == (0, 3)
    assert results["s"] == 0
    assert "__global__" in cuda_source(model)


def test_a_dynamic_dimension_may_be_zero():
    """A grid of no blocks cannot be launched, so the number of blocks is at least one."""
    nodes = [node("Relu", "x", "r"), node("ReduceSum", "x", "s", keepdims=0)]
    model = make_model(nodes, {"x": ("n", 70)}, {"r": ("n", 70), "s": ()})
    for rows in (0, 3):
        feeds = {"x": random(rows, 70)}
        results = run_serially(model, feeds, "n=0..8")
        assert np.array_equal(results["r"], np.maximum(feeds["x"], 0))
        assert np.allclose(results["s"], feeds["x"].sum(), atol=1e-4)
    assert list(divergent_barriers(cuda_source(model, "n=0..8"))) == []
