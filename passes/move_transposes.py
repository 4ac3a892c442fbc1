"""Move transpositions to where they cancel, or to where they cost least.

Operators that do not care for the order of axes form regions. A region can work on permuted
values: transpositions at its border then cancel, and new ones may be needed elsewhere on it.

    Transpose -> [ Relu -> Add -> Concat ] -> Transpose        NHWC inside, NCHW around it
    =            [ Relu -> Add -> Concat ]                     NCHW everywhere

Which nodes of a region are to change is a minimum cut: a node is on the source's side if it works
on permuted values, and an edge is cut where a value is read in another order than the one it is
written in, at the price of the elements that are moved. So the outcome for a region is the best
one, and nothing changes unless elements are saved. Moving axes of one element costs nothing:
that is a Reshape.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import networkx
import numpy as np
import onnx_ir as ir
from hybridc.passes.editor import Editor, dims_of
from hybridc.passes.permutation_rules import (
    Layouts,
    Permutation,
    compose,
    identity,
    inverse,
    moves_data,
    permuted,
    rule_for,
)

MAX_ROUNDS = 20
"""Rounds over all transpositions; each but the last saves something."""

_UNKNOWN_DIM = 64
"""Size that an unknown dimension counts as in a price."""

_MOVED, _KEPT = "moved", "kept"
"""Source and sink of a cut: nodes on permuted values, and nodes as they are."""


class MoveTransposes(ir.passes.InPlacePass):
    """Moves and cancels transpositions of the main graph."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Improve one region after the other until nothing is saved any more."""
        editor = Editor(model.graph)
        _merge_transposes(editor)
        for _ in range(MAX_ROUNDS):
            if not _improve_regions(editor):
                break
        _reshape_instead(editor)
        return ir.passes.PassResult(model, editor.modified)


def _improve_regions(editor: Editor) -> bool:
    """Try every region that begins at a transposition; whether any was changed."""
    tried: set[frozenset[tuple[ir.Value, Permutation]]] = set()
    improved = False
    for node in list(editor.graph):
        perm = permutation_of(node)
        for value, layout in () if perm is None else _seeds(node, perm):
            if node.graph is None:
                break
            region = _grow(editor.graph, value, layout)
            key = frozenset(region.layouts.items())
            if not region.nodes or key in tried:
                continue
            tried.add(key)
            moved = _best_cut(region)
            if moved:
                _apply(editor, region, moved)
                _merge_transposes(editor)
                improved = True
    return improved


def permutation_of(node: ir.Node | None) -> Permutation | None:
    """What a Transpose does; ``None`` for any other node."""
    if node is None or node.op_type != "Transpose" or node.domain or not node.inputs:
        return None
    dims = dims_of(node.inputs[0])
    if dims is None:
        return None
    given = node.attributes.get("perm")
    return identity(len(dims))[::-1] if given is None else tuple(given.value)


def _seeds(node: ir.Node, perm: Permutation) -> Iterator[tuple[ir.Value, Permutation]]:
    """The values around a transposition, in the order that would cancel it."""
    source = node.inputs[0]
    if source is not None:
        yield source, perm
    yield node.outputs[0], inverse(perm)


# Regions


@dataclass
class Region:
    """Nodes that can work on permuted values.

    Attributes:
        graph: The graph that they are in.
        layouts: The permutation of each value that would be permuted.
        nodes: The nodes, each with the permutations of its values.
    """

    graph: ir.Graph
    layouts: dict[ir.Value, Permutation] = field(default_factory=dict)
    nodes: dict[ir.Node, Layouts] = field(default_factory=dict)


def _grow(graph: ir.Graph, seed: ir.Value, perm: Permutation) -> Region:
    """All that can be permuted together with a value."""
    opset = graph.opset_imports.get("", 0)
    region = Region(graph, {seed: perm})
    waiting = [seed]
    while waiting:
        value = waiting.pop()
        for node in _neighbors(value):
            if node in region.nodes or node.graph is not graph:
                continue
            rule = rule_for(node, opset)
            layouts = None if rule is None else rule.spread(node, value, region.layouts[value])
            if layouts is None or not _agree(layouts, region.layouts):
                continue
            region.nodes[node] = layouts
            new = {v: order for v, order in layouts.items() if v not in region.layouts}
            region.layouts.update(new)
            waiting += [v for v, order in new.items() if order != identity(len(order))]
    return region


