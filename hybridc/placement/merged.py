"""What became of nodes that simplifying took away: which node of the plan stands for them.

Passes fold constants, merge a scaling into a convolution, and put one operator in the place of
several. So a name out of the user's file may be in no group. What such a node computed still goes
somewhere: forward from it, through nodes that are gone like it, there is a value that still exists,
or a node that does. Whoever computes that value, or is that node, has taken the node's work over or
has it behind itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import onnx_ir as ir


@dataclass(frozen=True)
class Trace:
    """The nodes of a graph by name, before it was simplified.

    Attributes:
        results: Names of the values that each node computes, in topological order of the nodes.
        readers: Names of the nodes that read each value.
    """

    results: Mapping[str, tuple[str, ...]]
    readers: Mapping[str, tuple[str, ...]]


def trace(graph: ir.Graph) -> Trace:
    """Note the named nodes of a graph and what they pass on."""
    results, readers = {}, {}
    for node in graph:
        if node.name and node.op_type != "Constant":
            results[node.name] = tuple(value.name for value in node.outputs if value.name)
            for value in node.outputs:
                users = (use.node.name for use in value.uses())
                if value.name:
                    readers[value.name] = tuple(dict.fromkeys(name for name in users if name))
    return Trace(results, readers)


def merged_nodes(before: Trace, graph: ir.Graph) -> dict[str, str]:
    """For each node that is gone, the one that what it computed goes to.

    Args:
        before: The graph as it was.
        graph: The same graph, simplified.

    Returns:
        Names by name; nodes whose results nobody needs any more are left out.
    """
    alive = {node.name for node in graph}
    producers = {value.name: str(node.name) for node in graph for value in node.outputs}
    found: dict[str, str] = {}
    for name, results in reversed(list(before.results.items())):
        if name in alive:
            continue
        here = [producers[value] for value in results if value in producers]
        readers = [reader for value in results for reader in before.readers[value]]
        after = [reader if reader in alive else found.get(reader) for reader in readers]
        target = next((node for node in (*here, *after) if node is not None), None)
        if target is not None:
            found[name] = target
    return found
