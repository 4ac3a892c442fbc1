"""A section as an ONNX model of its own, tried out in ONNX Runtime."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import onnx
import onnx_ir as ir
from hybridc.targets.protocol import ResultType, Section

from hybridc.bundle.dtypes import NARROW
from hybridc.errors import UnsupportedError
from hybridc.placement.group import read_values
from hybridc.runtime.session import session_options

MAX_BYTES = 2**31 - 1
"""Largest message that protobuf can write."""

IR_VERSION = 10
"""Old enough for every ONNX Runtime in use; nothing of a later version is needed."""


@dataclass(frozen=True)
class Extracted:
    """A section as bytes of an ONNX model.

    Attributes:
        model: The model.
        results: Nothing: the types are those that shape inference found.
    """

    model: bytes
    results: tuple[ResultType | None, ...]


def extract(section: Section, operators: str) -> Extracted:
    """The section as an ONNX model that ONNX Runtime loads.

    Args:
        section: The nodes.
        operators: Path of a library of custom operators; may be empty.

    Raises:
        UnsupportedError: ONNX Runtime cannot run it either, or it is larger than 2 GB.
    """
    for value in (*section.inputs, *section.outputs):
        if value.dtype is not None and _type_name(value.dtype) in NARROW:
            name = _type_name(value.dtype)
            raise _refusal(
                section, f"{value.name!r} is {name}, which it takes and gives in no array"
            )
    proto = _model(section)
    if proto.ByteSize() > MAX_BYTES:
        raise _refusal(section, "the nodes for ONNX Runtime hold more than 2 GB of weights")
    model = proto.SerializeToString(deterministic=True)
    _try_out(model, section, operators)
    return Extracted(model, (None,) * len(section.outputs))


def _type_name(dtype: ir.DataType) -> str:
    return "string" if dtype == ir.DataType.STRING else str(dtype.numpy().name)


def _model(section: Section) -> onnx.ModelProto:
    constants = dict.fromkeys(_constants(section))
    graph = onnx.helper.make_graph(
        [_node(node) for node in section.nodes],
        "part",
        [ir.to_proto(value) for value in section.inputs],
        [onnx.ValueInfoProto(name=str(value.name)) for value in section.outputs],
        [_tensor(value) for value in constants],
    )
    opsets = [onnx.helper.make_opsetid(domain, v) for domain, v in section.opsets.items()]
    return onnx.helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION)


def _node(node: ir.Node) -> onnx.NodeProto:
    """A node without the types inside its subgraphs: those of sequences come out wrong there."""
    proto: onnx.NodeProto = ir.to_proto(node)
    for graph in _subgraphs(proto):
        del graph.value_info[:]
    return proto


def _subgraphs(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    for attribute in node.attribute:
        for graph in [attribute.g] if attribute.HasField("g") else attribute.graphs:
            yield graph
            for inner in graph.node:
                yield from _subgraphs(inner)


def _constants(section: Section) -> Iterator[ir.Value]:
    """Weights that the nodes read or that are given out as they are.

    Those that belong to a subgraph are written with it.
    """
    for node in section.nodes:
        for value in read_values(node):
            if value.is_initializer() and value.graph is node.graph:
                yield value
    yield from (value for value in section.outputs if value.is_initializer())


def _tensor(value: ir.Value) -> onnx.TensorProto:
    assert value.const_value is not None
    proto: onnx.TensorProto = ir.to_proto(value.const_value)
    if proto.data_location == onnx.TensorProto.EXTERNAL:
        proto = onnx.numpy_helper.from_array(value.const_value.numpy())
    proto.name = str(value.name)
    return proto


def _try_out(model: bytes, section: Section, operators: str) -> None:
    """Let ONNX Runtime load the model, without its optimizations."""
    import onnxruntime

    options = session_options([operators] if operators else [])
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    try:
        onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # its exceptions share no base but Exception
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise _refusal(section, lines[0].rpartition(" : ")[2]) from error


def _refusal(section: Section, reason: str) -> UnsupportedError:
    """The refusal of all nodes: ONNX Runtime takes a model whole or not at all."""
    message = f"ONNX Runtime cannot run these nodes: {reason}"
    reasons = tuple((str(node.name), node.op_type, "given to it") for node in section.nodes)
    return UnsupportedError(message, reasons)
