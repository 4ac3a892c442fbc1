"""Bounds on what a model may ask for, checked before native code sees it.

ONNX's shape inference divides by strides and indexes by axes without looking at them, expands
nested functions without end, and takes sizes for lengths, so that a damaged model would crash the
process or fill the memory instead of being refused.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto

from hybridc.errors import ModelError

MAX_TENSOR_BYTES = 1 << 40
"""Bytes of one tensor; a larger one is a mistake in a size."""

MAX_RANK = 32
"""Dimensions of a tensor; numpy has no more everywhere."""

MAX_INPUTS = 1024
"""Inputs, and outputs, of a model; TVM's stack grows with them."""

MAX_NODES = 1_000_000
"""Nodes of a model with its functions expanded."""

MAX_NESTING = 64
"""Functions that call functions, and subgraphs in subgraphs."""

_INT32 = 1 << 31
_POSITIVE = frozenset("strides dilations kernel_shape group blocksize".split())
_BOUNDED = frozenset("axis axes perm pads output_padding output_shape batch_axis time_axis".split())
_PER_FIELD = {"float_data", "double_data", "int32_data", "int64_data", "uint64_data"}


def attribute_fault(name: str, values: Sequence[int]) -> str | None:
    """What is wrong with an attribute of integers; ``None`` if nothing is."""
    if name in _POSITIVE and not all(0 < value < _INT32 for value in values):
        return f"attribute {name!r} is {_short(values)} and must be positive"
    if name in _BOUNDED and not all(-_INT32 < value < _INT32 for value in values):
        return f"attribute {name!r} is {_short(values)}, which is out of range"
    return None


def tensor_bytes(shape: Sequence[int], dtype: ir.DataType) -> int:
    """Bytes that a tensor takes; those of strings are counted as one each."""
    size = 1 if dtype == ir.DataType.STRING else dtype.itemsize
    return math.ceil(math.prod(shape) * size)


def check_limits(model: ModelProto, place: Path) -> None:
    """Check the numbers in a model that has only been parsed.

    Raises:
        ModelError: Says which node, tensor or value is out of bounds, and why.
    """
    for fault in _faults(model):
        raise ModelError(f"{place} is not a valid ONNX model: {fault}")


def _faults(model: ModelProto) -> Iterator[str]:
    yield from _function_faults(model)
    weights = {tensor.name for tensor in model.graph.initializer}
    inputs = sum(value.name not in weights for value in model.graph.input)
    for count, what in ((inputs, "inputs"), (len(model.graph.output), "outputs")):
        if count > MAX_INPUTS:
            yield f"it has {count} {what}; {MAX_INPUTS} are allowed"
    yield from _graph_faults(model.graph, 0)
    for function in model.functions:
        if not function.output:
            yield f"function {function.name!r} has no output"
        yield from _node_faults(function.node, 0, in_function=True)


def _graph_faults(graph: GraphProto, depth: int) -> Iterator[str]:
    if depth > MAX_NESTING:
        yield f"subgraphs nest more than {MAX_NESTING} deep"
        return
    for value in (*graph.input, *graph.output, *graph.value_info):
        yield from _type_faults(value.name, value.type)
    for tensor in graph.initializer:
        yield from _tensor_faults(tensor)
    for sparse in graph.sparse_initializer:
        yield f"initializer {sparse.values.name!r} is sparse; store it as a dense tensor"
    yield from _node_faults(graph.node, depth)


def _node_faults(
    nodes: Sequence[NodeProto], depth: int, in_function: bool = False
) -> Iterator[str]:
    for node in nodes:
        for attribute in node.attribute:
            if attribute.ref_attr_name and not (in_function or depth):
                yield f"attribute {attribute.name!r} refers to a function's and is in none"
            for fault in _attribute_faults(attribute, depth):
                yield f"node {_short(node.name or '?')!r} ({node.op_type}): {fault}"


def _attribute_faults(attribute: AttributeProto, depth: int) -> Iterator[str]:
    if attribute.type == AttributeProto.INT:
        values: Sequence[int] = [attribute.i]
    else:
        values = attribute.ints
    fault = None if attribute.ref_attr_name else attribute_fault(attribute.name, values)
    if fault is not None:
        yield fault
    if attribute.type == AttributeProto.GRAPH:
        yield from _graph_faults(attribute.g, depth + 1)
    for graph in attribute.graphs:
        yield from _graph_faults(graph, depth + 1)
    if attribute.type == AttributeProto.TENSOR:
        yield from _tensor_faults(attribute.t)
    if attribute.type in (AttributeProto.SPARSE_TENSOR, AttributeProto.SPARSE_TENSORS):
        yield f"attribute {attribute.name!r} holds a sparse tensor; store it as a dense one"


