"""Forget shapes inside the graph, so that inference finds them anew.

Those that a model comes with belong to its inputs' shapes before specialization, and those that a
simplifier writes may be wrong: onnxsim has moved a Slice and left it the shape that it had before.
"""

from __future__ import annotations

import onnx_ir as ir


class DropStaleShapes(ir.passes.InPlacePass):
    """Clears the shape of every computed value; types stay, and so do the outputs' ranks.

    An initializer's shape is that of its contents, whatever the model says.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Clear the shapes of all nodes' outputs, in subgraphs and functions too."""
        modified = False
        functions = [function.graph for function in model.functions.values()]
        for graph in (*model.graphs(), *functions, *(g for f in functions for g in f.subgraphs())):
            found = [(value, _of_contents(value)) for value in graph.initializers.values()]
            found += [(value, _unknown(value)) for node in graph for value in node.outputs]
            for value, shape in found:
                modified |= value.shape != shape
                value.shape = shape
        return ir.passes.PassResult(model, modified)


def _of_contents(value: ir.Value) -> ir.Shape | None:
    """The shape of what an initializer holds."""
    return value.shape if value.const_value is None else ir.Shape(value.const_value.shape.numpy())


def _unknown(value: ir.Value) -> ir.Shape | None:
    """No shape, or for a graph output, which must have one, a shape of unknown dimensions."""
    if value.shape is None or not value.is_graph_output():
        return None
    return ir.Shape([ir.SymbolicDim(None)] * len(value.shape))
