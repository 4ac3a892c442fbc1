"""Scopes: the values that are known while a graph, or a subgraph inside it, is lowered."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import onnx_ir as ir
from tvm import relax, tirx

from hybridc.errors import InternalError
from hybridc.lowering import folding, symbolic, widening
from hybridc.lowering.call import Call, Invalid, RanksDiffer, Unsupported
from hybridc.lowering.checks import title
from hybridc.lowering.ops import OperatorTable, narrow
from hybridc.lowering.ops.control import either
from hybridc.lowering.sizes import check_sizes
from hybridc.lowering.value import Constant, Expression, Value, Widened

_FAILURES = (
    RuntimeError,
    ValueError,
    TypeError,
    LookupError,
    ArithmeticError,
    MemoryError,
)
"""What TVM and numpy raise for a node that makes no sense."""

_FAULTS = (AttributeError, AssertionError, NameError)
"""What no model may cause: these are faults of hybridc, not reasons to refuse a node."""

INLINE_BYTES = 16
"""Constants of at most this size are written into the code instead of the weights."""

MAX_SPLITS = 4
"""Splits one in another; each doubles the code of what follows."""


@dataclass(frozen=True)
class Context:
    """What all scopes of one section share.

    Attributes:
        builder: Builder of the function under construction.
        table: Converters.
        opsets: Imported version by domain.
        dimensions: Variables of the dynamic dimensions by name.
        weights: Arrays with the variables that read them, by ONNX name.
        widens: Whether float16 and bfloat16 are computed in float32, and rounded only where their
            type matters.
    """

    builder: relax.BlockBuilder
    table: OperatorTable
    opsets: Mapping[str, int]
    dimensions: dict[str, tirx.Var] = field(default_factory=dict)
    weights: dict[str, tuple[np.ndarray[Any, Any], relax.Var]] = field(default_factory=dict)
    widens: bool = False

    def weight(self, constant: Constant) -> Expression:
        """A constant as a run-time tensor: written into the code, or a weight.

        One without elements is a weight, since TVM cannot read it back out of the code.
        """
        if 0 < constant.array.nbytes <= INLINE_BYTES:
            return relax.const(constant.array, str(constant.array.dtype))
        name = self._weight_name(constant)
        if name not in self.weights:
            kind = relax.TensorType(constant.array.shape, str(constant.array.dtype))
            variable = relax.Var(f"weight_{len(self.weights)}", kind)
            self.weights[name] = (constant.array, variable)
        return self.weights[name][1]

    def _weight_name(self, constant: Constant) -> str:
        """The constant's name, with a number where subgraphs use one name for different arrays."""
        name, number = constant.name, 0
        while name in self.weights and not _same(self.weights[name][0], constant.array):
            number += 1
            name = f"{constant.name}__{number}"
        return name

    def dimension(self, dim: int | ir.SymbolicDim) -> Any:
        """A dimension as an int or as the variable of its name."""
        if isinstance(dim, int):
            return dim
        name = str(dim.value)
        return self.dimensions.setdefault(name, tirx.Var(name, "int64"))


