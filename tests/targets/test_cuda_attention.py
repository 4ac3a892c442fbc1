"""Attention in one kernel: what it computes, thread by thread, and where it takes others' place.

The reference is written out in numpy, in float64.
"""

from __future__ import annotations

import numpy as np
import pytest
import tvm_ffi
from hybridc.targets.cuda.architectures import parse_gpu
from hybridc.targets.cuda.build import fused_kernels
from hybridc.targets.cuda.permuted import products_in_place
from hybridc.targets.gpu import attention
from hybridc.targets.gpu.pipeline import fuse
from hybridc.targets.gpu.schedules import SCHEDULED
from hybridc.targets.gpu.schedules.attention_kernel import Cut
from hybridc.targets.gpu.schedules.attention_tiles import Tile
from hybridc.targets.llvm.layout.graph import bindings_of
from hybridc.targets.opencl.devices import parse_devices
from tvm import tirx

from tests.gpu.emulation import divergent_barriers, lowered_model
from tests.gpu.threads import grids_of, run_threads, source_of
from tests.models import make_model, node
from tests.targets.attention_case import Case

GPU, EXACT = parse_gpu("sm_90,tf32"), parse_gpu("sm_90")
WITHOUT = parse_gpu("sm_75")
"""Without tensor cores for any of the types."""


def fused(model, gpu=GPU):
    """A model's fused kernels, and the names of its inputs."""
    lowered, inputs, _ = lowered_model(model)
    types = gpu.limits.matrix_types | {"float16", "float32"}
    module = products_in_place(lowered.module, lowered.weights, types)
    if gpu is GPU:
        return fused_kernels(module, gpu), inputs
    return attention.attention_in_one(fuse(module), gpu.limits, in_tiles=True), inputs


def attention_kernels(module):
    """Calls of attention in one kernel, by the kernel."""
    calls = [binding.value for binding in bindings_of(module["main"])]
    calls = [c for c in calls if getattr(getattr(c, "op", None), "name", "") == "relax.call_tir"]
    kernels = {call: module[call.args[0]] for call in calls}
    return {call: f for call, f in kernels.items() if SCHEDULED in (f.attrs or {})}


def input_of(module, value):
    """The name of the input that a value is, seen through a reshape."""
    bound = {binding.var: binding.value for binding in bindings_of(module["main"])}
    while value in bound:
        assert "reshape" in str(bound[value].args[0])
        value = bound[value].args[1].fields[0]
    return str(value.name)


def run_on_threads(case, dtype, feeds, folder):
    return run_model(case.model(dtype), feeds, case, dtype, folder)


def run_model(model, feeds, case, dtype, folder, gpu=GPU):
    module, inputs = fused(model, gpu)
    ((call, function),) = attention_kernels(module).items()
    source = source_of(function)
    assert ("mma.sync" in source) is (gpu is GPU)
    assert list(divergent_barriers(source)) == []
    by_input = {f"input_{i}": feeds[name].astype(dtype) for i, name in enumerate(inputs)}
    *operands, result = function.params
    arrays = {str(result.name): np.zeros(list(map(int, result.shape)), dtype)}
    for operand, value in zip(operands, call.args[1].fields, strict=True):
        given = by_input[input_of(module, value)]
        assert given.size == np.prod(list(map(int, operand.shape)))
        arrays[str(operand.name)] = given
    run_threads(source, grids_of(function), arrays, folder)
    shape = (case.batch, case.queries, case.heads, case.values)
    return arrays[str(result.name)].reshape(shape)


CASES = [
    (Case(1, 2, 20, 40, 16, 16), Cut(1, 16)),
    (Case(2, 2, 33, 70, 24, 40), Cut(2, 32)),
    (Case(2, 1, 64, 96, 64, 64, mask=(2, 1, 1, 96)), Cut(4, 64)),
    (Case(1, 2, 17, 41, 80, 32, mask=(1, 1, 17, 41)), Cut(1, 32)),
    (Case(1, 1, 32, 64, 128, 128, mask=(1, 1, 32, 64)), Cut(2, 32)),
]


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize(("case", "cut"), CASES)
def test_threads_compute_attention(case, cut, dtype, monkeypatch, tmp_path):
    monkeypatch.setattr(attention, "choose_cut", lambda *_: cut)
    feeds = case.feeds()
    result, expected = run_on_threads(case, dtype, feeds, tmp_path), case.expected(feeds)
    assert np.abs(result - expected).max() < 3e-3 * np.abs(expected).max()


