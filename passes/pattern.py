"""Patterns over the values of a graph, written as the arithmetic that they stand for.

    x = Variable("x")
    gelu = x * (1 + operation("Erf", x * sqrt(0.5))) * 0.5

``match`` walks from a value up to its producers. Operands of commutative operators match in either
order, a multiplication by a number also matches a division by its inverse, and a number matches a
constant of one element. A match holds only if nothing outside of it reads a value inside of it,
so that its nodes can go.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias, Union

import numpy as np
import onnx_ir as ir
from hybridc.passes.editor import number

TOLERANCE = 1e-6
"""Relative difference up to which a constant counts as the number of a pattern."""

_COMMUTATIVE = frozenset(("Add", "Mul", "Max", "Min"))

Operand: TypeAlias = Union["Pattern", float]


@dataclass(frozen=True)
class Match:
    """What a pattern found.

    Attributes:
        values: Values by the name of the variable they stand for.
        nodes: Nodes by the label of the operation they stand for.
        inside: All nodes of the match.
    """

    values: Mapping[str, ir.Value] = field(default_factory=dict)
    nodes: Mapping[str, ir.Node] = field(default_factory=dict)
    inside: tuple[ir.Node, ...] = ()


@dataclass(frozen=True)
class Pattern:
    """A pattern; arithmetic on patterns makes larger ones."""

    def __add__(self, other: Operand) -> Pattern:
        return operation("Add", self, other)

    def __sub__(self, other: Operand) -> Pattern:
        return operation("Sub", self, other)

    def __mul__(self, other: Operand) -> Pattern:
        product = operation("Mul", self, other)
        if isinstance(other, Pattern) or other == 0:
            return product
        return product | operation("Div", self, 1 / other)

    def __truediv__(self, other: Operand) -> Pattern:
        return operation("Div", self, other) if isinstance(other, Pattern) else self * (1 / other)

    def __or__(self, other: Pattern) -> Pattern:
        return Either((self, other))

    __radd__ = __add__
    __rmul__ = __mul__

    def find(self, value: ir.Value, found: Match) -> Iterator[Match]:
        """All ways in which the pattern matches a value, given what was found before."""
        raise NotImplementedError


@dataclass(frozen=True)
class Variable(Pattern):
    """Any value, the same one wherever the variable stands.

    Attributes:
        name: Name of the variable.
        condition: What else the value must fulfill.
    """

    name: str
    condition: Callable[[ir.Value], bool] | None = None

    def find(self, value: ir.Value, found: Match) -> Iterator[Match]:
        """Bind the variable, or compare with what it was bound to."""
        bound = found.values.get(self.name)
        if bound is not None:
            if bound is value:
                yield found
        elif self.condition is None or self.condition(value):
            yield Match({**found.values, self.name: value}, found.nodes, found.inside)


@dataclass(frozen=True)
class Number(Pattern):
    """A constant of one element with a given value."""

    value: float

    def find(self, value: ir.Value, found: Match) -> Iterator[Match]:
        """Compare within :data:`TOLERANCE`, or exactly after rounding to the constant's type."""
        actual = number(value)
        if actual is not None and is_close(actual, self.value, value.dtype):
            yield found


@dataclass(frozen=True)
class Either(Pattern):
    """One of several patterns."""

    alternatives: tuple[Pattern, ...]

    def find(self, value: ir.Value, found: Match) -> Iterator[Match]:
        """Try one after the other."""
        for alternative in self.alternatives:
            yield from alternative.find(value, found)