def _neighbors(value: ir.Value) -> Iterator[ir.Node]:
    producer = value.producer()
    if producer is not None:
        yield producer
    yield from dict.fromkeys(use.node for use in value.uses())


def _agree(layouts: Layouts, known: Layouts) -> bool:
    """Whether no value would have two orders; one that stays as it is counts as well."""
    return all(known.get(value, order) == order for value, order in layouts.items())


# The cut


def _price(value: ir.Value, perm: Permutation) -> int:
    """Price of a transposition: elements moved, and something for each node."""
    dims = dims_of(value)
    if dims is None or perm == identity(len(perm)):
        return 0
    if not moves_data(dims, perm):
        return 1
    sizes = [dim if isinstance(dim, int) else _UNKNOWN_DIM for dim in dims]
    return 16 * (1 + int(np.prod(sizes)))


def _best_cut(region: Region) -> set[ir.Node]:
    """The nodes that should work on permuted values; empty if that saves nothing."""
    network = networkx.DiGraph()
    network.add_nodes_from((_MOVED, _KEPT))
    for value, perm in region.layouts.items():
        _add_value(network, region, value, perm)
    residual = networkx.algorithms.flow.boykov_kolmogorov(network, _MOVED, _KEPT)
    now = sum(data["capacity"] for _, _, data in network.out_edges(_MOVED, data=True))
    if residual.graph["flow_value"] >= now:
        return set()
    # Of several cuts of this price, the one that moves the fewest nodes.
    free = networkx.subgraph_view(
        residual, filter_edge=lambda a, b: residual[a][b]["flow"] < residual[a][b]["capacity"]
    )
    reachable = networkx.descendants(free, _MOVED)
    return {node for node in region.nodes if node in reachable}


def _add_value(
    network: networkx.DiGraph, region: Region, value: ir.Value, perm: Permutation
) -> None:
    """Add what a value costs, as edges from what is moved to what is kept."""
    producer = value.producer()
    readers = list(dict.fromkeys(use.node for use in value.uses()))
    inside = [node for node in readers if node in region.nodes]
    transposes = [
        node for node in readers if node.graph is region.graph and permutation_of(node) is not None
    ]
    outside = len(readers) > len(inside) + len(transposes) or value.is_graph_output()
    price = _price(value, perm)
    wanted, unwanted = ("permuted", value), ("as it was", value)
    for node in inside:
        network.add_edge(node, wanted)  # no capacity: never cut
        network.add_edge(unwanted, node)
    before = permutation_of(producer)
    if producer in region.nodes:
        _add(network, wanted, producer, price)
        _add(network, producer, _KEPT if outside else unwanted, price)
        for node in transposes:
            perm_of_reader = permutation_of(node)
            assert perm_of_reader is not None
            _add(network, _MOVED, producer, _price(value, perm_of_reader))
            _add(network, producer, _KEPT, _price(value, compose(inverse(perm), perm_of_reader)))
    elif before is not None:
        assert producer is not None
        source = producer.inputs[0]
        assert source is not None
        _add(network, wanted, _KEPT, _price(source, compose(before, perm)))
        if inside and not outside and not transposes:
            _add(network, _MOVED, unwanted, _price(source, before))
    else:
        _add(network, wanted, _KEPT, price)


def _add(network: networkx.DiGraph, start: object, end: object, price: int) -> None:
    """Add a price between two nodes of a network to what is there."""
    if network.has_edge(start, end):
        if "capacity" in network[start][end]:
            network[start][end]["capacity"] += price
    else:
        network.add_edge(start, end, capacity=price)


# Rewriting


