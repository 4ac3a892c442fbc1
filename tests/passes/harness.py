"""Run one pass over a model made with ONNX's helpers."""

import onnx
import onnx_ir as ir
from hybridc.passes.pipeline import run_passes

from hybridc.lowering.ops import default_table
from tests.models import run_reference
from tests.support import assert_close


def apply(pass_, model):
    """The model after a pass, still valid and with the interface that it had."""
    result = pass_(ir.from_proto(model)).model
    proto = ir.to_proto(result)
    onnx.checker.check_model(proto)
    assert interface(proto) == interface(model)
    return result


def run_all(model):
    """The model after all passes, and the notes."""
    after, notes = run_passes(ir.from_proto(model), default_table().lowers)
    onnx.checker.check_model(ir.to_proto(after))
    return after, notes


def interface(model):
    """Names and element types of inputs and outputs, in order."""
    graph = model.graph
    return [
        [(value.name, value.type.tensor_type.elem_type) for value in values]
        for values in (graph.input, graph.output)
    ]


def operators(model):
    """Operator types in order."""
    return [node.op_type for node in model.graph]


def assert_same_results(before, after, inputs):
    """ONNX Runtime computes the same for both."""
    assert_close(run_reference(ir.to_proto(after), inputs), run_reference(before, inputs))
