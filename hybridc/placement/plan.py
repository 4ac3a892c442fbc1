"""The plan: parts with their borders, and the tensors that cross between devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from hybridc.frontend.shapes import Range
from hybridc.placement.group import Group, group_graph, is_numeric, read_values
from hybridc.placement.partition import partition
from hybridc.targets.protocol import Device, Section


@dataclass(frozen=True)
class Part:
    """A convex piece of the model on one device.

    Attributes:
        name: Name of the part.
        device: Where it runs.
        nodes: Its nodes in topological order.
        inputs: Values that it reads from outside at run time.
        outputs: Values that others or the caller read.
    """

    name: str
    device: Device
    nodes: tuple[ir.Node, ...]
    inputs: tuple[ir.Value, ...]
    outputs: tuple[ir.Value, ...]

    def section(self, opsets: Mapping[str, int], ranges: Mapping[str, Range]) -> Section:
        """What a target compiles for this part."""
        return Section(self.nodes, self.inputs, self.outputs, opsets, ranges)


@dataclass(frozen=True)
class Plan:
    """All parts in an order in which they can run.

    Attributes:
        parts: The parts.
        idle: Devices that were asked for and run none of them.
    """

    parts: tuple[Part, ...]
    idle: tuple[Device, ...] = ()

    def devices(self) -> list[Device]:
        """Devices that run a part, each once."""
        return list(dict.fromkeys(part.device for part in self.parts))

    def crossings(self) -> list[tuple[ir.Value, Device | None, Device]]:
        """Each tensor that a device reads and does not compute, with where it comes from.

        The source is ``None`` for an input of the model. A tensor that several parts of one
        device read crosses once.
        """
        home = {value: part.device for part in self.parts for value in part.outputs}
        found: dict[tuple[ir.Value, str], tuple[ir.Value, Device | None, Device]] = {}
        for part in self.parts:
            for value in part.inputs:
                if home.get(value) != part.device:
                    crossing = (value, home.get(value), part.device)
                    found.setdefault((value, part.device.name), crossing)
        return list(found.values())


def make_plan(
    graph: ir.Graph,
    groups: Sequence[Group],
    devices: Sequence[Device],
    default: Device,
    remote: str | None = None,
) -> Plan:
    """Cut a graph whose groups are placed into parts.

    Args:
        graph: The model after the passes.
        groups: Its groups in topological order.
        devices: The device of each group.
        default: Device for a graph without nodes.
        remote: Name of the device on a server, which gets nothing that it need not have.
    """
    readers = _readers(graph)
    by_name = {device.name: device for device in devices}
    cut = partition(
        group_graph(groups), {index: device.name for index, device in enumerate(devices)}
    )
    parts = [
        _make_part(f"part{number}", by_name[devices[indices[0]].name], groups, indices, readers)
        for number, indices in enumerate(cut)
    ]
    if not parts:  # a graph without nodes still has outputs to give
        values = [value for value in _run_time(graph) if is_numeric(value)]
        outputs = [value for value in graph.outputs if value not in graph.inputs or value in values]
        parts = [Part("part0", default, (), tuple(values), tuple(outputs))]
    return Plan(tuple(_with_passed_through(parts, graph, remote)))


def _run_time(graph: ir.Graph) -> list[ir.Value]:
    return [value for value in graph.inputs if value.const_value is None]


def _make_part(
    name: str,
    device: Device,
    groups: Sequence[Group],
    indices: Sequence[int],
    readers: Mapping[ir.Value, Sequence[ir.Node]],
) -> Part:
    graph = groups[indices[0]].nodes[0].graph
    assert isinstance(graph, ir.Graph)
    position = {node: index for index, node in enumerate(graph)}
    nodes = sorted((n for i in indices for n in groups[i].nodes), key=position.__getitem__)
    inside = set(nodes)
    read = dict.fromkeys(value for node in nodes for value in read_values(node))
    inputs = [value for value in read if _crosses_in(value, inside, graph)]
    outputs = [v for node in nodes for v in node.outputs if _crosses_out(v, inside, readers)]
    return Part(name, device, tuple(nodes), tuple(inputs), tuple(outputs))


def _crosses_in(value: ir.Value, inside: set[ir.Node], graph: ir.Graph) -> bool:
    if value.const_value is not None:
        return False
    producer = value.producer()
    if producer is None:
        return value.is_graph_input() and value.graph is graph
    return producer not in inside and producer.graph is graph


def _crosses_out(
    value: ir.Value, inside: set[ir.Node], readers: Mapping[ir.Value, Sequence[ir.Node]]
) -> bool:
    if value.is_graph_output():
        return True
    return any(node not in inside for node in readers.get(value, ()))


def _readers(graph: ir.Graph) -> dict[ir.Value, list[ir.Node]]:
    """Nodes of the graph that read each value, themselves or in a subgraph of theirs."""
    readers: dict[ir.Value, list[ir.Node]] = {}
    for node in graph:
        for value in read_values(node):
            readers.setdefault(value, []).append(node)
    return readers


def _with_passed_through(parts: list[Part], graph: ir.Graph, remote: str | None) -> list[Part]:
    """Let the last part here also give outputs that no node computes: inputs and constants.

    Inputs that are no tensors of numbers need no part: they are handed back as they are.
    """
    computed = {value for part in parts for value in part.outputs}
    computed.update(value for value in graph.inputs if not is_numeric(value))
    missing = [value for value in dict.fromkeys(graph.outputs) if value not in computed]
    if not missing:
        return parts
    here = [index for index, part in enumerate(parts) if part.device.name != remote]
    index = here[-1] if here else len(parts) - 1
    last = parts[index]
    extra = [v for v in missing if v.const_value is None and v not in last.inputs]
    inputs, outputs = (*last.inputs, *extra), (*last.outputs, *missing)
    changed = Part(last.name, last.device, last.nodes, inputs, outputs)
    return [*parts[:index], changed, *parts[index + 1 :]]


def value_bytes(value: ir.Value) -> int:
    """Bytes of a value; 0 where its shape is dynamic or unknown, or where it holds strings."""
    if value.shape is None or value.dtype is None or not value.shape.is_static():
        return 0
    if value.dtype == ir.DataType.STRING:
        return 0
    count = 1
    for dim in value.shape.numpy():
        count *= dim
    return int(count * max(value.dtype.itemsize, 1))  # no number has less than a byte
