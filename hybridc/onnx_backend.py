"""hybridc as an ONNX back end: the interface that ONNX's own test suite drives.

    from hybridc import onnx_backend
    outputs = onnx_backend.run_model(model, inputs)

Models go through the compiler and the loader in this process; only the bundle's files are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import onnx
import onnx_ir as ir
from onnx.backend.base import Backend, BackendRep

from hybridc.compiler import Options, build, load_built
from hybridc.errors import UnsupportedError
from hybridc.frontend.read import source_of
from hybridc.frontend.shapes import Request, model_inputs
from hybridc.runtime.loader import Model
from hybridc.targets.registry import parse_targets

Array: TypeAlias = "np.ndarray[Any, Any]"

MAX_BOUND = 64
"""Elements; a larger integer input is data and not a size or an axis."""


class CompiledModel(BackendRep):  # type: ignore[misc]
    """A compiled model that takes and gives arrays by position.

    A model that needs the values of some inputs at compile time (axes, say) is compiled when they
    are first seen, with all its small integer inputs bound to them.
    """

    def __init__(self, proto: onnx.ModelProto, target: str, fallback: bool) -> None:
        self._proto = proto
        self._target = target
        self._fallback = fallback
        self._names = [str(value.name) for value in model_inputs(ir.from_proto(proto))]
        self._bound: dict[str, Array] = {}
        try:
            self.model = self._compile()
        except UnsupportedError as refusal:
            if "at compile time" not in str(refusal):
                raise
            self._bound = {name: np.empty(0) for name in self._names}

    def _compile(self) -> Model:
        source = source_of(self._proto)
        inputs = [v for v in model_inputs(source.model) if v.name not in self._bound]
        shapes = {str(v.name): _request(v) for v in inputs if isinstance(v.type, ir.TensorType)}
        options = Options(
            parse_targets([self._target]), shapes, self._bound, fallback=self._fallback
        )
        built, _notes = build(source, options)
        return load_built(built)

    def run(self, inputs: Any, **_options: Any) -> list[np.ndarray[Any, Any]]:
        """Outputs in the model's order.

        Args:
            inputs: One value per input, in the model's order: an array, or what
                :meth:`hybridc.runtime.loader.Model.run` takes for what is no tensor.
        """
        arrays = {name: _plain(value) for name, value in zip(self._names, inputs, strict=True)}
        if self._bound:
            self._bind(arrays)
        outputs = self.model.run({n: x for n, x in arrays.items() if n not in self._bound})
        return [outputs[spec.name] for spec in self.model.outputs]

    def _bind(self, arrays: dict[str, Array]) -> None:
        """Compile for these values of the small integer inputs, unless that is done already."""
        wanted = {name: array for name, array in arrays.items() if _may_be_size(array)}
        same = wanted.keys() == self._bound.keys() and all(
            np.array_equal(wanted[name], self._bound[name]) for name in wanted
        )
        if not same:
            self._bound = wanted
            self.model = self._compile()


class HybridcBackend(Backend):  # type: ignore[misc]
    """The interface of ``onnx.backend.base.Backend``."""

    @classmethod
    def prepare(
        cls,
        model: onnx.ModelProto,
        device: str = "CPU",
        target: str = "llvm:host",
        fallback: bool = True,
        **_options: Any,
    ) -> CompiledModel:
        """Compile a model; dynamic dimensions are set to 1.

        With ``fallback``, ONNX Runtime runs the nodes that the target does not compile.
        """
        return CompiledModel(model, target, fallback)

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


def _may_be_size(array: Any) -> bool:
    """Whether an input may be what sizes or axes are taken from: short integers, or one number."""
    if not isinstance(array, np.ndarray) or array.dtype.kind == "O":
        return False
    return array.size <= (MAX_BOUND if array.dtype.kind in "iub" else 1)


def _plain(value: Any) -> Any:
    """A number or something like an array as an array; lists, dicts and ``None`` as they are."""
    return value if value is None or isinstance(value, list | dict) else np.asarray(value)


def _request(value: ir.Value) -> tuple[Request, ...]:
    """The shape of an input as the model has it; unknown dimensions are 1."""
    dims = [] if value.shape is None else list(value.shape)
    return tuple(dim if isinstance(dim, int) and dim >= 0 else 1 for dim in dims)


prepare = HybridcBackend.prepare
run_model = HybridcBackend.run_model
supports_device = HybridcBackend.supports_device
