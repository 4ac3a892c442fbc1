"""Matrix products with weights packed at compile time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

tvm = pytest.importorskip("tvm")

from hybridc.targets.llvm.cpu import Cpu, parse_cpu  # noqa: E402
from hybridc.targets.llvm.layout.products import (  # noqa: E402
    pack_matrix,
    pack_products,
    packed_product,
    product_geometry,
)
from hybridc.targets.llvm.schedules import apply_rule  # noqa: E402
from hybridc.targets.llvm.schedules.packed_product import schedule_packed_product  # noqa: E402
from tvm import relax, te, tirx  # noqa: E402

from tests.targets.properties import kernel_examples  # noqa: E402
from tests.targets.test_llvm_layouts import calls, network, run  # noqa: E402
from tests.targets.test_llvm_schedules import draw  # noqa: E402

op = relax.op
Array = np.ndarray[Any, Any]


def scheduled(rows: int, depth: int, columns: int, front: int, cpu: Cpu) -> tuple[Any, Any]:
    """A product with bias and residual, scheduled, and its geometry."""
    found = product_geometry(rows, depth, columns, cpu)
    packed = pack_matrix(np.zeros((depth, columns), "float32"), found).shape
    ones = (1,) * front
    shapes = [(*ones, rows, depth), packed, (columns,), (*ones, rows, columns)]
    tensors = [
        te.placeholder([tirx.IntImm("int64", dim) for dim in shape], "float32", f"p{i}")
        for i, shape in enumerate(shapes)
    ]
    product = packed_product(found, *tensors[:2])

    def finish(*place: Any) -> Any:
        total = product(*place) + tensors[2](place[-1])
        return tirx.max(total, tirx.const(0, "float32")) + tensors[3](*place)

    result = te.compute(product.shape, finish, name="finish")
    function = te.create_prim_func([*tensors, result])
    return apply_rule(schedule_packed_product, function, cpu), found


@kernel_examples(15)
@given(
    rows=st.integers(1, 40),
    depth=st.integers(1, 70),
    columns=st.integers(1, 150),
    front=st.integers(0, 2),
)
def test_any_product(cpu: Cpu, rows: int, depth: int, columns: int, front: int) -> None:
    columns = max(columns, cpu.vector_bytes // 4)
    function, found = scheduled(rows, depth, columns, front, cpu)
    assert function is not None
    x, weight, bias, rest = draw(
        [(rows, depth), (depth, columns), (columns,), (rows, columns)], depth
    )
    shape = (1,) * front
    arrays = [x.reshape(*shape, *x.shape), pack_matrix(weight, found), bias]
    arrays.append(rest.reshape(*shape, *rest.shape))
    library = tvm.compile(tvm.IRModule({"main": function}), target=cpu.target)
    output = tvm.runtime.tensor(np.full((*shape, rows, columns), np.nan, "float32"))
    library["main"](*(tvm.runtime.tensor(array) for array in arrays), output)
    expected = np.maximum(x.astype("float64") @ weight + bias, 0) + rest
    np.testing.assert_allclose(output.numpy().reshape(rows, columns), expected, atol=2e-5)


@pytest.mark.parametrize("target", ["x86-64-v3", "x86-64-v4", "aarch64"])
def test_product_compiles_to_wide_code(target: str) -> None:
    cpu = parse_cpu(target)
    function, _ = scheduled(50, 64, 200, 0, cpu)
    library = tvm.compile(tvm.IRModule({"main": function}), target=cpu.target)
    wide = {16: ".4s", 32: "%ymm", 64: "%zmm"}[cpu.vector_bytes]
    source = library.mod.inspect_source("s")
    assert any(wide in line and "fm" in line for line in source.splitlines())


def perceptron(builder: relax.BlockBuilder, x: Any, weight: Callable[[Array], Any]) -> Any:
    """Products that share a weight, with one whose weight is not known, and one of few columns."""
    shared, last = (array / 6 for array in draw([(40, 40), (40, 3)], 5))
    known = weight(shared)
    y = builder.emit(op.nn.relu(builder.emit(op.matmul(x, known))))
    z = builder.emit(op.add(builder.emit(op.matmul(y, known)), x))
    unknown = builder.emit(op.matmul(z, builder.emit(op.permute_dims(y, [0, 2, 1]))))
    return builder.emit(op.matmul(builder.emit(op.matmul(unknown, z)), weight(last)))


def test_known_weights_are_packed_once(cpu: Cpu) -> None:
    module, weights = network((1, 19, 40), perceptron)
    packed, arrays = pack_products(module, weights, cpu)
    assert calls(packed, "packed_product") == 2
    assert set(arrays) - set(weights) == {name for name in arrays if name.startswith("w0.packed")}
    assert "w0" not in arrays
    assert "w1" in arrays
    (x,) = draw([(1, 19, 40)])
    plain = run(module, weights, x, cpu, blocked=False)
    np.testing.assert_allclose(run(packed, dict(arrays), x, cpu, blocked=True), plain, rtol=1e-3)
