"""Passes over quantized models: regions of floats become integer operators."""
