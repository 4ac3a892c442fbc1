"""Products of 8 bits on tensor cores: equal to exact integers, thread by thread."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from hybridc.targets.cuda.architectures import parse_gpu
from hybridc.targets.cuda.build import make_kernels
from hybridc.targets.gpu.schedules import fragments, schedule_function
from hybridc.targets.gpu.schedules.fragment_choice import Cut
from hybridc.targets.llvm.layout.graph import bindings_of
from onnx import TensorProto, helper, numpy_helper

from tests.gpu.emulation import divergent_barriers, lowered_model
from tests.gpu.threads import grids_of, run_threads, source_of
from tests.models import node, run_reference

GPU = parse_gpu("sm_90")
TYPES = {"uint8": TensorProto.UINT8, "int8": TensorProto.INT8, "int32": TensorProto.INT32}


def numbers(shape, dtype, seed):
    """Numbers over the whole range of a type."""
    limits, generator = np.iinfo(dtype), np.random.default_rng(seed)
    return generator.integers(limits.min, limits.max, shape, dtype, endpoint=True)


def one_node(operator, data, result, weights, **attributes):
    """A model of one node whose first input, an array, is the model's; ``result`` is a type."""
    graph = helper.make_graph(
        [node(operator, " ".join(["x", *weights]), "y", **attributes)],
        "graph",
        [helper.make_tensor_value_info("x", TYPES[str(data.dtype)], data.shape)],
        [helper.make_tensor_value_info("y", TYPES[result], None)],
        [numpy_helper.from_array(np.asarray(array), name) for name, array in weights.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def kernels_of(model):
    lowered, *_ = lowered_model(model)
    return make_kernels(lowered.module, lowered.weights, GPU)


def run_on_threads(model, feeds, folder):
    """The result of a model, kernel by kernel, and the sources of its kernels."""
    module, weights = kernels_of(model)
    values, sources = dict(zip(module["main"].params, feeds, strict=False)), []
    for number, binding in enumerate(bindings_of(module["main"])):
        if isinstance(binding.value, tvm.ir.TupleGetItem):
            values[binding.var] = list(weights.values())[int(binding.value.index)]
            continue
        with GPU.target:
            function = schedule_function(module[binding.value.args[0]], GPU.limits)
        sources.append(source_of(function))
        assert list(divergent_barriers(sources[-1])) == []
        operands = [values[value] for value in binding.value.args[1].fields]
        result = empty(function.params[-1])
        arrays = dict(zip(map(name_of, function.params), [*operands, result], strict=True))
        arrays |= {name_of(b): empty(b) for b in function.body.block.alloc_buffers}
        (place := folder / str(number)).mkdir()
        run_threads(sources[-1], grids_of(function), arrays, place)
        values[binding.var] = result
    return result, "\n".join(sources)


def name_of(buffer):
    return str(buffer.name)


def empty(buffer):
    return np.zeros(list(map(int, buffer.shape)), str(buffer.dtype))


CUTS = [Cut(32, 32, 1, copied=True), Cut(64, 64, 2, copied=True)]


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("dtype", ["uint8", "int8"])
def test_matrices_equal_exact_integers(dtype, cut, monkeypatch, tmp_path):
    monkeypatch.setattr(fragments, "rank_cuts", lambda *_: [cut])
    x, w, zero = numbers((40, 272), dtype, 1), numbers((272, 24), "int8", 2), numbers((), dtype, 3)
    weights = {"w": w, "zero": zero}
    result, source = run_on_threads(one_node("MatMulInteger", x, "int32", weights), [x], tmp_path)
    assert f"s32.{'u' if dtype == 'uint8' else 's'}8.s8.s32" in source
    expected = (x.astype("int64") - zero) @ w.astype("int64")
    assert np.array_equal(result, expected)


def test_zero_points_of_run_time(monkeypatch, tmp_path):
    monkeypatch.setattr(fragments, "rank_cuts", lambda *_: [CUTS[0]])
    x, w = numbers((16, 64), "uint8", 1), numbers((64, 24), "int8", 2)
    model = one_node("MatMulInteger", x, "int32", {"w": w})
    model.graph.node[0].input.append("zero")
    model.graph.input.append(helper.make_tensor_value_info("zero", TYPES["uint8"], ()))
    result, source = run_on_threads(model, (x, np.array(201, "uint8")), tmp_path)
    assert "m16n8k32" in source
    assert np.array_equal(result, (x.astype("int64") - 201) @ w.astype("int64"))


@pytest.mark.parametrize(("zero", "padding"), [(0, 1), (7, 1), (7, 0)])
def test_convolutions_equal_onnx_runtime(zero, padding, monkeypatch, tmp_path):
    monkeypatch.setattr(fragments, "rank_cuts", lambda *_: [Cut(32, 32, 1, copied=True)])
    x, w = numbers((1, 32, 7, 6), "uint8", 1), numbers((24, 32, 3, 3), "int8", 2)
    weights = {
        "x_scale": np.float32(0.02),
        "x_zero": np.uint8(zero),
        "w": w,
        "w_scale": np.float32(0.01),
        "w_zero": np.int8(0),
        "y_scale": np.float32(3),
        "y_zero": np.uint8(90),
        "bias": np.arange(-12, 12, dtype="int32") * 1000,
    }
    model = one_node("QLinearConv", x, "uint8", weights, pads=[padding] * 4, strides=[2, 1])
    result, source = run_on_threads(model, [x], tmp_path)
    assert "m16n8k32" in source
    (expected,) = run_reference(model, {"x": x}).values()
    assert len(np.unique(expected)) > 40
    assert np.array_equal(result, expected)


@pytest.mark.parametrize(
    ("depth", "w", "zero"),
    [
        (72, numbers((72, 24), "int8", 1), np.int8(0)),  # rows that are no chunks
        (64, numbers((64, 24), "uint8", 1), np.uint8(128 - 1)),  # 9 bits
        (64, numbers((64, 4), "int8", 1), np.int8(0)),  # few columns
    ],
)
def test_what_does_not_fit_stays(depth, w, zero):
    weights = {"w": w, "x_zero": np.uint8(3), "w_zero": zero}
    x = numbers((32, depth), "uint8", 2)
    _, stored = kernels_of(one_node("MatMulInteger", x, "int32", weights))
    assert [str(array.dtype) for array in stored.values()] == ["int16"]


def test_unsigned_weights_around_their_zero_point_have_8_bits():
    w = numbers((64, 24), "uint8", 1)
    weights = {"w": w, "x_zero": np.uint8(3), "w_zero": np.uint8(128)}
    _, stored = kernels_of(
        one_node("MatMulInteger", numbers((32, 64), "uint8", 2), "int32", weights)
    )
    matrix, sums = stored.values()
    assert matrix.dtype == np.int8
    assert np.array_equal(matrix.T.astype(int), w.astype(int) - 128)
    assert np.array_equal(sums, matrix.sum(axis=1, dtype=int))


def test_older_gpus_keep_16_bits():
    weights = {"w": numbers((64, 24), "int8", 1), "zero": np.uint8(3)}
    model = one_node("MatMulInteger", numbers((32, 64), "uint8", 2), "int32", weights)
    lowered, *_ = lowered_model(model)
    _, stored = make_kernels(lowered.module, lowered.weights, parse_gpu("sm_75"))
    assert [str(array.dtype) for array in stored.values()] == ["int16"]
