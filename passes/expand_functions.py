"""Expand operators that the ONNX standard defines as functions and that have no converter.

The standard gives such an operator's meaning as a small graph of simpler ones; some of these
graphs depend on the types of the inputs, so types must have been inferred before.
"""

from __future__ import annotations

from collections.abc import Callable

import onnx
import onnx.inliner
import onnx_ir as ir
from hybridc.passes.infer_shapes import InferShapes
from onnx_ir.passes.common import InlinePass, _c_api_utils

_BODIES = "hybridc.bodies"
"""Domain of functions that exist only while they are being expanded."""

Lowers = Callable[[str, str, int], bool]
"""Whether ``(domain, operator, opset)`` has a converter."""


class ExpandFunctions(ir.passes.FunctionalPass):
    """Replaces function operators by their bodies, down to operators that have converters."""

    def __init__(self, lowers: Lowers) -> None:
        self._lowers = lowers

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Expand; a model without such operators is returned as it is."""
        selected = self._selected(model)
        used = {(n.domain, n.op_type) for n in ir.traversal.RecursiveGraphIterator(model.graph)}
        if not used & set(selected):
            return ir.passes.PassResult(model.clone(), modified=False)
        model = model.clone()
        _write_defaults(model.graph, set(selected))
        model = _expand_partial(model, set(selected))
        weights = dict(model.graph.initializers)
        proto = _c_api_utils.call_onnx_api(lambda proto: _expand(proto, selected), model)
        expanded = ir.from_proto(proto)
        _restore(expanded.graph, weights, len(model.graph.inputs))
        return ir.passes.PassResult(expanded, modified=True)

    def _selected(self, model: ir.Model) -> list[tuple[str, str]]:
        """All standard operators with a body and without a converter, at the model's opsets."""
        selected = []
        for schema in onnx.defs.get_all_schemas():
            version = model.graph.opset_imports.get(schema.domain)
            has_body = schema.has_function or schema.has_context_dependent_function
            if version and has_body and not self._lowers(schema.domain, schema.name, version):
                selected.append((schema.domain, schema.name))
        return selected


def _write_defaults(graph: ir.Graph, selected: set[tuple[str, str]]) -> None:
    """Write out attributes that are left at their defaults: bodies refer to them by name."""
    for node in ir.traversal.RecursiveGraphIterator(graph):
        if (node.domain, node.op_type) not in selected:
            continue
        version = graph.opset_imports[node.domain]
        schema = onnx.defs.get_schema(node.op_type, version, node.domain)
        for name, attribute in schema.attributes.items():
            if attribute.default_value.name and name not in node.attributes:
                node.attributes.add(ir.from_proto(attribute.default_value))


def _expand_partial(model: ir.Model, selected: set[tuple[str, str]]) -> ir.Model:
    """Expand nodes that leave out an input where the body depends on the types of the inputs.

    ONNX's inliner asks for the type of an input that is not there and gives up, so these bodies
    become functions of the model first.
    """
    found = [
        (node, schema)
        for node in ir.traversal.RecursiveGraphIterator(model.graph)
        if (node.domain, node.op_type) in selected and None in node.inputs
        for schema in [_schema(node, model)]
        if schema.has_context_dependent_function
    ]
    if not found:
        return model
    for number, (node, schema) in enumerate(found):
        body = onnx.FunctionProto.FromString(_body(node, schema))
        del body.output[len(node.outputs) :]  # the body does not compute results left out
        body.domain, body.name = _BODIES, f"{node.op_type}_{number}"
        function = ir.from_proto(body)
        function.opset_imports.update(model.graph.opset_imports)
        model.functions[function.identifier()] = function
        node.domain, node.op_type = body.domain, body.name
    model.graph.opset_imports[_BODIES] = 1
    model = InlinePass()(model).model
    model.graph.opset_imports.pop(_BODIES, None)
    return InferShapes()(model).model


def _schema(node: ir.Node, model: ir.Model) -> onnx.defs.OpSchema:
    version = model.graph.opset_imports[node.domain]
    return onnx.defs.get_schema(node.op_type, version, node.domain)


def _body(node: ir.Node, schema: onnx.defs.OpSchema) -> bytes:
    """The body of a node as a serialized function."""
    types = [
        onnx.TypeProto() if value is None or value.type is None else _type(value)
        for value in node.inputs
    ]
    serialized = [kind.SerializeToString() for kind in types]
    node_proto = ir.serde.serialize_node(node).SerializeToString()
    return bytes(schema.get_context_dependent_function(node_proto, serialized))


def _type(value: ir.Value) -> onnx.TypeProto:
    return ir.serde.serialize_value(value).type


def _expand(proto: onnx.ModelProto, selected: list[tuple[str, str]]) -> onnx.ModelProto:
    return onnx.inliner.inline_selected_functions(proto, selected, inline_schema_functions=True)


def _restore(graph: ir.Graph, weights: dict[str, ir.Value], inputs: int) -> None:
    """Make initializers again of what had to travel as inputs, without their data."""
    for value in list(graph.inputs[inputs:]):
        graph.inputs.remove(value)
        value.const_value = weights[str(value.name)].const_value
        graph.register_initializer(value)
