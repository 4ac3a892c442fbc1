"""Kernels that store their results in the layout that the next one wants."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

tvm = pytest.importorskip("tvm")

from hybridc.targets.llvm.build import make_kernels  # noqa: E402
from hybridc.targets.llvm.cpu import Cpu, parse_cpu  # noqa: E402
from hybridc.targets.llvm.layout.moves import fuse_moves  # noqa: E402
from hybridc.targets.llvm.layout.reductions import fuse_before_means  # noqa: E402
from hybridc.targets.llvm.schedules import schedule_module  # noqa: E402
from hybridc.targets.llvm.schedules.blocks import changed  # noqa: E402
from tvm import relax, te, tirx  # noqa: E402
from tvm.s_tir import SBlockRealize  # noqa: E402

from tests.targets.test_llvm_schedules import convolve  # noqa: E402

op = relax.op
Array = np.ndarray[Any, Any]
Net = Callable[[relax.BlockBuilder, Any, Callable[[Array], Any]], Any]

TO_FIRST, TO_LAST = [0, 3, 1, 2], [0, 2, 3, 1]


def network(x: Array, net: Net) -> tuple[Any, dict[str, Array]]:
    """A module as lowering gives it; ``net(builder, input, weight)`` makes the result."""
    builder = relax.BlockBuilder()
    data = relax.Var("x", relax.TensorType(x.shape, x.dtype.name))
    weights: dict[str, Array] = {}
    variables: list[Any] = []

    def weight(array: Array) -> Any:
        kind = relax.TensorType(array.shape, array.dtype.name)
        variables.append(relax.Var(f"w{len(weights)}", kind))
        weights[f"w{len(weights)}"] = array
        return variables[-1]

    with builder.function("main", attrs={"num_input": 1, "global_symbol": "main"}):
        output = net(builder, data, weight)
        builder.emit_func_output(relax.Tuple([output]), [data, *variables])
    module = relax.transform.ConvertToDataflow(1)(builder.finalize())
    return relax.transform.BundleModelParams()(module), weights


def run(x: Array, net: Net, cpu: Cpu) -> Array:
    module, weights = make_kernels(*network(x, net), cpu)
    with cpu.target:
        machine = relax.VirtualMachine(
            relax.build(schedule_module(module, cpu), cpu.target), tvm.cpu()
        )
    arguments = tuple(tvm.runtime.tensor(array) for array in weights.values())
    result: Array = machine["main"](tvm.runtime.tensor(x), arguments)[0].numpy()
    return result


def tensors(channels: int, filters: int, rows: int, columns: int) -> dict[str, Array]:
    draw = np.random.default_rng(channels)
    return {
        "x": draw.integers(0, 256, (2, rows, columns, channels)).astype("uint8"),
        "w": draw.integers(-128, 128, (filters, channels, 1, 1)).astype("int16"),
        "scale": draw.uniform(1e-4, 2e-3, filters).astype("float32"),
        "taps": draw.standard_normal((filters, 1, 3, 3)).astype("float32"),
        "matrix": draw.standard_normal((filters, filters, 1, 1)).astype("float32"),
        "bias": draw.standard_normal((1, filters, 1, 1)).astype("float32"),
    }


def expected(t: dict[str, Array]) -> Array:
    sums = t["x"].astype(np.int64) @ t["w"][:, :, 0, 0].astype(np.int64).T
    scaled = np.maximum(sums.astype("float32") * t["scale"], 3).transpose(TO_FIRST)
    deep = convolve(scaled, t["taps"], 1, 1, 1, scaled.shape[1])
    deep = np.maximum(deep + t["bias"], 0)
    whole: Array = convolve(deep, t["matrix"], 1, 0, 1, 1).transpose(TO_LAST)
    return np.tanh(whole)


def net_of(t: dict[str, Array]) -> Net:
    """An integer product of pixels, and floats' convolutions between channels last."""

    def net(builder: relax.BlockBuilder, x: Any, weight: Callable[[Array], Any]) -> Any:
        emit = builder.emit
        wide = emit(op.astype(x, "int16"))
        layouts = {"data_layout": "NHWC", "kernel_layout": "OIHW", "out_dtype": "int32"}
        sums = emit(op.nn.conv2d(wide, weight(t["w"]), **layouts))
        scaled = emit(op.multiply(emit(op.astype(sums, "float32")), weight(t["scale"])))
        moved = emit(op.permute_dims(scaled, TO_FIRST))
        moved = emit(op.maximum(moved, relax.const(3, "float32")))
        groups = t["taps"].shape[0]
        deep = emit(op.nn.conv2d(moved, weight(t["taps"]), padding=1, groups=groups))
        deep = emit(op.nn.relu(emit(op.add(deep, weight(t["bias"])))))
        result = emit(op.nn.conv2d(deep, weight(t["matrix"])))
        return emit(op.tanh(emit(op.permute_dims(result, TO_LAST))))

    return net


