"""What matters of a Relax module for layouts: kernels that could work on blocked tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import tvm
from hybridc.targets.fitting import Misfit, if_it_fits
from hybridc.targets.llvm.cpu import Cpu
from hybridc.targets.llvm.layout.channelwise import CHANNELS, RANKS, Blocked, block_kernel
from hybridc.targets.llvm.layout.convolutions import (
    PlainConvolution,
    find_plain_convolution,
)
from hybridc.targets.llvm.layout.shuffles import Shuffle, find_shuffles
from hybridc.targets.llvm.sizes import Bounds, ranges_of, typical_size
from tvm import relax, tirx

from hybridc.bundle.tensors import Array


@dataclass(frozen=True)
class Kernel:
    """A call of a kernel that could work on blocked tensors.

    Attributes:
        variable: What the result is bound to.
        call: The call.
        operands: The tensors that it takes.
        primitives: The sizes that it takes.
        convolution: What it computes, if it is a convolution of known weights.
        blocked: Itself on blocked tensors, if it treats channels alike.
    """

    variable: Any
    call: Any
    operands: tuple[Any, ...]
    primitives: tuple[Any, ...] = ()
    convolution: PlainConvolution | None = None
    blocked: Blocked | None = None

    def carried(self, graph: Graph) -> list[Any]:
        """The operands, computed at run time, whose layout follows the kernel's."""
        if self.convolution is not None:
            return [self.operands[0]]
        axes = self.blocked.axes if self.blocked is not None else ()
        return [
            operand
            for operand, axis in zip(self.operands, axes, strict=False)
            if axis is not None and operand not in graph.weight_of
        ]


@dataclass
class Graph:
    """What is known about a module.

    Attributes:
        module: The module.
        weights: The weights by name, in order.
        lanes: Channels of one block.
        kernels: Kernels that could work on blocked tensors, by the variable they are bound to.
        weight_of: Position among the weights, by variable.
        plain_uses: Variables that something else than these kernels' carried operands reads.
        ranges: What is known of the variables in shapes.
        absorbed: For what shuffles make, the variable of the convolution that may take them in.
    """

    module: tvm.IRModule
    weights: Mapping[str, Array]
    lanes: int
    kernels: dict[Any, Kernel] = field(default_factory=dict)
    weight_of: dict[Any, int] = field(default_factory=dict)
    plain_uses: set[Any] = field(default_factory=set)
    ranges: Bounds = field(default_factory=dict)
    absorbed: dict[Any, Any] = field(default_factory=dict)

    def typical_sizes(self, variable: Any) -> tuple[int, ...]:
        """The shape of a variable, with typical sizes where they are not known."""
        return tuple(typical_size(dim, self.ranges) for dim in dims_of(variable))


