"""Smaller and faster at an accuracy that is kept: quantization, calibration, budgets, comparison.

samples.py     inputs for calibration, from files or a function, checked
quantize.py    a model in another precision
static.py      int8 with ranges out of samples: the order of the steps
anchors.py     which nodes take part
smooth.py      large channels of data move into the weights
observe.py     what values tensors take
ranges.py      which of them a scale reaches to
scales.py      the steps in which numbers become integers
qdq.py         QuantizeLinear and DequantizeLinear around nodes
search.py      which layers take part under a budget
costs.py       what that is predicted to save
curve.py       what a search found, as JSON, a table or a plot
weights.py     weights in fewer bits, in blocks
budget.py      bounds on the error, and how they are measured
compile.py     all of this around an ordinary compile
compare.py     errors between two models, layer by layer
"""
