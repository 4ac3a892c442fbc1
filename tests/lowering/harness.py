"""Compile one ONNX node, run it, and compare with ONNX Runtime or ONNX's reference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import tvm
import tvm_ffi
from hybridc.targets.protocol import Section
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from tvm import relax

from hybridc.bundle.dtypes import NARROW, carried, restored
from hybridc.lowering.lower import Lowered, lower
from hybridc.lowering.ops import default_table
from hybridc.reference import precise_session

Array = np.ndarray[Any, Any]

TARGET = {"kind": "llvm", "mcpu": "x86-64-v3", "mtriple": "x86_64-linux-gnu"}
PIPELINE = tvm.transform.Sequential(
    [
        relax.transform.LegalizeOps(),
        relax.transform.AnnotateTIROpPattern(),
        relax.transform.FoldConstant(),
        relax.transform.FuseOps(),
        relax.transform.FuseTIR(),
    ]
)


@dataclass(frozen=True)
class Case:
    """One node to test.

    Attributes:
        op: ONNX operator type.
        inputs: Input arrays in order; ``None`` for one left out.
        attributes: Attributes of the node.
        opset: Version of the default domain.
        constants: Which inputs are initializers.
        outputs: Number of outputs.
        symbolic: Names for dimensions: input -> (axis -> name).
        reference: Compare with ONNX's reference evaluator instead of ONNX Runtime.
        tolerance: Allowed error over the largest expected magnitude.
    """

    op: str
    inputs: Sequence[Any]
    attributes: Mapping[str, Any] = field(default_factory=dict)
    opset: int = 17
    constants: Sequence[int] = ()
    outputs: int = 1
    symbolic: Mapping[int, Mapping[int, str]] = field(default_factory=dict)
    reference: bool = False
    tolerance: float = 1e-5

    def __str__(self) -> str:
        shapes = ",".join(
            "-" if array is None else f"{array.dtype.char}{list(array.shape)}".replace(" ", "")
            for array in self.inputs
        )
        attributes = ",".join(
            f"{key}={value}".replace(" ", "")[:40] for key, value in self.attributes.items()
        )
        constants = "".join(str(i) for i in self.constants)
        return f"{self.op}-{self.opset}-{shapes}-{attributes}-{constants}"


def make_model(case: Case) -> onnx.ModelProto:
    """A model of one node; inputs named in ``constants`` are initializers."""
    names = ["" if array is None else f"x{i}" for i, array in enumerate(case.inputs)]
    outputs = [f"y{i}" for i in range(case.outputs)]
    node = helper.make_node(case.op, names, outputs, name="node", **case.attributes)
    graph_inputs, initializers = [], []
    for i, array in enumerate(case.inputs):
        if array is None:
            continue
        if i in case.constants:
            initializers.append(numpy_helper.from_array(array, names[i]))
            continue
        dims: list[Any] = list(array.shape)
        for axis, name in case.symbolic.get(i, {}).items():
            dims[axis] = name
        kind = helper.np_dtype_to_tensor_dtype(array.dtype)
        graph_inputs.append(helper.make_tensor_value_info(names[i], kind, dims))
    untyped = [onnx.ValueInfoProto(name=name) for name in outputs]
    graph = helper.make_graph([node], "one", graph_inputs, untyped, initializers)
    opsets = [helper.make_opsetid("", case.opset)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=8)
    return onnx.shape_inference.infer_shapes(model, data_prop=True)


def lower_model(model: onnx.ModelProto) -> Lowered:
    """Lower a whole model with the default table."""
    graph = ir.serde.deserialize_model(model).graph
    inputs = [value for value in graph.inputs if value.name not in graph.initializers]
    section = Section(list(graph), inputs, list(graph.outputs), dict(graph.opset_imports))
    return lower(section, default_table())


def run_lowered(lowered: Lowered, inputs: Sequence[Array]) -> list[Array]:
    """Build with TVM's default pipeline for this CPU, and run."""
    with tvm.transform.PassContext(opt_level=3):
        executable = relax.build(PIPELINE(lowered.module), tvm.target.Target(TARGET))
    machine = relax.VirtualMachine(executable, tvm.cpu())
    tensors = [tvm.runtime.tensor(carried(array)) for array in inputs]
    weights = [tvm.runtime.tensor(array) for array in lowered.weights.values()]
    results = machine["main"](*tensors, tvm_ffi.Array(weights))
    pairs = zip((kind.dtype for kind in lowered.results), results, strict=True)
    return [restored(r.numpy(), dtype) if dtype in NARROW else r.numpy() for dtype, r in pairs]


def expected_results(case: Case, model: onnx.ModelProto) -> list[Array]:
    """What ONNX Runtime, or ONNX's reference evaluator, computes."""
    feed = {
        f"x{i}": array
        for i, array in enumerate(case.inputs)
        if array is not None and i not in case.constants
    }
    if case.reference:
        return [np.asarray(y) for y in ReferenceEvaluator(model).run(None, feed)]
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    session = precise_session(model.SerializeToString(), options)
    return [np.asarray(y) for y in session.run(None, feed)]


def check(case: Case) -> None:
    """Compile and run the case's node; fail unless dtype, shape and values are right."""
    model = make_model(case)
    expected = expected_results(case, model)
    inputs = [
        array
        for i, array in enumerate(case.inputs)
        if array is not None and i not in case.constants
    ]
    actual = run_lowered(lower_model(model), inputs)
    assert len(actual) == len(expected)
    for got, wanted in zip(actual, expected, strict=True):
        assert_same(got, wanted, case.tolerance)


def assert_same(got: Array, wanted: Array, tolerance: float) -> None:
    """Equality of dtype, shape and values; floats within a share of the largest magnitude."""
    assert got.dtype == wanted.dtype
    assert got.shape == wanted.shape
    if wanted.dtype.kind != "f":
        np.testing.assert_array_equal(got, wanted)
        return
    finite = np.isfinite(wanted)
    scale = float(np.abs(wanted[finite]).max(initial=1e-6))
    if wanted.dtype == np.float16:
        tolerance = max(tolerance, 2e-3)
    np.testing.assert_array_equal(np.isnan(got), np.isnan(wanted))
    np.testing.assert_array_equal(got[np.isinf(wanted)], wanted[np.isinf(wanted)])
    np.testing.assert_allclose(
        got[finite].astype(np.float64), wanted[finite].astype(np.float64), 0, tolerance * scale
    )


def floats(*shape: int, seed: int = 0, dtype: str = "float32", low: float = -2.0) -> Array:
    """Uniform random numbers from ``low`` to 2."""
    generator = np.random.default_rng([seed, *shape])
    return generator.uniform(low, 2.0, shape).astype(dtype)


def whole(*shape: int, seed: int = 0, dtype: str = "int32", low: int = -9, high: int = 9) -> Array:
    """Uniform random integers, ``high`` not included."""
    generator = np.random.default_rng([seed, *shape])
    return generator.integers(low, high, shape).astype(dtype)


def vector(*numbers: int) -> Array:
    """An int64 vector, as shapes, axes and the like are given."""
    return np.array(numbers, np.int64)
