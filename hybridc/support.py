"""Which nodes of a model can be compiled, with the reason for each that cannot.

The answer comes from the converters themselves: each node is lowered on its own and thrown away.
So there is no second list of what is supported that could disagree with the first.
"""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

from hybridc.errors import UnsupportedError
from hybridc.lowering.lower import Section, lower
from hybridc.lowering.ops import OperatorTable, default_table


def unsupported_nodes(graph: ir.Graph) -> dict[str, str]:
    """Reasons by node name, for the nodes of ``graph`` that cannot be compiled."""
    table = default_table()
    reasons = {}
    for node in graph:
        reason = why_not(node, graph.opset_imports, table)
        if reason is not None:
            reasons[str(node.name)] = reason
    return reasons


def why_not(node: ir.Node, opsets: Mapping[str, int], table: OperatorTable) -> str | None:
    """Why a node cannot be compiled; ``None`` if it can."""
    inputs = [v for v in dict.fromkeys(node.inputs) if v is not None and v.const_value is None]
    unknown = [v.name for v in inputs if v.shape is None or v.dtype is None]
    if unknown:
        return f"the shape of its input {unknown[0]!r} is not known"
    outputs = [value for value in node.outputs if value.name and value.uses()] or node.outputs[:1]
    try:
        lower(Section([node], inputs, outputs, opsets), table)
    except UnsupportedError as error:
        return error.reasons[0][2]
    return None
