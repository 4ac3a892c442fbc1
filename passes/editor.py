"""What passes need to change a graph: constants, new nodes, and values in place of others."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import onnx_ir as ir

Array: TypeAlias = np.ndarray[Any, Any]
Dims: TypeAlias = Sequence[int | ir.SymbolicDim]


@dataclass
class Editor:
    """Changes one graph and keeps the names of its values unique.

    Attributes:
        graph: The graph.
        modified: Whether anything was replaced.
    """

    graph: ir.Graph
    modified: bool = False
    _names: set[str] = field(default_factory=set, repr=False)

    def __post_init__(self) -> None:
        self._names.update(_all_names(self.graph))

    def free_name(self, base: str) -> str:
        """A name that no value has, made from ``base``."""
        name, number = base, 0
        while name in self._names:
            number += 1
            name = f"{base}_{number}"
        self._names.add(name)
        return name

    def constant(self, array: Array, base: str) -> ir.Value:
        """A new initializer; ``base`` is a stem for its name."""
        name = self.free_name(base)
        tensor = ir.tensor(np.ascontiguousarray(array).reshape(array.shape), name=name)
        value = ir.Value(
            name=name,
            shape=ir.Shape(array.shape),
            type=ir.TensorType(tensor.dtype),
            const_value=tensor,
        )
        self.graph.register_initializer(value)
        return value

    def emit(
        self,
        before: ir.Node,
        operator: str,
        inputs: Sequence[ir.Value | None],
        shape: Dims | None,
        attributes: dict[str, Any] | None = None,
        domain: str = "",
        dtype: ir.DataType | None = None,
    ) -> ir.Value:
        """Insert a node of one output.

        Args:
            before: The node that it goes in front of.
            operator: ONNX operator.
            inputs: Its inputs.
            shape: Shape of its output, if known.
            attributes: Its attributes.
            domain: The operator's domain.
            dtype: Element type of its output, if that is not the one of its first input.
        """
        first = inputs[0]
        assert first is not None
        output = ir.Value(
            name=self.free_name(f"{before.outputs[0].name}__{operator.lower()}"),
            shape=None if shape is None else ir.Shape(shape),
            type=first.type if dtype is None else ir.TensorType(dtype),
        )
        node = ir.node(operator, inputs, attributes, domain=domain, outputs=[output])
        self.graph.insert_before(before, node)
        return output

    def replace(self, old: ir.Value, new: ir.Value) -> None:
        """Let all readers of ``old`` read ``new``, and remove what nobody reads any more.

        A graph output keeps its name, type and shape.
        """
        self.modified = True
        producer = old.producer()
        if not old.is_graph_output():
            old.replace_all_uses_with(new)
        elif new.producer() is None or new.is_graph_output() or new.graph is not self.graph:
            assert producer is not None
            identity = self.emit(producer, "Identity", [new], dims_of(old))
            self._take_over(old, identity)
        else:
            self._take_over(old, new)
        if producer is not None:
            self.remove_dead(producer)

    def _take_over(self, old: ir.Value, new: ir.Value) -> None:
        """Let ``new`` be the graph output that ``old`` was."""
        old.replace_all_uses_with(new, replace_graph_outputs=True)
        name, old.name = old.name, self.free_name(f"{old.name}__old")
        new.name, new.shape, new.type = name, old.shape, old.type

    def remove_dead(self, node: ir.Node) -> None:
        """Remove a node that nobody reads, and those that were there only for it."""
        waiting = [node]
        while waiting:
            candidate = waiting.pop()
            if candidate.graph is not self.graph or not is_dead(candidate):
                continue
            producers = [v.producer() for v in dict.fromkeys(candidate.inputs) if v is not None]
            self.graph.remove(candidate, safe=True)
            waiting += [producer for producer in producers if producer is not None]


def _all_names(graph: ir.Graph) -> Iterator[str]:
    """Names of all values, in subgraphs too."""
    graphs = [graph, *(g for g in graph.subgraphs())]
    for each in graphs:
        for value in (*each.inputs, *each.initializers.values()):
            yield str(value.name)
    for node in ir.traversal.RecursiveGraphIterator(graph):
        for value in node.outputs:
            yield str(value.name)


def is_dead(node: ir.Node) -> bool:
    """Whether nothing reads any output of a node."""
    return not any(value.uses() or value.is_graph_output() for value in node.outputs)


def contents(value: ir.Value | None) -> Array | None:
    """What a constant holds; ``None`` for any other value."""
    if value is None or value.const_value is None or value.is_graph_input():
        return None
    return value.const_value.numpy()


def number(value: ir.Value | None) -> float | None:
    """The number that a constant of one element holds; ``None`` for any other value."""
    if value is None or value.const_value is None or value.const_value.size != 1:
        return None
    array = contents(value)
    return None if array is None or array.dtype.kind in "OSU" else float(array.reshape(()).item())


def integers(value: ir.Value | None) -> list[int] | None:
    """The elements of a constant of integers; ``None`` for any other value."""
    array = contents(value)
    if array is None or array.dtype.kind not in "iu":
        return None
    return [int(element) for element in array.ravel()]


def static_shape(value: ir.Value | None) -> tuple[int, ...] | None:
    """The shape of a value if all of it is known."""
    if value is None or value.shape is None or not value.shape.is_static():
        return None
    return tuple(value.shape.numpy())


def values_of(graph: ir.Graph) -> Iterator[ir.Value]:
    """The inputs, initializers and results of a graph, without those of graphs within it."""
    yield from (*graph.inputs, *graph.initializers.values())
    for node in graph:
        yield from node.outputs


def dims_of(value: ir.Value | None) -> tuple[int | ir.SymbolicDim, ...] | None:
    """The dimensions of a value of known rank."""
    return None if value is None or value.shape is None else tuple(value.shape)


def same_dim(left: int | ir.SymbolicDim, right: int | ir.SymbolicDim) -> bool:
    """Whether two dimensions are known to be equal: the same number or the same name."""
    if isinstance(left, int) or isinstance(right, int):
        return left == right
    return left.value is not None and left.value == right.value


def same_shape(left: ir.Value | None, right: ir.Value | None) -> bool:
    """Whether two values are known to have the same shape."""
    dims, others = dims_of(left), dims_of(right)
    if dims is None or others is None or len(dims) != len(others):
        return False
    return all(map(same_dim, dims, others))


def only_reader(value: ir.Value) -> ir.Node | None:
    """The node that alone reads a value, once; ``None`` if there are more, or it is an output."""
    uses = list(value.uses())
    if len(uses) != 1 or value.is_graph_output():
        return None
    return uses[0].node


def normalized_axes(axes: Iterable[int], rank: int) -> tuple[int, ...]:
    """Axes counted from the front, in order."""
    return tuple(sorted(axis + rank if axis < 0 else axis for axis in axes))


def reduced_axes(node: ir.Node) -> tuple[int, ...] | None:
    """Axes of a Reduce operator, from the attribute or the input; ``None`` if not known."""
    dims = dims_of(node.inputs[0])
    if dims is None:
        return None
    axes: Sequence[int] | None = None
    if "axes" in node.attributes:
        axes = list(node.attributes["axes"].value)
    elif len(node.inputs) > 1 and node.inputs[1] is not None:
        axes = integers(node.inputs[1])
        if axes is None:
            return None
    if not axes:
        idle = node.attributes.get_int("noop_with_empty_axes", 0)
        return () if idle else tuple(range(len(dims)))
    return normalized_axes(axes, len(dims))
