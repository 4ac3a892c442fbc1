"""What the original model gives for sample inputs, in ONNX Runtime or ONNX's own evaluator."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import onnx
import onnx_ir as ir

from hybridc.bfloat16 import as_bfloat16, as_float32, has_bfloat16, widen_bfloat16
from hybridc.bundle.tensors import Array
from hybridc.errors import ModelError
from hybridc.runtime.session import session_options

Run: TypeAlias = Callable[[Mapping[str, Array]], dict[str, Array]]
"""Outputs by name, of inputs by name."""


@dataclass(frozen=True)
class Sample:
    """Inputs with the reference's outputs, by name.

    Attributes:
        inputs: Arrays given to the model.
        outputs: What the reference computed.
        reference: Name and version of the reference.
    """

    inputs: Mapping[str, Array]
    outputs: Mapping[str, Array]
    reference: str


def run_reference(
    path: Path,
    inputs: Mapping[str, Array],
    bound: Mapping[str, Array],
    operators: Sequence[str] = (),
) -> Sample:
    """The original model's outputs, from ONNX Runtime, or from ONNX's own evaluator where ONNX
    Runtime cannot run the model.

    Args:
        path: The model.
        inputs: The bundle's inputs.
        bound: Inputs of the model that the bundle does not have, since they are bound to a value.
        operators: Paths of libraries with custom operators.

    Raises:
        ModelError: Neither can run it; the message has both reasons.
    """
    try:
        return Sample(inputs, *_run_onnxruntime(path, {**inputs, **bound}, operators))
    except Exception as error:  # its exceptions share no base but Exception
        first = _first_line(error)
    try:
        return Sample(inputs, *_run_evaluator(path, {**inputs, **bound}))
    except Exception as error:
        raise ModelError(
            f"{path} cannot be run for reference: ONNX Runtime: {first}; onnx.reference: "
            f"{_first_line(error)}; check the model, or skip the comparison with --no-verify"
        ) from error


def open_session(model: Path | bytes, operators: Sequence[str] = (), optimize: bool = True) -> Run:
    """A function that runs a model in ONNX Runtime on one thread.

    Args:
        model: Its file, or its contents.
        operators: Paths of libraries with custom operators.
        optimize: Whether ONNX Runtime may rewrite the model.

    Raises:
        ModelError: ONNX Runtime cannot load it, or, when the function is called, run it.
    """
    import onnxruntime

    options = _options(operators)
    if not optimize:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    try:
        session = _session(model, options)
    except Exception as error:  # its exceptions share no base but Exception
        raise ModelError(f"ONNX Runtime cannot load the model: {_first_line(error)}") from error

    def run(inputs: Mapping[str, Array]) -> dict[str, Array]:
        try:
            return session(inputs)
        except Exception as error:
            raise ModelError(f"ONNX Runtime cannot run the model: {_first_line(error)}") from error

    return run


def _session(model: Path | bytes, options: Any) -> Run:
    """A function that runs a model in ONNX Runtime.

    What ONNX Runtime cannot load since it is in bfloat16 is computed in float32, and rounded where
    it has to be.
    """
    try:
        return _run_of(precise_session(model, options))
    except Exception:  # its exceptions share no base but Exception
        own = (
            ir.from_proto(onnx.load_from_string(model))
            if isinstance(model, bytes)
            else ir.load(model)
        )
        if not has_bfloat16(own):
            raise
    rounded = [
        str(value.name) for value in own.graph.outputs if value.dtype == ir.DataType.BFLOAT16
    ]
    widen_bfloat16(own)
    run = _run_of(precise_session(ir.to_proto(own).SerializeToString(), options))
    return lambda inputs: as_bfloat16(run(as_float32(inputs)), rounded)


def _run_of(session: Any) -> Run:
    names = [output.name for output in session.get_outputs()]

    def run(inputs: Mapping[str, Array]) -> dict[str, Array]:
        results = session.run(names, dict(inputs))
        return dict(zip(names, map(np.asarray, results), strict=True))

    return run


def precise_session(model: Path | bytes, options: Any) -> Any:
    """A session whose integer kernels do not saturate, if ONNX Runtime can make one.

    Where a CPU has AVX2 and no VNNI, its fast kernels add pairs of products in int16, which cannot
    hold them all. Its precise mode turns weights to unsigned ones; it refuses models with weights
    in blocks or that several nodes share, and leaves weights that are computed as they are.
    """
    import onnxruntime

    source = model if isinstance(model, bytes) else str(model)
    providers = ["CPUExecutionProvider"]
    options.add_session_config_entry("session.x64quantprecision", "1")
    try:
        return onnxruntime.InferenceSession(source, options, providers=providers)
    except Exception:  # its exceptions share no base but Exception
        options.add_session_config_entry("session.x64quantprecision", "0")
        return onnxruntime.InferenceSession(source, options, providers=providers)


def _options(operators: Sequence[str]) -> Any:
    """Options under which a model gives the same on every machine.

    On one thread, sums are made in the same order. What lies between DequantizeLinear and
    QuantizeLinear is computed in float.
    """
    options = session_options(operators)
    options.intra_op_num_threads = 1
    options.add_session_config_entry("session.disable_quant_qdq", "1")
    return options


def _run_onnxruntime(
    path: Path, inputs: Mapping[str, Array], operators: Sequence[str]
) -> tuple[dict[str, Array], str]:
    import onnxruntime

    outputs = _session(path, _options(operators))(inputs)
    return outputs, f"onnxruntime {onnxruntime.__version__}"


def _run_evaluator(path: Path, inputs: Mapping[str, Array]) -> tuple[dict[str, Array], str]:
    from onnx.reference import ReferenceEvaluator

    evaluator: Any = ReferenceEvaluator(str(path))
    names = list(evaluator.output_names)
    outputs = dict(zip(names, map(np.asarray, evaluator.run(None, dict(inputs))), strict=True))
    return outputs, f"onnx.reference {onnx.__version__}"


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
