"""Forget shapes inside the graph: they belong to the inputs' shapes before specialization."""

from __future__ import annotations

import onnx_ir as ir


class DropStaleShapes(ir.passes.InPlacePass):
    """Clears the shape of every computed value; types stay, and so do the outputs' ranks."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Clear the shapes of all nodes' outputs, in subgraphs too."""
        modified = False
        for node in ir.traversal.RecursiveGraphIterator(model.graph):
            for value in node.outputs:
                modified = modified or value.shape is not None
                value.shape = _unknown(value)
        return ir.passes.PassResult(model, modified)


def _unknown(value: ir.Value) -> ir.Shape | None:
    """No shape, or for a graph output, which must have one, a shape of unknown dimensions."""
    if value.shape is None or not value.is_graph_output():
        return None
    return ir.Shape([ir.SymbolicDim(None)] * len(value.shape))
