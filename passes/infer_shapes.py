"""Infer the shapes of all values from those of the inputs."""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes.common import ShapeInferencePass


class InferShapes(ShapeInferencePass):
    """ONNX's own shape inference, with the values of shape computations carried along."""

    def __init__(self) -> None:
        super().__init__(check_type=False, strict_mode=False, data_prop=True)

    def ensures(self, model: ir.Model) -> None:
        """The interface is as it was: inference changes nothing but shapes and types."""
        for value in model.graph.inputs:
            if isinstance(value.type, ir.TensorType) and value.shape is None:
                raise ir.passes.PostconditionError(f"input {value.name!r} lost its shape")
