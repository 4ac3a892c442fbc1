"""Passes over the ONNX model: from what the user brought to what lowers well.

Each pass is an ``onnx_ir`` pass in a file of its own and leaves a valid ONNX model, so that the
model can be saved, looked at, and run in ONNX Runtime after any of them. :mod:`pipeline` holds
their order.
"""
