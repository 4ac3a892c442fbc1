"""Lowering: one part of an ONNX model to a Relax module, with hybridc's own operator table."""
