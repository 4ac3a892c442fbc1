"""Which operators of a model take floats of 16 bits.

Those that compute or move floats do, where ONNX allows it at the model's opset; what decides by
numbers, counts with them or holds a subgraph keeps 32. So do operators that need more than 16 bits:

    sums      a number of 16 bits ends at 65,504 (float16) or has 8 significant bits (bfloat16),
              and a sum of many or of squares does not; as in PyTorch's automatic mixed precision
    angles    of sines and cosines, such as positions times frequencies

and with them squares, exponentials and the like that only they read, and element-wise operators
that read nothing but them and constants:

    x -> Mul -> ReduceSum -> Mul 1/n -> Add epsilon -> Sqrt -> Cast -> Mul -> y
         `------------- in 32 bits -------------------------'         in 16
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import onnx
import onnx_ir as ir

from hybridc.float_operators import COMPUTED, MICROSOFT, MOVED

_SUMS = frozenset(
    "CumSum LpNormalization MeanVarianceNormalization ReduceL1 ReduceL2 ReduceLogSum "
    "ReduceLogSumExp ReduceMean ReduceSum ReduceSumSquare".split()
)

_ANGLES = frozenset(("Cos", "Sin"))

_ELEMENTWISE = frozenset(
    "Abs Add Clip Div Exp Log Max Mean Min Mul Neg Pow Reciprocal Relu Sqrt Sub Sum".split()
)

_RESHAPING = frozenset("Concat Expand Identity Reshape Squeeze Transpose Unsqueeze".split())

_COORDINATES = frozenset(("RoiAlign",))
"""Operators with places in a picture among the operands that have the type of the picture."""

_KEPT = {
    "BatchNormalization": ("T1", "T2"),
    "GridSample": ("T2",),
    "Pow": ("T1",),
    "Resize": ("T2",),
    "Upsample": ("T2",),
}
"""Types of operands that may differ from those of the others, and say more in 32 bits."""

_STATISTICS = {
    "SimplifiedLayerNormalization": (1,),
    "SkipLayerNormalization": (1, 2),
    "SkipSimplifiedLayerNormalization": (1, 2),
}
"""Results that have 32 bits whatever the others have, of operators in ``com.microsoft``."""


@dataclass(frozen=True)
class Slots:
    """Where a node has floats of 16 bits: positions of its inputs and of its outputs."""

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


def narrow_nodes(graph: ir.Graph, dtype: ir.DataType) -> dict[ir.Node, Slots]:
    """The nodes, of subgraphs too, that take a type of 16 bits, and where; in order."""
    wide = set(wide_nodes(graph))
    narrow: dict[ir.Node, Slots] = {}
    for node in graph.all_nodes():
        slots = None if node in wide else _slots(node, dtype, graph.opset_imports)
        if slots is not None and (node.op_type not in MOVED or _moves(node, slots, narrow)):
            narrow[node] = slots
    return narrow


def _moves(node: ir.Node, slots: Slots, narrow: dict[ir.Node, Slots]) -> bool:
    """Whether what a node moves has 16 bits already, or comes from outside."""
    producers = [_operand(node, index).producer() for index in slots.inputs]
    return all(producer is None or producer in narrow for producer in producers)


def _operand(node: ir.Node, index: int) -> ir.Value:
    value = node.inputs[index]
    assert value is not None
    return value


def _slots(node: ir.Node, dtype: ir.DataType, opsets: dict[str, int]) -> Slots | None:
    """Where a node takes a type of 16 bits; ``None`` if it does not."""
    if node.domain == "com.microsoft":
        if node.op_type not in MICROSOFT:
            return None
        inputs, kept = _floats(node.inputs), _STATISTICS.get(node.op_type, ())
        outputs = tuple(index for index in _floats(node.outputs) if index not in kept)
    elif node.domain or node.op_type not in (COMPUTED | MOVED) - _COORDINATES:
        return None
    else:
        inputs, outputs = _by_schema(node, dtype, opsets.get("", 1))
    return Slots(inputs, outputs) if inputs and outputs else None


def _by_schema(
    node: ir.Node, dtype: ir.DataType, opset: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The inputs and outputs of 32 bits whose types may be another by ONNX's definition."""
    schema = onnx.defs.get_schema(node.op_type, opset)
    wanted = f"tensor({dtype.name.lower()})"
    free = {
        constraint.type_param_str
        for constraint in schema.type_constraints
        if wanted in constraint.allowed_type_strs
        and constraint.type_param_str not in _KEPT.get(node.op_type, ())
    }

    def typed(formal: Sequence[onnx.defs.OpSchema.FormalParameter], index: int) -> str:
        return str(formal[min(index, len(formal) - 1)].type_str)

    inputs = [i for i in _floats(node.inputs) if typed(schema.inputs, i) in free]
    read = {typed(schema.inputs, index) for index in inputs}
    outputs = [i for i in _floats(node.outputs) if typed(schema.outputs, i) in read]
    return tuple(inputs), tuple(outputs)


def _floats(values: Sequence[ir.Value | None]) -> tuple[int, ...]:
    """Positions of tensors of float32."""
    return tuple(
        index
        for index, value in enumerate(values)
        if value is not None and isinstance(value.type, ir.TensorType) and _is_float(value)
    )


def _is_float(value: ir.Value) -> bool:
    return value.dtype == ir.DataType.FLOAT


def wide_nodes(graph: ir.Graph) -> list[ir.Node]:
    """The nodes that keep 32 bits since they add up or take angles, or belong to those."""
    nodes = list(graph.all_nodes())
    wide = {node for node in nodes if node.op_type in _SUMS | _ANGLES and not node.domain}
    angles = {node for node in wide if node.op_type in _ANGLES}
    for node in reversed(nodes):
        if _is_read_only_by(node, angles) and (node.op_type in _RESHAPING or _is_product(node)):
            angles.add(node)
        elif node.op_type in _ELEMENTWISE and _is_read_only_by(node, wide | angles):
            wide.add(node)
            if _is_read_only_by(node, angles):
                angles.add(node)
    wide |= angles
    for node in nodes:
        if node.op_type in _ELEMENTWISE | _RESHAPING and _reads_only(node, wide):
            wide.add(node)
    return [node for node in nodes if node in wide]


def _is_product(node: ir.Node) -> bool:
    """Whether a node multiplies each element of one operand with each of another."""
    left = node.inputs[0] if node.op_type == "MatMul" else None
    return left is not None and left.shape is not None and left.shape[-1] == 1


def _is_read_only_by(node: ir.Node, wide: set[ir.Node]) -> bool:
    readers = [use.node for output in node.outputs for use in output.uses()]
    return bool(readers) and all(reader in wide for reader in readers)


def _reads_only(node: ir.Node, wide: set[ir.Node]) -> bool:
    """Whether all that a node reads comes from wide nodes, but for constants."""
    computed = [value for value in node.inputs if value and not value.is_initializer()]
    producers = [value.producer() for value in computed]
    return any(producer in wide for producer in producers) and all(
        producer in wide or (producer is not None and producer.op_type == "Constant")
        for producer in producers
    )
