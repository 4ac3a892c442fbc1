"""From a file to a checked ``onnx_ir.Model`` with the shapes that were asked for."""