TILED_CASES = [
    (Case(1, 2, 20, 40, 16, 16), Tile(16, 16)),
    (Case(2, 2, 33, 70, 24, 40), Tile(32, 32)),
    (Case(1, 1, 64, 96, 64, 64, mask=(1, 1, 1, 96)), Tile(64, 32)),
    (Case(1, 2, 17, 41, 9, 33, mask=(1, 1, 17, 41)), Tile(16, 32)),
]


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize(("case", "tile"), TILED_CASES)
def test_threads_compute_attention_in_float32(case, tile, dtype, monkeypatch, tmp_path):
    monkeypatch.setattr(attention, "choose_tile", lambda *_: tile)
    gpu = EXACT if dtype == "float32" else WITHOUT
    feeds = case.feeds()
    result = run_model(case.model(dtype), feeds, case, dtype, tmp_path, gpu)
    expected = case.expected(feeds)
    bound = 3e-3 if dtype == "float16" else 1e-5
    assert np.abs(result - expected).max() < bound * np.abs(expected).max()


@pytest.mark.parametrize("gpu", [GPU, EXACT], ids=["tensor cores", "tiles"])
def test_rows_without_any_key_are_no_numbers(gpu, monkeypatch, tmp_path):
    monkeypatch.setattr(attention, "choose_cut", lambda *_: Cut(1, 16))
    monkeypatch.setattr(attention, "choose_tile", lambda *_: Tile(16, 16))
    case = Case(1, 1, 16, 48, 16, 16, mask=(1, 1, 16, 48))
    feeds = case.feeds()
    feeds["mask"][..., :5, :] = -np.inf
    feeds["mask"][..., 5:, :32] = -np.inf  # whole tiles first
    result = run_model(case.model("float32"), feeds, case, "float32", tmp_path, gpu)
    expected = case.expected(feeds)
    assert np.isnan(result[:, :5]).all()
    assert np.abs(result - expected)[:, 5:].max() < 3e-3


def test_weights_that_others_read_stay():
    module, _ = fused(Case(1, 2, 16, 16, 16, 16).model("float16", extra=True))
    assert not attention_kernels(module)


@pytest.mark.parametrize("case", [Case(1, 1, 16, 16, 20, 16), Case(1, 1, 16, 16, 16, 272)])
def test_rows_that_are_no_chunks_or_too_long_stay(case):
    assert not attention_kernels(fused(case.model("float16"))[0])


def test_exact_attention_stays_with_cuda():
    model = Case(1, 2, 16, 16, 16, 16).model("float32")
    assert not attention_kernels(fused_kernels(lowered_model(model)[0].module, EXACT))
    assert attention_kernels(fused(model)[0])


@pytest.mark.parametrize("size", [16, 64, 100, 128])
def test_tiles_fit_in_shared_memory(size):
    case = Case(1, 2, 300, 300, size, size)
    for limits in (EXACT.limits, parse_devices("").limits):
        gpu = fuse(lowered_model(case.model("float32"))[0].module)
        (kernel,) = attention_kernels(
            attention.attention_in_one(gpu, limits, in_tiles=True)
        ).values()
        sizes = []

        def note(node, sizes=sizes):
            if node.buffer.scope() == "shared":
                sizes.append(4 * int(np.prod(list(map(int, node.buffer.shape)))))

        tvm_ffi.structural_walk(kernel, (tirx.AllocBuffer, note))
        assert 0 < sum(sizes) <= limits.shared_bytes


def test_rows_that_do_not_fit_at_all_stay():
    case = Case(1, 1, 16, 16, 1024, 16)
    assert not attention_kernels(fused(case.model("float32"), EXACT)[0])


def test_products_that_are_not_of_a_softmax_stay():
    nodes = [
        node("MatMul", "a b", "p"),
        node("Softmax", "p", "s", axis=1),
        node("MatMul", "s c", "y"),
    ]
    shapes = dict.fromkeys("abc", (2, 16, 16))
    module, _ = fused(make_model(nodes, shapes, {"y": (2, 16, 16)}, dtype="float16"))
    assert not attention_kernels(module)


def test_causal_attention_hides_the_future(monkeypatch, tmp_path):
    monkeypatch.setattr(attention, "choose_cut", lambda *_: Cut(1, 16))
    attributes = {"num_heads": 2, "unidirectional": 1, "domain": "com.microsoft"}
    nodes = [node("MultiHeadAttention", "q k v", "y", **attributes)]
    shapes = dict.fromkeys("qkv", (1, 40, 32))
    model = make_model(nodes, shapes, {"y": (1, 40, 32)}, dtype="float16")
    model.opset_import.add(domain="com.microsoft", version=1)
    case = Case(1, 2, 40, 40, 16, 16)
    feeds = case.feeds()
    future = np.triu(np.full((40, 40), -np.inf), 1)
    result = run_model(model, feeds, case, "float16", tmp_path)
    expected = case.expected(feeds | {"mask": future})
    assert np.abs(result - expected).max() < 3e-3 * np.abs(expected).max()
