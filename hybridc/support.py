"""Which nodes of a model can be compiled, with the reason for each that cannot.

The answer comes from the converters themselves: each node is lowered on its own and thrown away.
So there is no second list of what is supported that could disagree with the first.
"""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

from hybridc.errors import UnsupportedError
from hybridc.lowering.lower import lower
from hybridc.lowering.ops import OperatorTable, default_table
from hybridc.placement.fallback import unfit_nodes
from hybridc.targets.protocol import Section


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
    outputs = [value for value in node.outputs if value.name and value.uses()] or node.outputs[:1]
    section = Section([node], inputs, outputs, opsets)
    for _, reason in unfit_nodes(section):
        return reason
    try:
        lower(section, table)
    except UnsupportedError as error:
        return error.reasons[0][2]
    return None
