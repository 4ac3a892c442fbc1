"""Compute equal things once: nodes of the same operator, attributes and inputs.

onnx_ir's pass of the same purpose merges random Bernoulli nodes and operators of unknown domains,
and hands on results that the first node leaves out; this one does not.
"""

from __future__ import annotations

from collections.abc import Hashable

import onnx_ir as ir
from hybridc.passes.editor import Editor, contents
from hybridc.passes.fold_constants import NOT_PURE

MAX_ELEMENTS = 64
"""Constants up to this size are compared by what they hold, larger ones by which they are."""

_PURE_DOMAINS = frozenset(("", "ai.onnx.ml", "com.microsoft"))


class ShareSubexpressions(ir.passes.InPlacePass):
    """Keeps the first of several equal nodes of the main graph."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Share, in the order of the graph, so that what follows equal nodes is equal too."""
        editor = Editor(model.graph)
        first: dict[Hashable, ir.Node] = {}
        for node in list(model.graph):
            key = _key(node)
            if key is None or node.graph is None:
                continue
            kept = first.setdefault(key, node)
            if kept is not node and not _are_outputs(kept, node):
                for old, new in zip(node.outputs, kept.outputs, strict=True):
                    if old.uses() or old.is_graph_output():
                        editor.replace(old, new)
        return ir.passes.PassResult(model, editor.modified)


def _are_outputs(kept: ir.Node, node: ir.Node) -> bool:
    """Whether both compute a graph output: nothing would be saved but a copy."""
    return any(
        left.is_graph_output() and right.is_graph_output()
        for left, right in zip(kept.outputs, node.outputs, strict=True)
    )


def _key(node: ir.Node) -> Hashable | None:
    """What equal nodes have in common; ``None`` for a node that is never shared."""
    if node.domain not in _PURE_DOMAINS or node.op_type in NOT_PURE or _is_training(node):
        return None
    attributes: list[tuple[str, Hashable]] = []
    for name, attribute in sorted(node.attributes.items()):
        content = _attribute_key(attribute)
        if content is None:
            return None
        attributes.append((name, content))
    wanted = tuple(bool(value.name) for value in node.outputs)
    inputs = tuple(_input_key(value) for value in node.inputs)
    return node.domain, node.op_type, wanted, inputs, tuple(attributes)


def _is_training(node: ir.Node) -> bool:
    """Whether a Dropout may be in training mode, or a node holds a graph that may be."""
    return node.op_type == "Dropout" and len(node.inputs) > 2


def _attribute_key(attribute: ir.Attr) -> Hashable | None:
    kinds = ir.AttributeType
    if attribute.is_ref():
        return None
    if attribute.type in (kinds.INTS, kinds.FLOATS, kinds.STRINGS):
        return attribute.type, tuple(attribute.value)
    if attribute.type in (kinds.INT, kinds.FLOAT, kinds.STRING):
        return attribute.type, attribute.value
    if attribute.type == kinds.TENSOR and attribute.value.size <= MAX_ELEMENTS:
        array = attribute.value.numpy()
        return attribute.type, str(attribute.value.dtype), array.shape, array.tobytes()
    return None


def _input_key(value: ir.Value | None) -> Hashable:
    """A value, or what a small constant holds."""
    if value is None or value.const_value is None or value.const_value.size > MAX_ELEMENTS:
        return value
    array = contents(value)
    if array is None or array.dtype.kind == "O":
        return value
    return str(value.const_value.dtype), array.shape, array.tobytes()
