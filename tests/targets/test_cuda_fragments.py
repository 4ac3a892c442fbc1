"""Products on tensor cores: what they compute, thread by thread, and which kernels use them."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import tvm
from hybridc.targets.cuda.architectures import parse_gpu
from hybridc.targets.cuda.channels import channels_last
from hybridc.targets.cuda.filters import channels_innermost
from hybridc.targets.cuda.matrices import depth_innermost
from hybridc.targets.gpu.pipeline import fuse, legalize
from hybridc.targets.gpu.schedules import fragments
from hybridc.targets.gpu.schedules.fragment_choice import SHARED, Cut, rank_cuts
from hybridc.targets.relax_pipeline import fuse as fuse_kernels
from onnx import TensorProto, numpy_helper
from tvm import tirx
from tvm.s_tir import Schedule

from hybridc.errors import UsageError
from tests.gpu.emulation import cuda_source, divergent_barriers, lowered_model
from tests.gpu.threads import grids_of, run_threads, source_of
from tests.models import make_model, node, random, run_reference

TYPES = {"float16": TensorProto.FLOAT16, "float32": TensorProto.FLOAT}


def product(*sizes, batch=None):
    rows, depth, columns = sizes
    nodes = [node("MatMul", "x w", "p"), node("Add", "p b", "y")]
    lead = () if batch is None else (batch,)
    inputs = {"x": (*lead, rows, depth)}
    weights = {"b": random(columns)}
    if batch is None:
        weights["w"] = random(depth, columns)
    else:
        inputs["w"] = (batch, depth, columns)
    return make_model(nodes, inputs, {"y": (*lead, rows, columns)}, weights)


def convolution(channels, filters, size, kernel, stride=1, batch=1):
    edge = (size - 1) // stride + 1
    shape = (batch, filters, edge, edge)
    attributes = {"pads": [kernel // 2] * 4, "strides": [stride] * 2}
    nodes = [
        node("Conv", "x w b", "c", **attributes),
        node("Add", "c r", "s"),
        node("Relu", "s", "y"),
    ]
    weights = {"w": random(filters, channels, kernel, kernel), "b": random(filters)}
    inputs = {"x": (batch, channels, size, size), "r": shape}
    return make_model(nodes, inputs, {"y": shape}, weights)


def in_type(model, dtype):
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.elem_type = TYPES[dtype]
    for tensor in model.graph.initializer:
        array = numpy_helper.to_array(tensor).astype(dtype)
        tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
    return model


def scheduled(function, gpu):
    """A function on tensor cores, and its source."""
    with gpu.target:
        schedule = Schedule(tvm.IRModule({"main": function}))
        written = fragments.schedule_fragments(schedule, gpu.limits).mod["main"]
        source = source_of(written)
    assert "mma.sync" in source
    assert list(divergent_barriers(source)) == []
    return written, source


def run_on_threads(model, cut, monkeypatch, folder):
    """The result of a model of one kernel, and what ONNX Runtime makes of the same numbers."""
    monkeypatch.setattr(fragments, "rank_cuts", lambda *_: [cut])
    gpu = parse_gpu("sm_90,tf32")
    lowered, inputs, _ = lowered_model(model)
    types = gpu.limits.matrix_types
    module, weights = channels_innermost(lowered.module, lowered.weights, types)
    if cut.copied:
        module, weights = depth_innermost(module, weights, types)
    (function,) = (f for f in fuse(module).functions.values() if isinstance(f, tirx.PrimFunc))
    written, source = scheduled(function, gpu)
    dtype = str(function.params[0].dtype)
    arrays = {str(buffer.name): np.zeros(sizes(buffer), dtype) for buffer in function.params}
    scratch = written.body.block.alloc_buffers
    arrays |= {str(buffer.name): np.full(sizes(buffer), np.nan, "f") for buffer in scratch}
    result = arrays[str(function.params[-1].name)]
    feeds = {}
    for number, name in enumerate(inputs):
        array = arrays[f"input_{number}"]
        array[...] = random(*array.shape, seed=number).astype(dtype)
        feeds[name] = array.astype("float32")
    for weight in weights.values():
        (array,) = (a for a in arrays.values() if a.size == weight.size and a is not result)
        array[...] = weight.reshape(array.shape)
    run_threads(source, grids_of(written), arrays, folder)
    (expected,) = run_reference(in_type(model, "float32"), feeds).values()
    return result, expected


def sizes(buffer):
    return [int(dim) for dim in buffer.shape]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(
    ("model", "cut"),
    [
        (lambda: product(40, 72, 56), Cut(32, 32, 1)),
        (lambda: product(33, 130, 70), Cut(64, 64, 2)),
        (lambda: product(21, 64, 33, batch=2), Cut(32, 64, 1)),
        (lambda: convolution(16, 40, 8, 3), Cut(32, 64, 1)),
        (lambda: convolution(24, 16, 9, 3, stride=2, batch=2), Cut(64, 32, 2)),
        (lambda: convolution(72, 130, 7, 1), Cut(128, 64, 1)),
        (lambda: product(40, 72, 56), Cut(32, 32, 1, copied=True)),
        (lambda: product(130, 200, 72), Cut(128, 128, 1, copied=True)),
        (lambda: product(33, 264, 70), Cut(64, 64, 2, copied=True)),
    ],
)
def test_threads_compute_what_onnx_runtime_does(model, cut, dtype, monkeypatch, tmp_path):
    result, expected = run_on_threads(in_type(model(), dtype), cut, monkeypatch, tmp_path)
    assert result.shape == expected.shape
    assert np.abs(result - expected).max() < 2e-3 * np.abs(expected).max()


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(
    ("sizes", "cut"),
    [
        ((24, 40, 9, 3, 2), Cut(32, 64, 1, copied=True)),
        ((72, 24, 7, 1, 1), Cut(64, 32, 1, copied=True)),
        ((16, 72, 6, 3, 1), Cut(128, 128, 2, copied=True)),
    ],
)
def test_convolutions_with_channels_innermost(sizes, cut, dtype, monkeypatch, tmp_path):
    channels, filters, size, kernel, stride = sizes
    attributes = {"pads": [kernel // 2] * 4, "strides": [stride] * 2}
    nodes = [node("Relu", "x", "r"), node("Conv", "r w", "c", **attributes), node("Relu", "c", "s")]
    edge = (size - 1) // stride + 1
    inputs, shape = {"x": (2, channels, size, size)}, (2, filters, edge, edge)
    weights = {"w": random(filters, channels, kernel, kernel)}
    last = node("Sigmoid", "s", "y")
    model = in_type(make_model([*nodes, last], inputs, {"y": shape}, weights), dtype)
    reference = in_type(make_model(nodes, inputs, {"s": shape}, weights), "float32")
    monkeypatch.setattr(fragments, "rank_cuts", lambda *_: [cut])
    gpu = parse_gpu("sm_90,tf32")
    lowered, *_ = lowered_model(model)
    types = gpu.limits.matrix_types
    module, weights = channels_innermost(lowered.module, lowered.weights, types)
    module = fuse_kernels(channels_last(legalize(module), types))
    (function,) = (f for v, f in module.functions.items() if "conv2d" in v.name_hint)
    written, source = scheduled(function, gpu)
    assert "cp.async" in source
    data = random(2, size, size, channels, seed=3).clip(0).astype(dtype)
    result = np.zeros((2, edge, edge, filters), dtype)
    names = [str(buffer.name) for buffer in function.params]
    arrays = dict(zip(names, (data, *weights.values(), result), strict=True))
    scratch = written.body.block.alloc_buffers
    arrays |= {str(b.name): np.full(list(map(int, b.shape)), np.nan, "f") for b in scratch}
    run_threads(source, grids_of(written), arrays, tmp_path)
    feeds = {"x": data.transpose(0, 3, 1, 2).astype("float32")}
    (expected,) = run_reference(reference, feeds).values()
    difference = result.transpose(0, 3, 1, 2) - expected
    assert np.abs(difference).max() < 2e-3 * np.abs(expected).max()


def test_half_precision_uses_tensor_cores():
    source = cuda_source(in_type(product(64, 64, 64), "float16"))
    assert "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32" in source


def test_float32_stays_exact():
    assert "mma.sync" not in cuda_source(product(64, 64, 64))


def test_older_gpus_have_no_such_instructions():
    assert parse_gpu("sm_75,sm_90").limits.matrix_types == frozenset()
    assert "float32" not in parse_gpu("sm_80").limits.matrix_types


def test_a_specification_asks_for_tf32():
    gpu = parse_gpu("sm_90,tf32")
    assert gpu.architectures == ("sm_90",)
    assert gpu.name.startswith("sm_90,tf32+")
    assert "float32" in gpu.limits.matrix_types
    assert parse_gpu("tf32").architectures == ("sm_80", "sm_90")
    with pytest.raises(UsageError):
        parse_gpu("sm_75,tf32")


@pytest.mark.parametrize("shape", [(1, 8, 8, 8), (12, 128, 64, 128), (1, 64, 100_352, 576)])
@pytest.mark.parametrize("packed", [1, 2])
@pytest.mark.parametrize("copied", [False, True])
def test_every_cut_fits(shape, packed, copied):
    for cut in rank_cuts(shape, packed, copied):
        assert cut.threads <= 1024
        if copied:
            assert cut.stages >= 3
            assert cut.stages * 4 * (cut.rows + cut.columns) * cut.words <= SHARED
        else:
            assert 2 * 4 * (cut.rows + cut.columns) * (cut.words + 4) <= 48 * 1024
        assert cut.slices == 1 or cut.slices * cut.words * packed < shape[3]


def test_filters_keep_their_values():
    model = convolution(16, 24, 8, 3)
    lowered, *_ = lowered_model(model)
    module, weights = channels_innermost(lowered.module, lowered.weights, frozenset({"float32"}))
    before = next(array for array in lowered.weights.values() if array.ndim == 4)
    after = next(array for name, array in weights.items() if name.endswith("OHWI"))
    assert np.array_equal(after.transpose(0, 3, 1, 2), before)
    assert 'kernel_layout="OHWI"' in module.script()
    assert list(weights) != list(lowered.weights)


def test_filters_of_few_channels_stay():
    for model in (convolution(3, 24, 8, 3), convolution(32, 24, 8, 1)):
        lowered, *_ = lowered_model(onnx.ModelProto.FromString(model.SerializeToString()))
        types = frozenset({"float32"})
        assert channels_innermost(lowered.module, lowered.weights, types)[0] is lowered.module
