"""Give every node a unique name, so that pins, plans and reports can point at it."""

from __future__ import annotations

import onnx_ir as ir


class NameNodes(ir.passes.InPlacePass):
    """Names nodes that have none ``<operator>_<number>``; numbers repeated names."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Name all nodes of the graph and its subgraphs."""
        nodes = list(ir.traversal.RecursiveGraphIterator(model.graph))
        taken = {node.name for node in nodes if node.name}
        seen: set[str] = set()
        modified = False
        for node in nodes:
            if not node.name or node.name in seen:
                node.name = _free_name(node.name or node.op_type, taken)
                modified = True
            seen.add(node.name)
        return ir.passes.PassResult(model, modified)


def _free_name(base: str, taken: set[str]) -> str:
    number = 0
    while f"{base}_{number}" in taken:
        number += 1
    name = f"{base}_{number}"
    taken.add(name)
    return name
