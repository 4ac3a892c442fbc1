"""A model in floats of 16 bits: float16 or bfloat16.

Inputs, outputs, what enters and leaves subgraphs, and operators that need more keep 32 bits
(:mod:`hybridc.precision.half_nodes`). Where both kinds meet there is a Cast, one for all readers:

    x32 -> Cast -> Conv -> 16 -> Relu -> 16 -> Cast -> ReduceMean -> y32

Constants are converted here. One beyond the range of 16 bits stands for "as much as possible", as
in a mask that is added to scores; it becomes half of the largest number, so that adding to it does
not make it infinite. One that would become zero stays the least number that is not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from hybridc.bundle.tensors import Array
from hybridc.passes.editor import Editor, contents
from hybridc.passes.infer_shapes import InferShapes
from hybridc.passes.raise_opset import ensure_opset
from hybridc.precision.half_nodes import Slots, narrow_nodes

FLOAT16, BFLOAT16 = ir.DataType.FLOAT16, ir.DataType.BFLOAT16

_OPSETS = {FLOAT16: 17, BFLOAT16: 22}
"""The first opsets in which most operators take the type."""


def convert_floats(model: onnx.ModelProto, dtype: ir.DataType = FLOAT16) -> onnx.ModelProto:
    """A model with floats of 16 bits where that is enough.

    Args:
        model: It has no functions of its own.
        dtype: ``FLOAT16`` or ``BFLOAT16``.

    Raises:
        onnx.shape_inference.InferenceError: The model contradicts itself.
    """
    converted = ir.from_proto(model)
    ensure_opset(converted, _OPSETS[dtype])
    InferShapes()(converted)
    narrow = narrow_nodes(converted.graph, dtype)
    _Conversion(dtype, narrow, Editor(converted.graph)).run()
    RemoveUnusedNodesPass()(converted)  # constants in 32 bits that nobody reads any more
    return ir.to_proto(converted)


@dataclass
class _Conversion:
    """A change of the types of values.

    Attributes:
        dtype: The type of 16 bits.
        narrow: Nodes that get it, with the positions of their floats.
        editor: Makes constants, and names.
        made: Values in the type by those in 32 bits, as far as they were made.
    """

    dtype: ir.DataType
    narrow: Mapping[ir.Node, Slots]
    editor: Editor
    made: dict[ir.Value, ir.Value] = field(default_factory=dict)

    def run(self) -> None:
        """Give the nodes their operands and results."""
        for node, slots in self.narrow.items():
            for index in slots.outputs:
                self._narrow_result(node.outputs[index])
        for node, slots in self.narrow.items():
            for index in slots.inputs:
                value = node.inputs[index]
                assert value is not None
                if value.dtype != self.dtype:
                    node.replace_input_with(index, self._narrowed(value))

    def _narrow_result(self, value: ir.Value) -> None:
        """Change a result's type, and give it in 32 bits to readers that want those."""
        wide_uses = [use for use in value.uses() if use.idx not in self._inputs(use.node)]
        if wide_uses or value.is_graph_output():
            wide = self._cast(value, ir.DataType.FLOAT)
            for use in wide_uses:
                use.node.replace_input_with(use.idx, wide)
            if value.is_graph_output():
                _take_over(value, wide)
        value.dtype = self.dtype

    def _inputs(self, node: ir.Node) -> tuple[int, ...]:
        slots = self.narrow.get(node)
        return slots.inputs if slots else ()

    def _narrowed(self, value: ir.Value) -> ir.Value:
        """A value of 32 bits in 16, made once."""
        if value not in self.made:
            array = contents(value)
            if array is None:
                self.made[value] = self._cast(value, self.dtype)
            else:
                half = to_half(array, self.dtype.numpy())
                self.made[value] = self.editor.constant(half, self._name(value, self.dtype))
        return self.made[value]

    def _name(self, value: ir.Value, dtype: ir.DataType) -> str:
        return f"{value.name}_{dtype.name.lower()}"

    def _cast(self, value: ir.Value, dtype: ir.DataType) -> ir.Value:
        """A value in another type, made where it becomes known."""
        name = self.editor.free_name(self._name(value, dtype))
        output = ir.Value(name=name, shape=value.shape, type=ir.TensorType(dtype))
        attributes = [ir.AttrInt64("to", dtype.value)]
        cast = ir.Node("", "Cast", [value], attributes, outputs=[output], name=name)
        producer, graph = value.producer(), value.graph
        if producer is not None:
            producer.append(cast)
        else:
            assert graph is not None
            graph.insert_before(graph[0], cast)
        return output


def to_half(array: Array, dtype: np.dtype) -> Array:
    """A constant in 16 bits; what is finite and not zero stays so.

    Args:
        array: Of float32.
        dtype: float16, or bfloat16 of ml_dtypes.
    """
    finfo: Any = ml_dtypes.finfo  # of which its stubs say nothing
    limits = finfo(dtype)
    largest, least = float(limits.max), float(limits.smallest_subnormal)
    size = np.abs(array)
    beyond = np.isfinite(array) & (size > largest)
    array = np.where(beyond, np.copysign(largest / 2, array), array)
    array = np.where((size > 0) & (size < least), np.copysign(least, array), array)
    return array.astype(dtype)


def _take_over(value: ir.Value, wide: ir.Value) -> None:
    """Let a value be the output of a graph that another one was, under its name."""
    graph = value.graph
    assert graph is not None
    name = value.name
    value.name, wide.name = wide.name, name
    for index, output in enumerate(graph.outputs):
        if output is value:
            graph.outputs[index] = wide
