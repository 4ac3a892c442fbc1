"""Lower one part of a model: its nodes, in order, to one Relax function.

The function is ``main(input 0, input 1, ..., weights)`` and returns a tuple of the part's
outputs. The weights are one tuple, so that a call passes one handle however many there are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
import tvm
from tvm import relax, te

from hybridc.bundle.dtypes import NARROW
from hybridc.errors import InternalError, UnsupportedError
from hybridc.frontend.limits import MAX_TENSOR_BYTES
from hybridc.lowering.bounds import known_bounds
from hybridc.lowering.call import Call, RanksDiffer, Unsupported, dtype_of, shape_of
from hybridc.lowering.ops import OperatorTable
from hybridc.lowering.scope import Context, Scope, giving
from hybridc.lowering.sizes import shape_fault
from hybridc.lowering.steps import RANGES, in_steps, with_dimensions
from hybridc.lowering.value import Constant, Expression, Narrow, Value
from hybridc.targets.protocol import ResultType, Section


@dataclass(frozen=True)
class Lowered:
    """A lowered section.

    Attributes:
        module: Relax module with the function ``main``.
        weights: The weights' arrays by ONNX name, in the order of ``main``'s last argument.
        results: Type of each output; symbolic dimensions are expressions.
    """

    module: tvm.IRModule
    weights: Mapping[str, np.ndarray[Any, Any]]
    results: tuple[ResultType, ...]


def lower(section: Section, table: OperatorTable, widens: bool = False) -> Lowered:
    """Lower a section to a Relax module.

    Args:
        section: What to lower.
        table: Converters.
        widens: Whether float16 and bfloat16 are computed in float32: see
            :mod:`hybridc.lowering.widening`.

    Raises:
        UnsupportedError: Some nodes have no converter or were refused; it lists all of them.
    """
    context = Context(relax.BlockBuilder(), table, section.opsets, widens=widens)
    scope = Scope(context)
    parameters = [_parameter(context, i, value) for i, value in enumerate(section.inputs)]
    attributes = {"num_input": len(parameters), "global_symbol": "main"}
    # Not pure, since sizes may be read from tensors (Call.dims_of).
    with context.builder.function("main", attrs=attributes, pure=False):
        steps = in_steps(context, section.ranges)
        inputs = [with_dimensions(context.builder, p, steps.sizes) for p in parameters]
        scope.values.update(zip(section.inputs, map(_tagged, section.inputs, inputs), strict=True))
        with known_bounds(steps.bounds):
            reasons = tuple(_lower_nodes(section, scope))
            given = [*parameters, *inputs]
            outputs = [] if reasons else [_output(scope, v, given) for v in section.outputs]
        variables = [variable for _, variable in context.weights.values()]
        # Not bound to a variable: TVM makes a view of what it takes for a reshape, but for values
        # that are read outside of the block, and these must be in memory of their own.
        context.builder.emit_func_output(relax.Tuple(outputs), [*parameters, *variables])
    if reasons:
        raise UnsupportedError("these nodes cannot be compiled:", reasons)
    module = relax.transform.ConvertToDataflow(1)(context.builder.finalize())
    module = relax.transform.BundleModelParams()(module)
    module.update_func(module.get_global_var("main"), _with_ranges(module["main"], steps.bounds))
    weights = {name: array for name, (array, _) in context.weights.items()}
    results = tuple(
        ResultType(_type_name(scope.held(value), tensor), shape_of(tensor))
        for value, tensor in zip(section.outputs, outputs, strict=True)
    )
    return Lowered(module, weights, results)


def _with_ranges(main: relax.Function, bounds: Mapping[Any, tuple[int, int]]) -> relax.Function:
    """``main`` with the lowest and highest value of its dynamic dimensions, for who plans loops."""
    if not bounds:
        return main
    known = {variable.name: list(bound) for variable, bound in bounds.items()}
    return main.with_attr(RANGES, known)


def _lower_nodes(section: Section, scope: Scope) -> Iterator[tuple[str, str, str]]:
    """Lower a section's nodes; yield ``(node, operator, reason)`` for each that cannot be.

    A node behind a failed one is not judged: its inputs do not exist.
    """
    failed: set[ir.Value] = set()
    for position, node in enumerate(section.nodes):
        if any(value in failed for value in _values_read(node)):
            failed.update(node.outputs)
            continue
        try:
            scope.lower_node(node)
        except RanksDiffer:
            if failed:
                continue
            yield from _lower_split(section, scope, position)
            return
        except Unsupported as refusal:
            failed.update(node.outputs)
            yield node.name or "?", node.op_type, str(refusal)


def _lower_split(section: Section, scope: Scope, position: int) -> Iterator[tuple[str, str, str]]:
    """Lower an If whose results differ in rank and all that follows, in both of its branches."""
    node, rest = section.nodes[position], section.nodes[position + 1 :]
    try:
        results = scope.lower_split(node, rest, giving(section.outputs))
    except Unsupported as refusal:
        yield str(node.name), node.op_type, f"{RanksDiffer()}, and {refusal}"
    else:
        scope.values.update(zip(section.outputs, results, strict=True))


def _values_read(node: ir.Node) -> Iterator[ir.Value | None]:
    """Inputs of a node, and of the nodes in its subgraphs."""
    yield from node.inputs
    for attribute in node.attributes.values():
        if attribute.type == ir.AttributeType.GRAPH:
            for inner in attribute.value:
                yield from _values_read(inner)


def _parameter(context: Context, index: int, value: ir.Value) -> relax.Var:
    if value.shape is None or value.dtype is None:
        raise InternalError(f"value {value.name!r} crosses parts without a shape or type")
    if value.dtype == ir.DataType.UNDEFINED:
        raise UnsupportedError(f"the type of value {value.name!r} is not known")
    dims = [dim for dim in value.shape if isinstance(dim, int)]
    fault = shape_fault(dims, value.dtype.itemsize, MAX_TENSOR_BYTES)
    if fault is not None:
        raise UnsupportedError(f"value {value.name!r} {fault}")
    shape = [context.dimension(dim) for dim in value.shape]
    name = value.dtype.numpy().name
    dtype = NARROW[name].dtype if name in NARROW else name
    return relax.Var(f"input_{index}", relax.TensorType(shape, dtype))


def _tagged(value: ir.Value, tensor: Expression) -> Value:
    """An input as what it is while it is lowered: bytes with a tag if its type is narrow."""
    name = value.dtype.numpy().name if value.dtype is not None else ""
    return Narrow(tensor, name) if name in NARROW else tensor


def _type_name(value: Value, tensor: Expression) -> str:
    return value.dtype if isinstance(value, Narrow) else dtype_of(tensor)


def _output(scope: Scope, value: ir.Value, parameters: Sequence[relax.Var]) -> Expression:
    """An output as a tensor of its own: never an input or a weight handed back."""
    if value.dtype == ir.DataType.STRING:
        raise UnsupportedError(f"the output {value.name!r} holds strings that no node computes")
    lowered = scope.value(value)
    if isinstance(lowered, Narrow):
        lowered = lowered.codes
    context = scope.context
    identity = ir.node("Identity", [])
    call = Call(identity, [lowered], 1, context.builder, context.weight, scope.lower_graph)
    try:
        tensor = call.tensor(0)
    except Unsupported as refusal:
        producer = value.producer()
        name, operator = ("?", "output") if producer is None else (producer.name, producer.op_type)
        reason = (str(name), operator, f"its output {value.name!r}: {refusal}")
        raise UnsupportedError("this output cannot be compiled:", (reason,)) from refusal
    computed = isinstance(tensor, relax.Var) and tensor not in parameters
    if computed and not isinstance(lowered, Constant):
        return tensor
    return context.builder.emit_te(_copy, tensor)


def _copy(tensor: te.Tensor) -> te.Tensor:
    return te.compute(tensor.shape, lambda *index: tensor(*index), name="copy")
