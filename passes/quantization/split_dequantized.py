"""Give every reader of dequantized floats a DequantizeLinear of its own.

Targets fuse element-wise work into the kernel that reads it, so a DequantizeLinear for each reader
costs a few instructions there. One for all of them would write its floats to memory, four times as
many bytes as the integers that they were made of.
"""

from __future__ import annotations

import onnx_ir as ir
from hybridc.passes.editor import Editor, contents, dims_of


class SplitDequantized(ir.passes.InPlacePass):
    """Splits in the main graph, where there are several readers; not for constants."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Change one DequantizeLinear after the other."""
        editor = Editor(model.graph)
        for node in list(model.graph):
            computed = bool(node.inputs) and contents(node.inputs[0]) is None
            if node.op_type == "DequantizeLinear" and not node.domain and computed:
                _split(editor, node)
        return ir.passes.PassResult(model, editor.modified)


def _split(editor: Editor, node: ir.Node) -> None:
    """The first reader in the graph keeps the node."""
    result = node.outputs[0]
    readers = list(dict.fromkeys(use.node for use in result.uses()))
    if any(reader.graph is not editor.graph for reader in readers):
        return
    for reader in readers[0 if result.is_graph_output() else 1 :]:
        attributes = {name: a.value for name, a in node.attributes.items()}
        copy = editor.emit(
            reader,
            "DequantizeLinear",
            list(node.inputs),
            dims_of(result),
            attributes,
            dtype=result.dtype,
        )
        for place, value in enumerate(reader.inputs):
            if value is result:
                reader.replace_input_with(place, copy)
        editor.modified = True