def _apply(editor: Editor, region: Region, moved: set[ir.Node]) -> None:
    """Let nodes work on permuted values, with transpositions where that meets the others."""
    editor.modified = True
    opset = editor.graph.opset_imports.get("", 0)
    stored: dict[ir.Value, ir.Value] = {}
    ordered = [node for node in editor.graph if node in moved]
    for node in ordered:
        inputs = [
            _in_order(editor, node, value, region, stored)
            if value is not None and value in region.nodes[node]
            else value
            for value in node.inputs
        ]
        rule = rule_for(node, opset)
        assert rule is not None
        new = rule.build(editor, node, region.nodes[node], inputs)
        editor.graph.insert_before(node, new)
        stored.update(zip(node.outputs, new.outputs, strict=True))
    for node in ordered:
        for value in node.outputs:
            if value.name:
                _hand_over(editor, node, value, stored[value], region, moved)
    sources = [value for node in ordered for value in node.inputs if value is not None]
    editor.graph.remove(ordered, safe=True)
    for value in dict.fromkeys(sources):
        producer = value.producer()
        if producer is not None and producer not in moved:
            editor.remove_dead(producer)


def _in_order(
    editor: Editor,
    node: ir.Node,
    value: ir.Value,
    region: Region,
    stored: dict[ir.Value, ir.Value],
) -> ir.Value:
    """A value as the moved ``node`` reads it."""
    perm = region.layouts.get(value)
    if value not in stored:
        stored[value] = value if perm is None else transposed(editor, node, value, perm)
    return stored[value]


def transposed(editor: Editor, node: ir.Node, value: ir.Value, perm: Permutation) -> ir.Value:
    """A transposition in front of a node, merged with the one that made the value."""
    before = permutation_of(value.producer())
    producer = value.producer()
    if before is not None and producer is not None and producer.inputs[0] is not None:
        value, perm = producer.inputs[0], compose(before, perm)
    if perm == identity(len(perm)):
        return value
    dims = dims_of(value)
    shape = None if dims is None else permuted(dims, perm)
    return editor.emit(node, "Transpose", [value], shape, {"perm": perm})


def _hand_over(
    editor: Editor,
    node: ir.Node,
    old: ir.Value,
    new: ir.Value,
    region: Region,
    moved: set[ir.Node],
) -> None:
    """Give those who read ``old`` and were not moved what they expect."""
    outside = [use for use in old.uses() if use.node not in moved]
    if not outside and not old.is_graph_output():
        return
    perm = region.layouts.get(old)
    back = new if perm is None else transposed(editor, node, new, inverse(perm))
    if old.is_graph_output():
        name, old.name = old.name, editor.free_name(f"{old.name}__old")
        old.replace_all_uses_with(back, replace_graph_outputs=True)
        back.name, back.shape, back.type = name, old.shape, old.type
        return
    for use in outside:
        use.node.replace_input_with(use.idx, back)


# Single transpositions


def _merge_transposes(editor: Editor) -> None:
    """Make one transposition of two, and none of one that moves nothing."""
    for node in list(editor.graph):
        perm = permutation_of(node)
        source = node.inputs[0] if node.inputs else None
        if perm is None or source is None or node.graph is None:
            continue
        if perm == identity(len(perm)):
            if not (node.outputs[0].is_graph_output() and _is_interface(source)):
                editor.replace(node.outputs[0], source)
        elif permutation_of(source.producer()) is not None:
            result = transposed(editor, node, source, perm)
            if not (node.outputs[0].is_graph_output() and _is_interface(result)):
                editor.replace(node.outputs[0], result)
            elif result is not source:
                editor.remove_dead(result.producer() or node)


def _is_interface(value: ir.Value) -> bool:
    return value.producer() is None or value.is_graph_output()


def _reshape_instead(editor: Editor) -> None:
    """Write transpositions that only move axes of one element as reshapes."""
    for node in list(editor.graph):
        perm = permutation_of(node)
        source = node.inputs[0] if node.inputs else None
        dims = dims_of(source)
        if perm is None or source is None or dims is None or moves_data(dims, perm):
            continue
        target = permuted(dims, perm)
        sizes = [dim if isinstance(dim, int) else -1 for dim in target]
        if sizes.count(-1) > 1 or 0 in sizes:
            continue
        base = f"{node.outputs[0].name}__shape"
        shape = editor.constant(np.array(sizes, np.int64), base)
        editor.replace(node.outputs[0], editor.emit(node, "Reshape", [source, shape], target))
