"""Counts of operations and bytes against numbers worked out by hand."""

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from hybridc.cost_models.work import Work, count_work

from tests.models import make_model, node


def work_of(operator, *shapes, outputs=1, constants=None, **attributes):
    """Work of one float32 node; shapes are those of its inputs, outputs are inferred."""
    inputs = {f"x{i}": shape for i, shape in enumerate(shapes)}
    constants = constants or {}
    names = " ".join([*inputs, *constants])
    written = [f"y{i}" for i in range(outputs)]
    nodes = [node(operator, names, " ".join(written), "n", **attributes)]
    model = make_model(nodes, inputs, {}, constants)
    model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in written)
    model = onnx.shape_inference.infer_shapes(model, data_prop=True)
    return count_work(next(iter(ir.from_proto(model).graph)))


@pytest.mark.parametrize(
    ("work", "operations", "elements"),
    [
        # 10*10 outputs of 8 channels, each over 3*3*3 inputs
        (work_of("Conv", (1, 3, 12, 12), (8, 3, 3, 3)), 2 * 800 * 27, 432 + 216 + 800),
        # stride 2 halves the outputs; groups of 2 channels
        (
            work_of("Conv", (2, 4, 8, 8), (6, 2, 3, 3), group=2, strides=[2, 2], pads=[1, 1, 1, 1]),
            2 * (2 * 6 * 16) * 18,
            512 + 108 + 192,
        ),
        # depthwise: one channel for each filter
        (work_of("Conv", (1, 8, 5, 5), (8, 1, 3, 3), group=8), 2 * 72 * 9, 200 + 72 + 72),
        # a bias is read
        (work_of("Conv", (1, 3, 4, 4), (2, 3, 1, 1), (2,)), 2 * 32 * 3, 48 + 6 + 2 + 32),
        # each of 2*4*4 inputs meets 3 filters of 2*2
        (work_of("ConvTranspose", (1, 2, 4, 4), (2, 3, 2, 2)), 2 * 32 * 12, 32 + 24 + 75),
        (work_of("MatMul", (4, 5), (5, 6)), 2 * 24 * 5, 20 + 30 + 24),
        (work_of("MatMul", (7, 4, 5), (7, 5, 6)), 2 * 168 * 5, 140 + 210 + 168),
        (work_of("MatMul", (5,), (5, 6)), 2 * 6 * 5, 5 + 30 + 6),
        (work_of("Gemm", (4, 5), (5, 6), (6,)), 2 * 24 * 5, 20 + 30 + 6 + 24),
        (work_of("Gemm", (5, 4), (6, 5), transA=1, transB=1), 2 * 24 * 5, 20 + 30 + 24),
        (work_of("MaxPool", (1, 2, 6, 6), kernel_shape=[3, 2]), 40 * 6, 72 + 40),
        (work_of("GlobalAveragePool", (1, 2, 6, 6)), 72, 72 + 2),
        (work_of("Relu", (3, 4)), 12, 24),
        (work_of("Add", (3, 4), (4,)), 12, 12 + 4 + 12),
        (work_of("Transpose", (3, 4)), 0, 24),
        (work_of("Flatten", (3, 4, 5)), 0, 120),
        # 5 steps of batch 2: 4 gates of 3 from 6 inputs and 3 states
        (
            work_of("LSTM", (5, 2, 6), (1, 12, 6), (1, 12, 3), hidden_size=3),
            2 * 5 * 2 * (72 + 36),
            60 + 72 + 36 + 30,
        ),
    ],
)
def test_counts(work, operations, elements):
    assert work == Work(operations, 4 * elements)


def test_a_value_read_twice_is_moved_once():
    model = make_model([node("Mul", "x x", "y")], {"x": (8,)}, {"y": (8,)})
    assert count_work(next(iter(ir.from_proto(model).graph))) == Work(8, 64)


def test_element_types_have_their_size():
    model = make_model([node("Mul", "x x", "y")], {"x": (8,)}, {"y": (8,)}, dtype="int8")
    assert count_work(next(iter(ir.from_proto(model).graph))).bytes == 16


def test_integer_inputs_count_with_eight_bytes():
    work = work_of("Reshape", (3, 4), constants={"shape": np.array([12])})
    assert work == Work(0, 4 * 12 + 8 + 4 * 12)


@pytest.mark.parametrize("dims", [("n", 4), (None, 4)])
def test_a_dynamic_shape_has_no_count(dims):
    model = make_model([node("Relu", "x", "y")], {"x": dims}, {"y": dims})
    assert count_work(next(iter(ir.from_proto(model).graph))) is None


def test_sums():
    assert Work(1, 2) + Work(3, 4) == Work(4, 6)
