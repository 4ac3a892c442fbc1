"""Compute at compile time what depends on constants only.

All nodes that can be folded are found first, then run together as one small ONNX model, so that a
graph with hundreds of constant nodes costs one session. Shape and Size of a value whose shape is
known count as constants.

    initializers --> [ nodes without run-time inputs ] --> values used by the rest --> initializers
"""

from __future__ import annotations

from functools import cache

import numpy as np
import onnx
import onnx_ir as ir

ARENA_BYTES = 1 << 32
"""Memory that one run may take: a model may ask for sizes that no memory can hold."""

MAX_BYTES = 1 << 31
"""Folded values together; beyond it folding would cost more memory than it saves time."""

NOT_PURE = frozenset(
    (
        "Bernoulli",
        "Multinomial",
        "RandomNormal",
        "RandomNormalLike",
        "RandomUniform",
        "RandomUniformLike",
    )
)


_NUMPY_TYPES = frozenset(
    f"tensor({name})"
    for name in """bool double float float16 int16 int32 int64 int8 uint16 uint32 uint64
    uint8""".split()
)
"""Types of values that ONNX Runtime gives as arrays of that type."""


class FoldConstants(ir.passes.InPlacePass):
    """Replaces constant computations of the main graph by initializers."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Fold until nothing more folds."""
        _fold_shapes(model.graph)
        nodes = constant_nodes(model.graph)
        wanted = [value for node in nodes for value in node.outputs if _used_outside(value, nodes)]
        if not wanted:
            return ir.passes.PassResult(model, modified=False)
        arrays = _evaluate(model, nodes, wanted)
        for value, array in zip(wanted, arrays, strict=True):
            if array is not None:
                _replace(model.graph, value, array)
        return ir.passes.PassResult(model, modified=True)


def _fold_shapes(graph: ir.Graph) -> None:
    """Turn Shape and Size of values with a static shape into initializers."""
    for node in list(graph):
        source = node.inputs[0] if node.inputs else None
        if node.domain or node.op_type not in ("Shape", "Size"):
            continue
        if source is None or source.shape is None or not source.shape.is_static():
            continue
        dims = np.array(source.shape.numpy(), np.int64)
        if node.op_type == "Size":
            result = np.array(dims.prod(), np.int64)
        else:
            start = node.attributes.get_int("start", 0)
            end = node.attributes.get_int("end", len(dims))
            result = dims[start:end]
        if not node.outputs[0].is_graph_output():
            _replace(graph, node.outputs[0], result)


def constant_nodes(graph: ir.Graph) -> set[ir.Node]:
    """Nodes of the main graph that depend on constants only."""
    constant: set[ir.Node] = set()
    for node in graph:
        if node.domain or node.op_type in NOT_PURE or _has_subgraph(node) or is_stored_small(node):
            continue
        if all(_is_constant(value, constant) for value in node.inputs):
            constant.add(node)
    return constant


def is_stored_small(node: ir.Node) -> bool:
    """Whether a node makes floats of a weight in blocks, which is stored so to take less space."""
    return node.op_type == "DequantizeLinear" and node.attributes.get_int("block_size", 0) > 0


def _has_subgraph(node: ir.Node) -> bool:
    kinds = (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS)
    return any(attribute.type in kinds for attribute in node.attributes.values())


def _is_constant(value: ir.Value | None, constant: set[ir.Node]) -> bool:
    if value is None or value.producer() in constant:
        return True
    return value.const_value is not None and not value.is_graph_input()


def _used_outside(value: ir.Value, nodes: set[ir.Node]) -> bool:
    if not value.name or value.is_graph_output():
        return False
    return any(user not in nodes for user, _ in value.uses())


def _evaluate(
    model: ir.Model, nodes: set[ir.Node], wanted: list[ir.Value]
) -> list[np.ndarray | None]:
    """Contents of the wanted values; ``None`` where one cannot be computed or is too large."""
    proto = _constant_model(model, nodes, wanted)
    try:
        arrays = _run(proto)
    except Exception:  # an operator that the evaluator does not know stays in the graph
        return [None] * len(wanted)
    total = 0
    result: list[np.ndarray | None] = []
    for array in arrays:
        total += 0 if array is None else getattr(array, "nbytes", MAX_BYTES)
        fits = isinstance(array, np.ndarray) and array.dtype.kind in "biuf" and total < MAX_BYTES
        result.append(array if fits else None)
    return result


def _constant_model(
    model: ir.Model, nodes: set[ir.Node], wanted: list[ir.Value]
) -> onnx.ModelProto:
    ordered = [node for node in model.graph if node in nodes]
    read = {value for node in ordered for value in node.inputs if value is not None}
    graph = onnx.GraphProto(name="constants")
    graph.node.extend(ir.serde.serialize_node(node) for node in ordered)
    for value in sorted(read, key=lambda value: str(value.name)):
        if value.const_value is not None and value.producer() is None:
            tensor = onnx.numpy_helper.from_array(value.const_value.numpy(), value.name)
            graph.initializer.append(tensor)
    graph.output.extend(onnx.ValueInfoProto(name=value.name) for value in wanted)
    opsets = [onnx.helper.make_opsetid(d, v) for d, v in model.graph.opset_imports.items()]
    return onnx.helper.make_model(graph, opset_imports=opsets, ir_version=model.ir_version)


def _run(proto: onnx.ModelProto) -> list[np.ndarray | None]:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    _limit_memory()
    options.add_session_config_entry("session.use_env_allocators", "1")
    session = onnxruntime.InferenceSession(
        proto.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    shrink = onnxruntime.RunOptions()
    shrink.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")
    # Arrays of the others come out as their bytes, or not at all.
    names = [output.name for output in session.get_outputs() if output.type in _NUMPY_TYPES]
    found = dict(zip(names, session.run(names, {}, shrink), strict=True)) if names else {}
    return [found.get(output.name) for output in proto.graph.output]


@cache
def _limit_memory() -> None:
    """Make an arena of limited size for the sessions of this process that ask for it."""
    import onnxruntime

    arena = onnxruntime.OrtAllocatorType.ORT_ARENA_ALLOCATOR
    place = onnxruntime.OrtMemoryInfo("Cpu", arena, 0, onnxruntime.OrtMemType.DEFAULT)
    limits = {"max_mem": ARENA_BYTES, "arena_extend_strategy": 1}  # no more than is asked for
    onnxruntime.create_and_register_allocator(place, onnxruntime.OrtArenaCfg(limits))


def _replace(graph: ir.Graph, value: ir.Value, array: np.ndarray) -> None:
    """Make ``value`` an initializer with these contents."""
    name = str(value.name)
    value.name = f"{name}__computed"
    tensor = ir.tensor(np.ascontiguousarray(array).reshape(array.shape), name=name)
    constant = ir.Value(
        name=name, shape=ir.Shape(array.shape), type=ir.TensorType(tensor.dtype), const_value=tensor
    )
    graph.register_initializer(constant)
    value.replace_all_uses_with(constant)
