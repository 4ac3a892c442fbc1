"""Make initializers that are also inputs initializers only: callers give other inputs."""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes.common import RemoveInitializersFromInputsPass

OPEN_IR_VERSION = 3
"""Last version of the format in which every initializer must be an input, too."""


class CloseInterface(ir.passes.InPlacePass):
    """Takes initializers off the inputs, in a version of the format that allows it."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Close the graph and its subgraphs."""
        old = model.ir_version <= OPEN_IR_VERSION
        if old:
            model.ir_version = OPEN_IR_VERSION + 1
        result = RemoveInitializersFromInputsPass()(model)
        return ir.passes.PassResult(model, old or result.modified)