@settings(max_examples=12, deadline=None, derandomize=True)
@given(st.integers(1, 40), st.integers(8, 40), st.integers(1, 9), st.integers(1, 9))
@example(16, 32, 20, 20)
@example(6, 24, 7, 9)
@example(16, 20, 7, 9)
def test_results_in_other_layouts(channels, filters, rows, columns):
    t = tensors(channels, filters, rows, columns)
    found = run(t["x"], net_of(t), parse_cpu("host"))
    np.testing.assert_allclose(found, expected(t), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["x86-64-v3", "x86-64-v4", "neoverse-n1"])
def test_no_kernel_only_moves(name):
    """Where vectors hold as many filters as blocks do, no transposition is left."""
    cpu = parse_cpu(name)
    t = tensors(16, 48, 12, 12)
    module, _ = make_kernels(*network(t["x"], net_of(t)), cpu)
    names = [variable.name_hint for variable in module.get_global_vars()]
    assert [n for n in names if n.startswith(("fused_transpose", "fused_unblock"))] == []
    assert any("product" in n and "transpose" in n for n in names)
    assert any("convolution" in n and "transpose" in n for n in names)


def test_a_result_with_two_readers_keeps_its_layout():
    """What is read in both layouts is not stored in the other one only."""
    t = tensors(16, 32, 12, 12)

    def net(builder: relax.BlockBuilder, x: Any, weight: Callable[[Array], Any]) -> Any:
        wide = builder.emit(op.astype(x, "int16"))
        layouts = {"data_layout": "NHWC", "kernel_layout": "OIHW", "out_dtype": "int32"}
        sums = builder.emit(op.nn.conv2d(wide, weight(t["w"]), **layouts))
        scaled = builder.emit(op.astype(sums, "float32"))
        moved = builder.emit(op.permute_dims(scaled, TO_FIRST))
        deep = builder.emit(op.nn.conv2d(moved, weight(t["taps"]), padding=1, groups=32))
        last = builder.emit(op.permute_dims(deep, TO_LAST))
        return builder.emit(op.add(last, scaled))

    found = run(t["x"], net, parse_cpu("host"))
    sums = t["x"].astype("float32") @ t["w"][:, :, 0, 0].astype("float32").T
    deep = convolve(sums.transpose(TO_FIRST), t["taps"], 1, 1, 1, 32)
    np.testing.assert_allclose(found, deep.transpose(TO_LAST) + sums, rtol=1e-4, atol=1)


def test_a_mean_reads_integers():
    """What dequantizes an image for its mean is part of that."""
    x = np.random.default_rng(1).integers(0, 256, (2, 12, 12, 24)).astype("uint8")

    def net(builder: relax.BlockBuilder, x: Any, _: Callable[[Array], Any]) -> Any:
        floats = builder.emit(op.astype(x, "float32"))
        return builder.emit(op.mean(floats, [1, 2], keepdims=True))

    module, _ = make_kernels(*network(x, net), parse_cpu("host"))
    names = [variable.name_hint for variable in module.get_global_vars()]
    assert [n for n in names if n.startswith("fused_cast")] == [n for n in names if n != "main"]
    found = run(x, net, parse_cpu("host"))
    np.testing.assert_allclose(found, x.mean((1, 2), keepdims=True), rtol=1e-5)


def test_a_kernel_that_is_written_out_stays():
    """Without a block inside of the root, it is neither a mean nor a move."""
    plain = te.placeholder((4,), name="x")
    function = te.create_prim_func([plain, te.compute((4,), lambda i: plain[i] + 1.0)])
    root = function.body.block
    body = SBlockRealize([], True, changed(root, body=tirx.Evaluate(0)))
    written = tirx.PrimFunc(function.params, body, function.ret_type, function.attrs)
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((4,), "float32"))
    with builder.function("main", [x]):
        variable = builder.add_func(written, "written")
        value = builder.emit(relax.call_tir(variable, [x], x.ty))
        builder.emit_func_output(builder.emit(relax.call_tir(variable, [value], x.ty)))
    module = builder.get()
    assert fuse_before_means(fuse_moves(module)).same_as(module)
