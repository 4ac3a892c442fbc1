"""hybridc as an ONNX back end: the interface that ONNX's own test suite drives.

    from hybridc import onnx_backend
    outputs = onnx_backend.run_model(model, inputs)

Models go through the compiler and the loader in this process; only the bundle's files are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from onnx.backend.base import Backend, BackendRep

from hybridc.compiler import Options, build, load_built
from hybridc.frontend.read import source_of
from hybridc.frontend.shapes import Request, model_inputs
from hybridc.runtime.loader import Model
from hybridc.targets.registry import parse_targets


class CompiledModel(BackendRep):  # type: ignore[misc]
    """A compiled model that takes and gives arrays by position."""

    def __init__(self, model: Model) -> None:
        self.model = model

    def run(self, inputs: Any, **_options: Any) -> list[np.ndarray[Any, Any]]:
        """Outputs in the model's order.

        Args:
            inputs: One array per input, in the model's order.
        """
        names = [spec.name for spec in self.model.inputs]
        arrays = {name: np.asarray(x) for name, x in zip(names, inputs, strict=True)}
        outputs = self.model.run(arrays)
        return [outputs[spec.name] for spec in self.model.outputs]


class HybridcBackend(Backend):  # type: ignore[misc]
    """The interface of ``onnx.backend.base.Backend``."""

    @classmethod
    def prepare(
        cls,
        model: onnx.ModelProto,
        device: str = "CPU",
        target: str = "llvm:host",
        **_options: Any,
    ) -> CompiledModel:
        """Compile a model; dynamic dimensions that it names only are set to 1."""
        source = source_of(model)
        shapes: dict[str, tuple[Request, ...]] = {}
        for value in model_inputs(source.model):
            for dim in value.shape or ():
                if not isinstance(dim, int) and dim.value:
                    shapes[str(dim.value)] = (1,)
        built, _notes = build(source, Options(parse_targets([target]), shapes))
        return CompiledModel(load_built(built))

    @classmethod
    def run_model(
        cls, model: onnx.ModelProto, inputs: Sequence[Any], device: str = "CPU", **options: Any
    ) -> list[np.ndarray[Any, Any]]:
        """Compile a model and run it once."""
        return cls.prepare(model, device, **options).run(inputs)

    @classmethod
    def supports_device(cls, device: str) -> bool:
        """Whether models can be compiled for an ONNX device name."""
        return device == "CPU"


prepare = HybridcBackend.prepare
run_model = HybridcBackend.run_model
supports_device = HybridcBackend.supports_device
