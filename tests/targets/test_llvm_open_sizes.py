"""Kernels for sizes that are known at run time only: results at many sizes, and their vectors."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

tvm = pytest.importorskip("tvm")

from hybridc.targets.llvm.build import fuse, legalize, make_kernels  # noqa: E402
from hybridc.targets.llvm.cpu import Cpu, parse_cpu  # noqa: E402
from hybridc.targets.llvm.schedules import schedule_module  # noqa: E402
from hybridc.targets.llvm.schedules.blocked_tiles import Axis  # noqa: E402
from hybridc.targets.llvm.schedules.extents import runs_at_run_time  # noqa: E402
from hybridc.targets.llvm.sizes import (  # noqa: E402
    note_ranges,
    ranges_of,
    typical,
    with_ranges,
    with_typical_sizes,
)
from tvm import relax, tirx  # noqa: E402

from tests.targets.test_llvm_layouts import calls, network, randoms, residual_net  # noqa: E402

op = relax.op
Array = np.ndarray[Any, Any]
Ranges = Mapping[str, tuple[int, int]]

BATCH, SPATIAL = {"n": (1, 9)}, {"h": (1, 80), "w": (1, 80)}


def open_network(shape: tuple[Any, ...], net: Any, ranges: Ranges) -> tuple[Any, dict[str, Array]]:
    """A module whose input has variables, named in ``shape``, with the given ranges."""
    variables = {name: tirx.Var(name, "int64") for name in ranges}
    module, weights = network([variables.get(dim, dim) for dim in shape], net)
    main = with_ranges(module["main"], ranges)
    module.update_func(module.get_global_var("main"), main)
    return module, weights


Run = Callable[[Array], Array]


def machine(module: Any, weights: Mapping[str, Array], cpu: Cpu) -> Run:
    executable = relax.VirtualMachine(relax.build(module, cpu.target), tvm.cpu())
    arguments = tuple(tvm.runtime.tensor(array) for array in weights.values())
    return lambda x: executable["main"](tvm.runtime.tensor(x), arguments)[0].numpy()


def both(module: Any, weights: dict[str, Array], cpu: Cpu) -> tuple[Run, Run]:
    """The module with kernels and schedules, and without any."""
    with cpu.target:
        kernels, packed = make_kernels(module, weights, cpu)
        fast = machine(schedule_module(kernels, cpu), packed, cpu)
        return fast, machine(fuse(legalize(module, cpu), cpu), weights, cpu)


def compare(fast: Run, plain: Run, *shape: int) -> None:
    x = np.random.default_rng(sum(shape)).standard_normal(shape).astype("float32")
    np.testing.assert_allclose(fast(x), plain(x), rtol=1e-4, atol=1e-5, err_msg=str(shape))


def test_batches() -> None:
    """Convolutions, depthwise ones too, pooling and a sum with another tensor."""
    cpu = parse_cpu("")
    module, weights = open_network(("n", 3, 21, 25), residual_net(24), BATCH)
    fast, plain = both(module, weights, cpu)
    for batch in range(1, 10):
        compare(fast, plain, batch, 3, 21, 25)


def test_images_of_any_size() -> None:
    """Rows that end in the middle of a tile, and images that are smaller than a tile."""
    cpu = parse_cpu("")
    module, weights = open_network((2, 3, "h", "w"), residual_net(24), SPATIAL)
    fast, plain = both(module, weights, cpu)
    sizes = [*zip(range(3, 40), range(3, 40), strict=True), (4, 79), (80, 5), (33, 64)]
    for height, width in sizes:
        compare(fast, plain, 2, 3, height, width)


def attention_net(builder: relax.BlockBuilder, x: Any, weight: Callable[[Array], Any]) -> Any:
    """A layer of a transformer with 2 heads of 16."""
    batch, rows, width = x.ty.shape.values

    def emit(value: Any) -> Any:
        return builder.emit(value)

    query, key, inner, outer = randoms((32, 32), (32, 32), (32, 80), (80, 32))
    split = relax.ShapeExpr([batch, rows, 2, 16])
    heads = [
        emit(op.permute_dims(emit(op.reshape(emit(op.matmul(x, weight(w))), split)), [0, 2, 1, 3]))
        for w in (query, key)
    ]
    scores = emit(op.matmul(heads[0], emit(op.permute_dims(heads[1], [0, 1, 3, 2]))))
    mixed = emit(op.matmul(emit(op.nn.softmax(scores, -1)), heads[1]))
    joined = emit(op.reshape(emit(op.permute_dims(mixed, [0, 2, 1, 3])), x.ty.shape))
    y = emit(op.add(joined, x))
    y = emit(op.nn.layer_norm(y, weight(np.ones(32)), weight(np.zeros(32)), [-1]))
    flat = emit(op.reshape(y, relax.ShapeExpr([batch * rows, width])))
    z = emit(op.nn.gelu(emit(op.matmul(flat, weight(inner)))))
    z = emit(op.reshape(emit(op.matmul(z, weight(outer))), x.ty.shape))
    return emit(op.mean(emit(op.add(z, y)), [1]))


def test_sequences() -> None:
    cpu = parse_cpu("")
    ranges = {"n": (1, 4), "s": (1, 64)}
    module, weights = open_network(("n", "s", 32), attention_net, ranges)
    fast, plain = both(module, weights, cpu)
    for rows in (*range(1, 20), 31, 32, 33, 63, 64):
        compare(fast, plain, rows % 4 + 1, rows, 32)


def vectorized(function: tirx.PrimFunc) -> int:
    """Number of vectorized loops, and of vectors that were written out."""
    found: list[Any] = []

    def count(node: Any) -> None:
        if isinstance(node, tirx.Ramp) or node.kind == tirx.ForKind.VECTORIZED:
            found.append(node)

    tvm_ffi = pytest.importorskip("tvm_ffi")
    tvm_ffi.structural_walk(function.body, ((tirx.For, tirx.Ramp), count))
    return len(found)


@pytest.mark.parametrize(
    ("shape", "net", "ranges"),
    [
        (("n", 3, 64, 64), residual_net(32), BATCH),
        ((1, 3, "h", "w"), residual_net(32), {"h": (16, 256), "w": (16, 256)}),
        (("n", "s", 32), attention_net, {"n": (1, 8), "s": (16, 256)}),
    ],
    ids=["batch", "image", "sequence"],
)
def test_kernels_have_vectors(shape: Any, net: Any, ranges: Ranges) -> None:
    cpu = parse_cpu("")
    module, weights = open_network(shape, net, ranges)
    with cpu.target:
        kernels, _ = make_kernels(module, weights, cpu)
        scheduled = schedule_module(kernels, cpu)
    without = {
        variable.name_hint
        for variable, function in scheduled.functions.items()
        if isinstance(function, tirx.PrimFunc) and not vectorized(function)
    }
    # One pixel for each channel is left, which are already in order.
    assert without <= {"unblock_blocked"}
    if len(shape) == 4:
        assert calls(kernels, "fused_convolution_blocked") == 4
        assert calls(kernels, "block_blocked") == 0


def test_tiles_cover_an_axis_once() -> None:
    """Every output is in one tile, which reads padding only where it finds out at run time."""
    for taps, step, before, largest in itertools.product((1, 3), (1, 2), (0, 1), (1, 5, 6)):
        outputs, inputs = tirx.Var("outputs", "int64"), tirx.Var("inputs", "int64")
        axis = Axis(20, 20, taps, step, 1, before)
        runs = runs_at_run_time(axis, outputs, inputs, largest)
        for size in range(taps, 24):
            count = (size + 2 * before - taps) // step + 1
            seen = []
            for run in runs:
                start, number = (
                    _value(v, {outputs: count, inputs: size}) for v in (run.start, run.count)
                )
                places = range(start, start + number * run.size)
                seen += places
                if run.pattern is not None:
                    exact = Axis(count, size, taps, step, 1, before)
                    assert all(exact.reads(i, tap) for i in places for tap in range(taps))
            assert sorted(seen) == list(range(count))


def _value(expression: Any, values: Mapping[Any, int]) -> int:
    import tvm_ffi

    fixed = tvm_ffi.structural_map(
        expression, (tirx.Var, lambda v: tirx.IntImm("int64", values[v]))
    )
    return int(tvm.sym.Analyzer().simplify(fixed))


def test_a_name_that_two_sizes_have_says_nothing() -> None:
    """What is known of one of them must not be taken for the other's."""
    builder = relax.BlockBuilder()
    known, other = (tirx.Var("n", "int64") for _ in range(2))
    x, y = (
        relax.Var(name, relax.TensorType([size, 8], "float32"))
        for name, size in (("x", known), ("y", other))
    )
    with builder.function("main", [x, y]):
        results = [builder.emit(op.exp(x)), builder.emit(op.sin(y))]
        builder.emit_func_output(relax.Tuple(results))
    module = builder.finalize()
    main = with_ranges(module["main"], {"n": (16, 32)})
    module.update_func(module.get_global_var("main"), main)
    legal = note_ranges(legalize(module, parse_cpu("")))
    kernels = [f for f in legal.functions.values() if isinstance(f, tirx.PrimFunc)]
    assert len(kernels) == 2
    assert all(ranges_of(kernel)["n"][0] == 0 for kernel in kernels)


