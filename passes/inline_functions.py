"""Put the bodies of the model's own functions where they are called."""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes.common import InlinePass

from hybridc.errors import ModelError
from hybridc.frontend.limits import attribute_fault

_FAILURES = (ValueError, TypeError, KeyError, RuntimeError, ir.passes.InvariantError)
_INTEGERS = (ir.AttributeType.INT, ir.AttributeType.INTS)


class InlineFunctions(ir.passes.InPlacePass):
    """ONNX IR's inliner; a call that does not fit its function is the model's fault."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Inline, and check the attributes that bodies took from their calls."""
        if not model.functions:
            return ir.passes.PassResult(model, modified=False)
        try:
            result = InlinePass()(model)
        except _FAILURES as error:
            raise ModelError(f"the model's functions cannot be inlined: {error}") from error
        for node in ir.traversal.RecursiveGraphIterator(model.graph):
            _check_attributes(node)
        return result


def _check_attributes(node: ir.Node) -> None:
    for name, attribute in node.attributes.items():
        if attribute.type not in _INTEGERS or attribute.is_ref():
            continue
        single = attribute.type == ir.AttributeType.INT
        fault = attribute_fault(name, [attribute.value] if single else attribute.value)
        if fault is not None:
            raise ModelError(f"node {node.name!r} ({node.op_type}), out of a function: {fault}")
