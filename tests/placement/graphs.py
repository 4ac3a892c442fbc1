"""Random graphs and random ONNX models for property tests."""

import networkx
import onnx_ir as ir
from hypothesis import strategies as st

UNARY = ("Relu", "Sigmoid", "MaxPool", "Identity")
BINARY = ("Add", "Mul", "MatMul")


@st.composite
def acyclic_graphs(draw, largest=10):
    """A directed acyclic graph over ``0 ... n-1``."""
    count = draw(st.integers(1, largest))
    graph = networkx.DiGraph()
    graph.add_nodes_from(range(count))
    for target in range(1, count):
        graph.add_edges_from(
            (source, target) for source in draw(st.sets(st.integers(0, target - 1)))
        )
    return graph


@st.composite
def labels(draw, count, devices="ab"):
    """A device for each of ``count`` groups."""
    return dict(enumerate(draw(st.lists(st.sampled_from(devices), min_size=count, max_size=count))))


@st.composite
def models(draw, largest=12):
    """An ``onnx_ir`` graph of element-wise and other nodes, some of them with two outputs."""
    shape, kind = ir.Shape([4, 4]), ir.TensorType(ir.DataType.FLOAT)
    inputs = [
        ir.Value(name=f"in{i}", shape=shape, type=kind) for i in range(draw(st.integers(1, 2)))
    ]
    values, nodes = list(inputs), []
    for number in range(draw(st.integers(1, largest))):
        operator = draw(st.sampled_from((*UNARY, *BINARY, "Split")))
        read = [draw(st.sampled_from(values)) for _ in range(1 + (operator in BINARY))]
        written = [
            ir.Value(name=f"v{number}_{i}", shape=shape, type=kind)
            for i in range(1 + (operator == "Split"))
        ]
        nodes.append(ir.node(operator, read, outputs=written, name=f"n{number}"))
        values += written
    ends = [value for value in values if not value.uses() and value not in inputs]
    more = [value for value in values if value not in inputs and draw(st.integers(0, 9)) == 0]
    outputs = list(dict.fromkeys(ends + more))
    return ir.Graph(inputs, outputs, nodes=nodes, opset_imports={"": 17})
