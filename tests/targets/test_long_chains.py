"""Long chains of element-wise nodes: kernels of a bounded size, since scheduling is not linear."""

import numpy as np
from hybridc.targets.relax_pipeline import MAX_FUSED, fuse
from tvm import relax, tirx

from hybridc import onnx_backend
from tests.models import make_model, node, random


def test_kernels_do_not_grow_with_a_chain():
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType([4], "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            value = x
            for _ in range(3 * MAX_FUSED):
                value = builder.emit(relax.op.sin(value))
            output = builder.emit_output(value)
        builder.emit_func_output(output)
    fused = fuse(relax.transform.LegalizeOps()(builder.get()))
    kernels = [f for f in fused.functions.values() if isinstance(f, tirx.PrimFunc)]
    sizes = [kernel.script().count("T.sblock(") for kernel in kernels]
    assert MAX_FUSED // 2 < max(sizes) <= MAX_FUSED + 1  # one block is the function's own
    assert len(kernels) < 3 * MAX_FUSED // 8


def test_a_chain_over_several_kernels():
    operators = ["Relu", "Neg", "Tanh", "Exp", "Sub"]
    nodes, name = [], "x"
    for number in range(160):
        operator = operators[number % 5]
        inputs = f"{name} x" if operator == "Sub" else name
        nodes.append(node(operator, inputs, f"v{number}"))
        name = f"v{number}"
    model = make_model(nodes, {"x": (6,)}, {name: (6,)})
    data = random(6)
    expected = data
    steps = {"Relu": lambda v: np.maximum(v, 0), "Neg": np.negative, "Tanh": np.tanh}
    steps |= {"Exp": np.exp, "Sub": lambda v: v - data}
    for number in range(160):
        expected = steps[operators[number % 5]](expected)
    (result,) = onnx_backend.prepare(model, fallback=False).run([data])
    np.testing.assert_allclose(result, expected, atol=1e-5)