def test_a_tensor_may_have_the_name_of_a_size() -> None:
    builder = relax.BlockBuilder()
    x = relax.Var("n", relax.TensorType([tirx.Var("n", "int64"), 8], "float32"))
    with builder.function("main", [x]):
        builder.emit_func_output(builder.emit(op.exp(x)))
    module = builder.finalize()
    main = with_ranges(module["main"], {"n": (16, 32)})
    module.update_func(module.get_global_var("main"), main)
    legal = note_ranges(legalize(module, parse_cpu("")))
    (kernel,) = (f for f in legal.functions.values() if isinstance(f, tirx.PrimFunc))
    assert ranges_of(kernel)["n"] == (16, 32)


def test_typical_sizes() -> None:
    assert typical(1, 1) == 1
    assert typical(1, 64) == 8
    assert typical(4, 10**9) == 64
    module, weights = open_network(("n", 3, 21, 25), residual_net(16), BATCH)
    cpu = parse_cpu("")
    with cpu.target:
        kernels, _ = make_kernels(module, weights, cpu)
    for function in kernels.functions.values():
        if isinstance(function, tirx.PrimFunc):
            fixed = with_typical_sizes(function)
            sizes = [dim for buffer in fixed.params for dim in buffer.shape]
            assert all(isinstance(dim, tirx.IntImm) for dim in sizes)