def _type_faults(name: str, kind: onnx.TypeProto) -> Iterator[str]:
    """Element types that ONNX does not have."""
    field = kind.WhichOneof("value")
    inner: Any = getattr(kind, field) if field else None
    if field in ("tensor_type", "sparse_tensor_type"):
        if not _is_element_type(inner.elem_type):
            yield f"value {_short(name)!r} has the unknown element type {inner.elem_type}"
        if len(inner.shape.dim) > MAX_RANK:
            yield f"value {_short(name)!r} has more than {MAX_RANK} dimensions"
    elif field == "map_type":
        if not _is_element_type(inner.key_type):
            yield f"value {_short(name)!r} has the unknown key type {inner.key_type}"
        yield from _type_faults(name, inner.value_type)
    elif field in ("sequence_type", "optional_type"):
        yield from _type_faults(name, inner.elem_type)


def _is_element_type(code: int) -> bool:
    return code != TensorProto.UNDEFINED and code in TensorProto.DataType.values()


def _tensor_faults(tensor: TensorProto) -> Iterator[str]:
    """Element types that ONNX does not have, and contents that do not fit the shape."""
    what = f"tensor {_short(tensor.name)!r}"
    if not _is_element_type(tensor.data_type):
        yield f"{what} has the unknown element type {tensor.data_type}"
        return
    if len(tensor.dims) > MAX_RANK:
        yield f"{what} has more than {MAX_RANK} dimensions"
        return
    if any(dim < 0 for dim in tensor.dims):
        yield f"{what} has a negative dimension: {_short(tensor.dims)}"
        return
    if tensor.HasField("segment"):
        yield f"{what} is one segment of a larger one"
    dtype = ir.DataType(tensor.data_type)
    size = tensor_bytes(tensor.dims, dtype)
    if size > MAX_TENSOR_BYTES:
        yield f"{what} of shape {_short(tensor.dims)} has {size} bytes"
    elif tensor.data_location != TensorProto.EXTERNAL:
        yield from _content_faults(tensor, dtype, size, what)


def _content_faults(tensor: TensorProto, dtype: ir.DataType, size: int, what: str) -> Iterator[str]:
    count = math.prod(tensor.dims)
    if tensor.HasField("raw_data"):
        if len(tensor.raw_data) != size:
            yield f"{what} has {len(tensor.raw_data)} bytes where its shape needs {size}"
        return
    given = {field: len(getattr(tensor, field)) for field in _PER_FIELD}
    field, length = max(given.items(), key=lambda item: item[1])
    if dtype == ir.DataType.STRING or not length:
        return
    per_entry = max(1, round(1 / dtype.itemsize)) if dtype.itemsize < 1 else 1
    needed = math.ceil(count / per_entry)
    if dtype in (ir.DataType.COMPLEX64, ir.DataType.COMPLEX128):
        needed = 2 * count
    if length not in (needed, count):
        yield f"{what} has {length} elements in {field} where its shape needs {needed}"


def _function_faults(model: ModelProto) -> Iterator[str]:
    """Functions that nest too deep or expand to too many nodes; cycles are left to the checker."""
    functions = {(f.domain, f.name, f.overload): f.node for f in model.functions}
    if not functions:
        return
    sizes: dict[tuple[str, str, str], int] = {}
    try:
        size = _expanded(model.graph.node, functions, sizes, ())
    except RecursionError:
        yield f"its functions call each other more than {MAX_NESTING} deep"
        return
    if size > MAX_NODES:
        yield f"its functions expand to {size} nodes; {MAX_NODES} are allowed"


_Key = tuple[str, str, str]


def _expanded(
    nodes: Sequence[NodeProto],
    functions: Mapping[_Key, Sequence[NodeProto]],
    sizes: dict[_Key, int],
    path: tuple[_Key, ...],
) -> int:
    """Number of nodes with all functions expanded."""
    if len(path) > MAX_NESTING:
        raise RecursionError
    total = len(nodes)
    for node in nodes:
        key = (node.domain, node.op_type, node.overload)
        if key in functions and key not in path:
            if key not in sizes:
                sizes[key] = _expanded(functions[key], functions, sizes, (*path, key))
            total += sizes[key]
        for attribute in node.attribute:
            for graph in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
                total += _expanded(graph.node, functions, sizes, path)
    return total


def _short(what: object) -> str:
    text = what if isinstance(what, str) else str(list(what))  # type: ignore[call-overload]
    return text if len(text) <= 80 else f"{text[:77]}..."