@dataclass(frozen=True)
class Operation(Pattern):
    """The first output of a node.

    Attributes:
        operator: Operator of the default domain.
        operands: Patterns of its first inputs.
        attributes: Numbers that attributes must have.
        label: Name under which the node is found in the match; it may then have more inputs.
    """

    operator: str
    operands: tuple[Pattern, ...]
    attributes: tuple[tuple[str, float], ...] = ()
    label: str | None = None

    def find(self, value: ir.Value, found: Match) -> Iterator[Match]:
        """Match the producer and then its inputs in every order that means the same."""
        node = value.producer()
        if node is None or node.op_type != self.operator or node.domain:
            return
        if node.outputs[0] is not value or not self._fits(node):
            return
        nodes = {**found.nodes, self.label: node} if self.label else found.nodes
        found = Match(found.values, nodes, (*found.inside, node))
        inputs = list(node.inputs[: len(self.operands)])
        swap = self.operator in _COMMUTATIVE and len(inputs) == 2
        orders = [inputs, inputs[::-1]] if swap and inputs[0] is not inputs[1] else [inputs]
        for order in orders:
            yield from _find_all(self.operands, order, found)

    def _fits(self, node: ir.Node) -> bool:
        count = len(node.inputs)
        if count < len(self.operands) or (self.label is None and count > len(self.operands)):
            return False
        return all(
            name in node.attributes and is_close(node.attributes[name].value, wanted)
            for name, wanted in self.attributes
        )


def _find_all(
    patterns: tuple[Pattern, ...], values: list[ir.Value | None], found: Match
) -> Iterator[Match]:
    if not patterns:
        yield found
        return
    if values[0] is None:
        return
    for first in patterns[0].find(values[0], found):
        yield from _find_all(patterns[1:], values[1:], first)


def is_close(actual: float, wanted: float, dtype: ir.DataType | None = None) -> bool:
    """Whether a constant of a type stands for a number."""
    if abs(actual - wanted) <= TOLERANCE * abs(wanted) or actual == wanted:
        return True
    if dtype is None or not dtype.is_floating_point():
        return False
    return actual == float(np.array(wanted).astype(dtype.numpy()))


def operation(
    operator: str, *operands: Operand, label: str | None = None, **attributes: float
) -> Operation:
    """A node with these operands; see :class:`Operation`."""
    patterns = tuple(o if isinstance(o, Pattern) else Number(o) for o in operands)
    return Operation(operator, patterns, tuple(attributes.items()), label)


def either(*alternatives: Pattern) -> Pattern:
    """One of several patterns."""
    return Either(alternatives)


def product(first: Pattern, second: Operand, third: Operand) -> Pattern:
    """A product of three factors, whichever two are multiplied first."""
    factors = (first, second, third)
    return either(
        *(
            times(times(factors[i], factors[j]), factors[k])
            for i, j, k in itertools.permutations(range(3))
            if i < j
        )
    )


def times(left: Operand, right: Operand) -> Pattern:
    """A product of two factors, one of them a pattern."""
    if isinstance(left, Pattern):
        return left * right
    assert isinstance(right, Pattern)
    return right * left


def square(operand: Pattern) -> Pattern:
    """``operand * operand`` or its second power."""
    return operation("Mul", operand, operand) | operation("Pow", operand, 2)


def clip(operand: Pattern, low: float, high: float) -> Pattern:
    """The operand between two bounds."""
    return either(
        operation("Clip", operand, low, high),
        operation("Clip", operand, min=low, max=high),
        operation("Min", operation("Max", operand, low), high),
        operation("Max", operation("Min", operand, high), low),
    )


def over_root(numerator: Pattern, radicand: Pattern) -> Pattern:
    """``numerator / sqrt(radicand)`` in its several forms."""
    root = operation("Sqrt", radicand)
    return either(
        operation("Div", numerator, root),
        numerator * operation("Reciprocal", root),
        numerator * operation("Div", Number(1), root),
        numerator * operation("Pow", radicand, -0.5),
        operation("Div", numerator, operation("Pow", radicand, 0.5)),
    )


def match(pattern: Pattern, value: ir.Value) -> Match | None:
    """The first way in which a pattern matches a value and its inner values are not read outside.

    Args:
        pattern: The pattern.
        value: The result that it is to compute.
    """
    for found in pattern.find(value, Match()):
        if _is_closed(found, value):
            return found
    return None


def _is_closed(found: Match, root: ir.Value) -> bool:
    inside = set(found.inside)
    graph = root.graph
    for node in inside:
        if node.graph is not graph:
            return False
        for value in node.outputs:
            if value is root:
                continue
            if value.is_graph_output() or any(use.node not in inside for use in value.uses()):
                return False
    return True
