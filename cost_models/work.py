"""Operations and bytes of a node, counted from its shapes.

A multiplication and an addition are two operations, as is usual for peaks on data sheets. What
only moves data counts no operations. Counts need static shapes; a node without them has no count.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import onnx_ir as ir


@dataclass(frozen=True)
class Work:
    """What a node does.

    Attributes:
        operations: Floating-point (or integer) operations.
        bytes: Bytes of all inputs and outputs, each counted once.
    """

    operations: int
    bytes: int

    def __add__(self, other: Work) -> Work:
        return Work(self.operations + other.operations, self.bytes + other.bytes)


def count_work(node: ir.Node) -> Work | None:
    """Work of one node; ``None`` if a shape or type it needs is unknown or dynamic."""
    values = dict.fromkeys(value for value in (*node.inputs, *node.outputs) if value is not None)
    if not all(_is_known(value) for value in values if value.name):
        return None
    total = sum(_elements(value) * _itemsize(value) for value in values if value.name)
    rule = _RULES.get(node.op_type, _per_output_element)
    return Work(rule(node), total)


def _is_known(value: ir.Value) -> bool:
    if value.dtype is None or value.dtype.name == "STRING":  # strings have no size
        return False
    return value.shape is not None and value.shape.is_static()


def _dims(value: ir.Value | None) -> tuple[int, ...]:
    return () if value is None or value.shape is None else tuple(value.shape.numpy())


def _elements(value: ir.Value | None) -> int:
    return math.prod(_dims(value))


def _itemsize(value: ir.Value) -> int:
    return 0 if value.dtype is None else math.ceil(value.dtype.itemsize)


def _nothing(_node: ir.Node) -> int:
    return 0


def _per_output_element(node: ir.Node) -> int:
    return _elements(node.outputs[0])


def _per_input_element(node: ir.Node) -> int:
    return _elements(node.inputs[0])


def _convolution(node: ir.Node) -> int:
    """Each output element is a dot product over one filter: channels of the group x kernel."""
    return 2 * _elements(node.outputs[0]) * math.prod(_dims(node.inputs[1])[1:])


def _transposed_convolution(node: ir.Node) -> int:
    """Each input element is multiplied with its channel's filters."""
    return 2 * _elements(node.inputs[0]) * math.prod(_dims(node.inputs[1])[1:])


def _matrix_product(node: ir.Node) -> int:
    return 2 * _elements(node.outputs[0]) * _dims(node.inputs[0])[-1]


def _general_matrix_product(node: ir.Node) -> int:
    transposed = node.attributes.get_int("transA", 0)
    return 2 * _elements(node.outputs[0]) * _dims(node.inputs[0])[0 if transposed else 1]


def _pool(node: ir.Node) -> int:
    kernel = node.attributes.get_ints("kernel_shape", ())
    return _elements(node.outputs[0]) * math.prod(kernel)


def _recurrent(node: ir.Node) -> int:
    """Per step: input times W and state times R, for every gate and direction."""
    steps, batch = _dims(node.inputs[0])[:2]
    weights = _elements(node.inputs[1]) + _elements(node.inputs[2])
    return 2 * steps * batch * weights


_MOVEMENT = """Cast Concat Constant ConstantOfShape DepthToSpace Dropout Expand Flatten Gather
GatherElements GatherND Identity Pad Reshape Shape Size Slice SpaceToDepth Split Squeeze Tile
Transpose Unsqueeze""".split()

_REDUCTIONS = """ArgMax ArgMin GlobalAveragePool GlobalMaxPool ReduceL1 ReduceL2 ReduceLogSum
ReduceLogSumExp ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum ReduceSumSquare""".split()

_RULES: dict[str, Callable[[ir.Node], int]] = {
    **dict.fromkeys(_MOVEMENT, _nothing),
    **dict.fromkeys(_REDUCTIONS, _per_input_element),
    **dict.fromkeys(("AveragePool", "LpPool", "MaxPool"), _pool),
    **dict.fromkeys(("DynamicQuantizeLSTM", "GRU", "LSTM", "RNN"), _recurrent),
    "Conv": _convolution,
    "ConvTranspose": _transposed_convolution,
    "Gemm": _general_matrix_product,
    "MatMul": _matrix_product,
}
