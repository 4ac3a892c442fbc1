"""Attention in one kernel against float64, masks and sizes that divide nothing included."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

tvm = pytest.importorskip("tvm")

from hybridc.targets.llvm.build import fuse, legalize  # noqa: E402
from hybridc.targets.llvm.cpu import Cpu, parse_cpu  # noqa: E402
from hybridc.targets.llvm.layout.attention import fuse_attention  # noqa: E402
from hybridc.targets.llvm.schedules import apply_rule, schedule_module  # noqa: E402
from hybridc.targets.llvm.schedules.attention import schedule_attention  # noqa: E402
from hybridc.targets.llvm.schedules.attention_blocks import (  # noqa: E402
    FIRST_CACHE_BYTES,
    Sizes,
    plan_attention,
)
from hybridc.targets.llvm.schedules.blocks import collect  # noqa: E402
from hybridc.targets.llvm.scratch import thread_bytes  # noqa: E402
from tvm import relax, te, tirx  # noqa: E402

from tests.targets.properties import kernel_examples  # noqa: E402
from tests.targets.test_llvm_layouts import calls  # noqa: E402
from tests.targets.test_llvm_schedules import draw  # noqa: E402

op = relax.op
Array = np.ndarray[Any, Any]

MASKS = ("none", "keys", "scores", "future")


def masked(kind: str, scores: te.Tensor, mask: te.Tensor) -> te.Tensor:
    """Scores with a factor and, according to the kind, something added or hidden."""

    def element(b: Any, h: Any, q: Any, k: Any) -> Any:
        score = scores(b, h, q, k) * tirx.const(0.25, "float32")
        if kind == "keys":
            return score + mask(b, 0, 0, k)
        if kind == "scores":
            return score + mask(b, h, q, k)
        lowest = tirx.min_value("float32")
        return score if kind == "none" else tirx.Select(k > q, lowest, score)

    return te.compute(scores.shape, element, name="scores")


def attention(sizes: Sizes, kind: str, swapped: bool) -> Any:
    """A module of attention; heads come last but one if axes are to be swapped."""
    s = sizes
    mask = (s.batch, 1, 1, s.keys) if kind == "keys" else (s.batch, s.heads, s.queries, s.keys)
    rows = ((s.queries, s.depth), (s.keys, s.depth), (s.keys, s.columns))
    shapes = [
        (s.batch, length, s.heads, width) if swapped else (s.batch, s.heads, length, width)
        for length, width in rows
    ]
    inputs = [
        relax.Var(f"p{i}", relax.TensorType(shape, "float32"))
        for i, shape in enumerate([*shapes, mask])
    ]
    weights = relax.Var("weights", relax.TupleType([]))
    builder = relax.BlockBuilder()
    with builder.function("main", [*inputs, weights]):
        with builder.dataflow():
            result = builder.emit_output(relax.Tuple([_result(builder, inputs, kind, swapped)]))
        builder.emit_func_output(result)
    return builder.finalize()


def _result(builder: relax.BlockBuilder, inputs: list[Any], kind: str, swapped: bool) -> Any:
    *heads, mask = inputs
    order = [0, 2, 1, 3]
    if swapped:
        heads = [builder.emit(op.permute_dims(value, order)) for value in heads]
    query, key, value = heads
    turned = builder.emit(op.permute_dims(key, [0, 1, 3, 2]))
    scores = builder.emit(op.matmul(query, turned))
    scores = builder.emit_te(lambda x, y: masked(kind, x, y), scores, mask)
    shares = builder.emit(op.nn.softmax(scores, axis=-1))
    result = builder.emit(op.matmul(shares, value))
    if swapped:
        result = builder.emit(op.permute_dims(result, order))
    return builder.emit(op.negative(result))


def expected(kind: str, query: Array, key: Array, value: Array, mask: Array) -> Array:
    scores = np.einsum("bhqd,bhkd->bhqk", query.astype("float64"), key) / 4
    if kind in ("keys", "scores"):
        scores = scores + mask
    if kind == "future":
        scores = np.where(np.tri(*scores.shape[2:], dtype=bool), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    shares = weights / weights.sum(-1, keepdims=True)
    return -np.einsum("bhqk,bhkd->bhqd", shares, value)


def results(module: Any, arrays: list[Array], cpu: Cpu) -> Array:
    with cpu.target:
        kernels = schedule_module(fuse(legalize(module, cpu), cpu), cpu)
    machine = relax.VirtualMachine(relax.build(kernels, cpu.target), tvm.cpu())
    tensors = map(tvm.runtime.tensor, arrays)
    return machine["main"](*tensors, ())[0].numpy()


@kernel_examples(10)
@given(
    sizes=st.builds(
        Sizes,
        batch=st.integers(1, 2),
        heads=st.integers(1, 3),
        queries=st.integers(1, 70),
        keys=st.integers(1, 600),
        depth=st.integers(1, 40),
        columns=st.integers(1, 6).map(lambda count: count * 8),
    ),
    kind=st.sampled_from(MASKS),
    swapped=st.booleans(),
)
def test_any_attention(cpu: Cpu, sizes: Sizes, kind: str, swapped: bool) -> None:
    module = fuse_attention(attention(sizes, kind, swapped), {}, cpu)
    assert calls(module, "attention") == 1
    with cpu.target:
        (function,) = (
            function
            for variable, function in fuse(legalize(module, cpu), cpu).functions.items()
            if "attention" in variable.name_hint
        )
    assert apply_rule(schedule_attention, function, cpu) is not None
    s = sizes
    mask = (s.batch, 1, 1, s.keys) if kind == "keys" else (s.batch, s.heads, s.queries, s.keys)
    rows = ((s.queries, s.depth), (s.keys, s.depth), (s.keys, s.columns))
    operands = draw([*((s.batch, s.heads, *shape) for shape in rows), mask], s.keys)
    right = expected(kind, *operands)
    if swapped:
        operands[:3] = [np.ascontiguousarray(x.swapaxes(1, 2)) for x in operands[:3]]
        right = right.swapaxes(1, 2)
    np.testing.assert_allclose(results(module, operands, cpu), right, atol=1e-5)


def test_rows_that_are_hidden() -> None:
    """A chunk without a visible key changes nothing, and a row without one is not a number."""
    cpu, sizes = parse_cpu(""), Sizes(1, 1, 9, 600, 16, 16)
    operands = draw([(1, 1, 9, 16), (1, 1, 600, 16), (1, 1, 600, 16), (1, 1, 9, 600)])
    operands[3][..., :8, :500] = -np.inf
    operands[3][..., 8, :] = -np.inf
    module = fuse_attention(attention(sizes, "scores", False), {}, cpu)
    got = results(module, operands, cpu)
    right = expected("scores", *(array[..., :8, :] if array.shape[2] == 9 else array
                                 for array in operands))  # fmt: skip
    np.testing.assert_allclose(got[..., :8, :], right, atol=1e-5)
    assert np.isnan(got[..., 8, :]).all()


def test_what_stays_as_it_is(cpu: Cpu) -> None:
    lanes = cpu.vector_bytes // 4
    narrow, long = Sizes(1, 1, 8, 8, 8, lanes // 2 - 1), FIRST_CACHE_BYTES // 64
    for sizes in (narrow, Sizes(1, 1, 8, 8, long, 8), Sizes(1, 1, 8, 8, 8, long)):
        module = attention(sizes, "none", True)
        assert fuse_attention(module, {}, cpu).same_as(module)


@pytest.mark.parametrize("target", ["x86-64-v3", "x86-64-v4", "aarch64"])
def test_attention_compiles_to_wide_code(target: str) -> None:
    cpu = parse_cpu(target)
    module = fuse_attention(attention(Sizes(1, 2, 40, 300, 64, 64), "keys", True), {}, cpu)
    with cpu.target:
        kernels = schedule_module(fuse(legalize(module, cpu), cpu), cpu)
    functions = {v: f for v, f in kernels.functions.items() if "attention" in v.name_hint}
    (function,) = functions.values()
    main = tvm.IRModule({"main": function.with_attr("global_symbol", "main")})
    source = tvm.compile(main, target=cpu.target).mod.inspect_source("s")
    wide = {16: ".4s", 32: "%ymm", 64: "%zmm"}[cpu.vector_bytes]
    assert any(wide in line and "fm" in line for line in source.splitlines())


@pytest.mark.parametrize(("queries", "rows"), [(1, 8), (32, 32), (100, 56), (128, 32), (512, 32)])
def test_blocks_of_queries(queries: int, rows: int) -> None:
    plan = plan_attention(Sizes(1, 12, queries, 600, 64, 64), parse_cpu("x86-64-v3"))
    assert plan.rows == rows
    assert plan.rows * plan.keys * 4 <= FIRST_CACHE_BYTES


def test_what_a_thread_keeps_is_counted() -> None:
    cpu, sizes = parse_cpu("x86-64-v3"), Sizes(1, 2, 40, 300, 64, 64)
    module = fuse_attention(attention(sizes, "keys", True), {}, cpu)
    fused = fuse(legalize(module, cpu), cpu)
    (function,) = (f for v, f in fused.functions.items() if "attention" in v.name_hint)
    scheduled = apply_rule(schedule_attention, function, cpu)
    assert scheduled is not None
    allocated = [alloc.buffer for alloc in collect(scheduled.body, tirx.AllocBuffer)]
    large = [math.prod(map(int, buffer.shape)) for buffer in allocated]
    assert thread_bytes(fused, cpu) == 4 * sum(size for size in large if size > cpu.vector_bytes)
