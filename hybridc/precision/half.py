"""Floats of 16 bits, but where more are needed.

A number of 16 bits ends at 65,504, and a sum of many or of squares does not. So operators that add
up keep 32 bits, as PyTorch's automatic mixed precision has it, and with them

    squares, exponentials and the like that only they read, and
    element-wise operators that read nothing but them and constants:

    x -> Mul -> ReduceSum -> Mul 1/n -> Add epsilon -> Sqrt -> Cast -> Mul -> y
         `------------- in 32 bits -------------------------'         in 16
"""

from __future__ import annotations

from collections.abc import Container

import onnx
import onnx_ir as ir

_SUMS = frozenset(
    "CumSum LpNormalization MeanVarianceNormalization ReduceL1 ReduceL2 ReduceLogSum "
    "ReduceLogSumExp ReduceMean ReduceSum ReduceSumSquare".split()
)

_ELEMENTWISE = frozenset(
    "Abs Add Clip Div Exp Log Max Mean Min Mul Neg Pow Reciprocal Relu Sqrt Sub Sum".split()
)

_RESHAPING = frozenset("Expand Identity Reshape Squeeze Transpose Unsqueeze".split())


def convert_to_half(model: onnx.ModelProto) -> onnx.ModelProto:
    """Floats in 16 bits, but for inputs, outputs, and operators that need more."""
    from onnxruntime.transformers.float16 import convert_float_to_float16

    named = ir.from_proto(model)
    _name_nodes(named.graph)
    wide = [node.name for node in wide_nodes(named.graph)]
    half = ir.from_proto(
        convert_float_to_float16(ir.to_proto(named), keep_io_types=True, node_block_list=wide)
    )
    _join(half.graph, {node.name for node in named.graph.all_nodes()})
    half.graph.sort()  # the casts behind inputs come last
    return ir.to_proto(half)


def _join(graph: ir.Graph, own: Container[str | None]) -> None:
    """Let neighbors in 32 bits read each other, not by way of 16 as the converter has it.

    Args:
        graph: The converted graph.
        own: Names of nodes that the model brought: its casts round because it wants it.
    """
    for node in graph.all_nodes():
        value = node.inputs[0] if _is_new_cast(node, ir.DataType.FLOAT, own) else None
        narrow = value.producer() if value else None
        if narrow is not None and _is_new_cast(narrow, ir.DataType.FLOAT16, own):
            node.replace_input_with(0, narrow.inputs[0])


def _is_new_cast(node: ir.Node, dtype: ir.DataType, own: Container[str | None]) -> bool:
    is_cast = node.op_type == "Cast" and node.name not in own
    return is_cast and node.attributes.get_int("to") == dtype


def _name_nodes(graph: ir.Graph) -> None:
    """Give names to nodes that have none, or one that another has."""
    found: set[str] = set()
    for number, node in enumerate(graph.all_nodes()):
        if not node.name or node.name in found:
            node.name = f"{node.op_type}_{number}_half"
        found.add(node.name)


def wide_nodes(graph: ir.Graph) -> list[ir.Node]:
    """The nodes that keep 32 bits since they add up, or belong to a sum."""
    nodes = list(graph.all_nodes())
    wide = {node for node in nodes if node.op_type in _SUMS and not node.domain}
    for node in reversed(nodes):
        if node.op_type in _ELEMENTWISE and _is_read_only_by(node, wide):
            wide.add(node)
    for node in nodes:
        if node.op_type in _ELEMENTWISE | _RESHAPING and _reads_only(node, wide):
            wide.add(node)
    return [node for node in nodes if node in wide]


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