def read_graph(module: tvm.IRModule, weights: Mapping[str, Array], cpu: Cpu) -> Graph:
    """Find all kernels of ``main`` that could work on blocked tensors."""
    main = module["main"]
    graph = Graph(module, weights, cpu.vector_bytes // 4, ranges=ranges_of(main))
    bindings = list(bindings_of(main))
    reader = _Reader(graph, find_shuffles(module, bindings, count_uses(main)))
    for binding in bindings:
        reader.read(binding)
    for binding in bindings:
        if binding.var in graph.absorbed:
            continue
        kernel = graph.kernels.get(binding.var)
        carried = kernel.carried(graph) if kernel is not None else []
        graph.plain_uses |= {v for v in variables_used(binding.value) if v not in carried}
    graph.plain_uses |= variables_used(main.body.body)
    return graph


def count_uses(function: relax.Function) -> Counter[Any]:
    """How many bindings read each variable; the result counts as one more."""
    uses = Counter(v for b in bindings_of(function) for v in variables_used(b.value))
    return uses + Counter(variables_used(function.body.body))


def bindings_of(function: relax.Function) -> Iterator[Any]:
    """The bindings of a function's outermost blocks, in order."""
    for block in function.body.blocks:
        yield from block.bindings


def called_kernel(module: tvm.IRModule, value: Any) -> tirx.PrimFunc | None:
    """The tensor program that a value calls with tensors alone."""
    is_call = getattr(getattr(value, "op", None), "name", "") == "relax.call_tir"
    return module[value.args[0]] if is_call and len(value.args) == 2 else None


def sizes_of(variable: Any) -> tuple[int, ...]:
    """Static shape of a variable.

    Raises:
        Misfit: It has none.
    """
    shape = getattr(variable.ty, "shape", None)
    if shape is None or not all(isinstance(dim, tirx.IntImm) for dim in shape.values):
        raise Misfit("no static shape")
    return tuple(int(dim) for dim in shape.values)


def dims_of(variable: Any) -> tuple[Any, ...]:
    """Shape of a variable: numbers, and expressions for what is not known.

    Raises:
        Misfit: Not even its rank is known.
    """
    shape = getattr(variable.ty, "shape", None)
    if not isinstance(shape, relax.ShapeExpr):
        raise Misfit("no shape")
    return tuple(int(dim) if isinstance(dim, tirx.IntImm) else dim for dim in shape.values)


def variables_used(expression: Any) -> set[Any]:
    """Relax variables that an expression reads, inner blocks included."""
    source = getattr(expression, "tuple_value", None)
    if isinstance(source, tvm.ir.Var):
        return {source}  # a visit would go through the types of all its fields
    found: set[Any] = set()

    def visit(node: Any) -> None:
        if isinstance(node, tvm.ir.Var):
            found.add(node)

    relax.analysis.post_order_visit(expression, visit)
    return found


@dataclass
class _Reader:
    """Reads bindings; kernels that occur several times are analyzed once."""

    graph: Graph
    shuffles: Mapping[Any, Shuffle]
    known: dict[Any, tuple[PlainConvolution | None, Blocked | None]] = field(default_factory=dict)

    def read(self, binding: Any) -> None:
        """Add a binding to the graph."""
        value: Any = getattr(binding, "value", None)
        weights = self.graph.module["main"].params[-1]
        if isinstance(value, tvm.ir.TupleGetItem) and value.tuple_value.same_as(weights):
            self.graph.weight_of[binding.var] = int(value.index)
        elif self._is_kernel_call(value):
            fields = list(value.args[1].fields)
            operands = tuple(field for field in fields if isinstance(field.ty, relax.TensorType))
            sizes = tuple(fields[len(operands) :])
            found = self._analyze(value.args[0])
            kernel = self._absorbing(Kernel(binding.var, value, operands, sizes, *found))
            if self._is_usable(kernel):
                self.graph.kernels[binding.var] = kernel

    def _is_usable(self, kernel: Kernel) -> bool:
        """Whether all operands can be had in the form that the blocked kernel takes."""
        if kernel.convolution is not None:
            return kernel.operands[1] in self.graph.weight_of
        if kernel.blocked is None:
            return False
        known = self.graph.weight_of
        axes = zip(kernel.operands, kernel.blocked.axes, strict=False)
        carried = [(o, axis) for o, axis in axes if axis is not None and o not in known]
        fit = all(axis == CHANNELS and len(dims_of(o)) in RANKS for o, axis in carried)
        return fit and bool(carried)

    def _absorbing(self, kernel: Kernel) -> Kernel:
        """The kernel, reading what is shuffled if it is a grouped convolution of a shuffle."""
        found = kernel.convolution
        if found is None or found.found.groups == 1 or found.is_depthwise:
            return kernel
        shuffle = self.shuffles.get(kernel.operands[0])
        if shuffle is None:
            return kernel
        self.graph.absorbed |= dict.fromkeys(shuffle.variables, kernel.variable)
        operands = (shuffle.source, *kernel.operands[1:])
        return replace(
            kernel, operands=operands, convolution=replace(found, shuffled=shuffle.parts)
        )

    def _is_kernel_call(self, value: Any) -> bool:
        if not isinstance(value, tvm.ir.Call) or getattr(value.op, "name", "") != "relax.call_tir":
            return False
        plain = isinstance(value.args[1], relax.Tuple) and len(value.args) == 2
        return plain and all(isinstance(field, tvm.ir.Var) for field in value.args[1].fields)

    def _analyze(self, variable: Any) -> tuple[PlainConvolution | None, Blocked | None]:
        if variable not in self.known:
            self.known[variable] = self._analyze_function(self.graph.module[variable])
        return self.known[variable]

    def _analyze_function(
        self, function: tirx.PrimFunc
    ) -> tuple[PlainConvolution | None, Blocked | None]:
        output = function.params[-1]
        if str(getattr(output, "dtype", "")) != "float32" or len(output.shape) not in RANKS:
            return None, None
        plain = if_it_fits(partial(find_plain_convolution, function))
        if plain is not None:
            return plain, None
        return None, if_it_fits(partial(block_kernel, function, self.graph.lanes))
