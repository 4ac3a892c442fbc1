"""Smaller and faster at an accuracy that is kept: quantization, calibration, budgets, comparison.

samples.py     inputs for calibration, from files or a function, checked
quantize.py    a model in another precision
budget.py      bounds on the error, and how they are measured
compare.py     errors between two models, layer by layer
"""