@dataclass(frozen=True)
class Scope:
    """Values of one graph; those of the graphs around it are looked up in the parent.

    Attributes:
        context: What all scopes share.
        values: What values were lowered to.
        parent: The scope around this one.
        splits: How many times what is lowered here goes into both branches of an If.
    """

    context: Context
    values: dict[ir.Value, Value] = field(default_factory=dict)
    parent: Scope | None = None
    splits: int = 0

    def value(self, value: ir.Value) -> Value:
        """What a value was lowered to, in the type that the model gives it."""
        found = self.held(value)
        if isinstance(found, Widened):
            return widening.rounded(self.context.builder, found)
        return found

    def held(self, value: ir.Value) -> Value:
        """What a value was lowered to, in whatever form it is kept."""
        scope: Scope | None = self
        while scope is not None:
            if value in scope.values:
                return scope.values[value]
            scope = scope.parent
        if value.const_value is None:
            raise InternalError(f"value {value.name!r} is read before it is computed")
        constant = narrow.known(str(value.name), value.const_value.numpy())
        self.values[value] = constant
        return constant

    def lower_node(self, node: ir.Node) -> None:
        """Lower one node and note its results.

        Raises:
            Unsupported: The node cannot be lowered; with the reason.
        """
        wide = self._widens(node)
        call = self._call(node, wide)
        results = _results(call, self.context.table)
        check_sizes(call, results)
        if wide:
            results = tuple(map(widening.noted, node.outputs, results))
        self.values.update(zip(node.outputs, results, strict=False))

    def _widens(self, node: ir.Node) -> bool:
        """Whether a node is computed in float32 in place of a type of 16 bits."""
        return self.context.widens and widening.applies(
            node, [self.held(value) for value in node.inputs if value is not None]
        )

    def _call(self, node: ir.Node, wide: bool = False) -> Call:
        context = self.context
        read = self._wide if wide else self.value
        inputs = [None if value is None else read(value) for value in node.inputs]
        opset = context.opsets.get(node.domain, 1)
        return Call(node, inputs, opset, context.builder, context.weight, self.lower_graph)

    def _wide(self, value: ir.Value) -> Value:
        """What a value was lowered to, in float32 if its type has 16 bits."""
        found = widening.widened(self.context.builder, self.held(value))
        if isinstance(found, Widened):
            self.values[value] = found  # so that it is converted once
            return found.tensor
        return found

    def lower_graph(self, graph: ir.Graph, inputs: Mapping[ir.Value, Value]) -> list[Value]:
        """Lower a subgraph where the builder stands; returns its outputs."""
        scope = Scope(self.context, dict(inputs), self, self.splits)
        return scope.lower_rest(list(graph), giving(graph.outputs))

    def lower_rest(self, nodes: Sequence[ir.Node], finish: Finish) -> list[Value]:
        """Lower the nodes from one on to the end of a graph; returns what ``finish`` gives.

        Args:
            nodes: The nodes.
            finish: Called at the end with the scope where the nodes' results are.
        """
        weights = dict(self.context.weights)
        for position, node in enumerate(nodes):
            try:
                self.lower_node(node)
            except RanksDiffer:
                return self.lower_split(node, nodes[position + 1 :], finish)
            except Unsupported as refusal:
                self.context.weights.clear()
                self.context.weights.update(weights)
                where = f"{node.name} ({node.op_type}): {refusal}"
                if isinstance(refusal, Invalid):  # of nested subgraphs, the innermost one is named
                    raise refusal if refusal.__cause__ else Invalid(where) from refusal
                raise Unsupported(f"in its subgraph, {where}") from refusal
        return finish(self)

    def lower_split(self, node: ir.Node, rest: Sequence[ir.Node], finish: Finish) -> list[Value]:
        """Lower an If whose results differ in rank: all that follows it goes into both branches.

        The ranks may differ because they do so for an If inside of a branch. That one is split too,
        and all that follows this one goes into both branches of it.

        Args:
            node: The If.
            rest: The nodes behind it.
            finish: What follows those.

        Raises:
            Unsupported: That would make too much code.
        """
        if node.op_type != "If" or self.splits == MAX_SPLITS:
            raise Unsupported(
                f"results that differ in rank, in {node.op_type} or {MAX_SPLITS} deep"
            )

        def way(branch: ir.Graph) -> list[Value]:
            def go_on(inside: Scope) -> list[Value]:
                results = map(inside.held, branch.outputs)
                known = dict(zip(node.outputs, results, strict=True))
                return Scope(self.context, known, self, inside.splits).lower_rest(rest, finish)

            return Scope(self.context, {}, self, self.splits + 1).lower_rest(list(branch), go_on)

        return list(either(self._call(node), way))


Finish: TypeAlias = Callable[[Scope], list[Value]]
"""Gives the results at the end of a graph."""


def giving(outputs: Sequence[ir.Value]) -> Finish:
    """What ends a graph: its outputs."""
    return lambda scope: [scope.value(value) for value in outputs]


def _results(call: Call, table: OperatorTable) -> tuple[Value, ...]:
    """What a node computes: known already, or as its converter builds it."""
    try:
        known = symbolic.evaluate(call)
        results = folding.fold(call) if known is None else (known,)
        return _convert(call, table) if results is None else results
    except _FAILURES as error:
        raise Unsupported(f"lowering failed: {_last_line(error)}") from error
    except _FAULTS as error:
        what = f"{type(error).__name__}: {_last_line(error)}"
        raise InternalError(f"lowering {title(call)} failed: {what}") from error


def _convert(call: Call, table: OperatorTable) -> tuple[Value, ...]:
    node = call.node
    convert = table.find(node.domain, node.op_type, call.opset)
    if convert is None:
        domain = node.domain or "ai.onnx"
        raise Unsupported(f"{domain} {node.op_type} at opset {call.opset} has no converter")
    return narrow.convert(call, convert)


def _same(left: np.ndarray[Any, Any], right: np.ndarray[Any, Any]) -> bool:
    if left is right:
        return True
    return left.dtype == right.dtype and left.shape == right.shape and bool((left == right).all())


def _last_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
