"""hybridc as an ONNX back end: the interface that ONNX's own test suite drives.

    from hybridc import onnx_backend
    outputs = onnx_backend.run_model(model, inputs)

Models go through the compiler and the loader in this process; only the bundle's files are left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import onnx
import onnx_ir as ir
from onnx.backend.base import Backend, BackendRep

from hybridc.compiler import Options, build, load_built
from hybridc.errors import UnsupportedError
from hybridc.frontend.border import forget_maps
from hybridc.frontend.read import source_of
from hybridc.frontend.shapes import model_inputs
from hybridc.targets.registry import parse_targets

Array: TypeAlias = "np.ndarray[Any, Any]"

MAX_BOUND = 64
"""Elements; a larger integer input is data and not a size or an axis."""


class CompiledModel(BackendRep):  # type: ignore[misc]
    """A compiled model that takes and gives values by position.

    What a compile needs and the model does not say is taken from the inputs when they are first
    seen, and again when it changes: dynamic dimensions, and where some inputs must be known at
    compile time (axes, say), the values of all its small integer inputs.
    """

    def __init__(self, proto: onnx.ModelProto, target: str, fallback: bool) -> None:
        self._proto = proto
        self._target = target
        self._fallback = fallback
        self._inputs = model_inputs(ir.from_proto(_without_maps(proto)))
        self._binds = False
        self._key: Any = None
        if all(_is_known(value) for value in self._inputs):
            self._compile({})

    def _compile(self, arrays: Mapping[str, Any]) -> None:
        """Compile for inputs like ``arrays``, unless that is done already.

        Raises:
            UnsupportedError: The model cannot be compiled, whatever the inputs.
        """
        shapes = {
            str(value.name): np.shape(arrays[str(value.name)])
            for value in self._inputs
            if not _is_known(value)
        }
        bound = {n: x for n, x in arrays.items() if _may_be_size(x)} if self._binds else {}
        key = (shapes, {name: (x.tolist(), x.dtype) for name, x in bound.items()})
        if key == self._key:
            return
        options = Options(
            parse_targets([self._target]),
            {name: shape for name, shape in shapes.items() if name not in bound},
            bound,
            fallback=self._fallback,
        )
        try:
            built, _notes = build(source_of(self._proto), options)
        except UnsupportedError:
            if self._binds or not any(map(_may_be_bound, self._inputs)):
                raise
            self._binds = True
            return
        self.model = load_built(built)
        self._key = key

    def run(self, inputs: Any, **_options: Any) -> list[Any]:
        """Outputs in the model's order.

        Args:
            inputs: One value per input, in the model's order: an array, or what
                :meth:`hybridc.runtime.loader.Model.run` takes for what is no tensor.
        """
        names = [str(value.name) for value in self._inputs]
        arrays = {name: _plain(value) for name, value in zip(names, inputs, strict=True)}
        self._compile(arrays)
        if self._key is None:  # the first try has found out that values must be bound
            self._compile(arrays)
        outputs = self.model.run({spec.name: arrays[spec.name] for spec in self.model.inputs})
        return [outputs[spec.name] for spec in self.model.outputs]


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
        """Compile a model; what it leaves open is decided by the first inputs.

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


def _may_be_bound(value: ir.Value) -> bool:
    """Whether an input's values may decide whether a model compiles: sizes, axes, conditions."""
    return (value.dtype is not None and value.dtype.is_integer()) or value.dtype == ir.DataType.BOOL


def _plain(value: Any) -> Any:
    """A number or something like an array as an array; lists, dicts and ``None`` as they are."""
    return value if value is None or isinstance(value, list | dict) else np.asarray(value)


def _is_known(value: ir.Value) -> bool:
    """Whether an input has a shape of numbers, or needs none."""
    if not isinstance(value.type, ir.TensorType):
        return True
    return value.shape is not None and value.shape.is_static()


def _without_maps(proto: onnx.ModelProto) -> onnx.ModelProto:
    copy = onnx.ModelProto()
    copy.CopyFrom(proto)
    forget_maps(copy)
    return copy


prepare = HybridcBackend.prepare
run_model = HybridcBackend.run_model
supports_device = HybridcBackend.supports_device
