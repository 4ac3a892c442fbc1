"""Rewrite a module so that the chosen results are blocked, and pack the weights for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tvm
from hybridc.targets.llvm.cpu import Cpu
from hybridc.targets.llvm.layout.channelwise import CHANNELS, blocked_shape
from hybridc.targets.llvm.layout.choose import geometry_of, is_blocked_source
from hybridc.targets.llvm.layout.graph import Graph, Kernel, bindings_of, dims_of, variables_used
from hybridc.targets.llvm.layout.kernels import (
    block_channels,
    blocked_convolution,
    pack_weight,
    unblock_channels,
)
from hybridc.targets.llvm.layout.main_writer import MainWriter
from hybridc.targets.llvm.layout.winograd import pack_winograd, winograd_convolution
from hybridc.targets.llvm.schedules.blocked_tiles import Geometry
from tvm import relax, te

from hybridc.bundle.tensors import Array


def rewrite(graph: Graph, chosen: set[Any], cpu: Cpu) -> tuple[tvm.IRModule, Mapping[str, Array]]:
    """The module with the results in ``chosen`` blocked, and its weights in their new order."""
    packed = _Packed(graph, chosen, cpu)
    main = MainWriter(graph.module, packed.weights())
    return main.written(_Writer(graph, chosen, packed, main).block), main.weights


@dataclass
class _Packed:
    """Which weights the new module takes, and in which form."""

    graph: Graph
    chosen: set[Any]
    cpu: Cpu
    made: dict[str, Array] = field(default_factory=dict)
    geometries: dict[Any, Geometry] = field(default_factory=dict)

    def weights(self) -> dict[str, Array]:
        """All weights in their new order: those kept as they are, then the packed ones."""
        needed: set[Any] = variables_used(self.graph.module["main"].body.body)
        for binding in bindings_of(self.graph.module["main"]):
            if binding.var in self.chosen:
                needed |= self._kept(self.graph.kernels[binding.var])
            else:
                needed |= variables_used(binding.value)
        positions = {p for variable, p in self.graph.weight_of.items() if variable in needed}
        names = enumerate(self.graph.weights)
        kept = {name: self.graph.weights[name] for i, name in names if i in positions}
        return {**kept, **self.made}

    def _kept(self, kernel: Kernel) -> set[Any]:
        """Operands that a blocked kernel takes as they are; packs its weights."""
        if kernel.convolution is not None:
            geometry = geometry_of(self.graph, kernel, self.cpu)
            self.geometries[kernel.variable] = geometry
            name = self.convolution_name(kernel)
            if name not in self.made:
                pack = pack_winograd if geometry.winograd else pack_weight
                self.made[name] = pack(self._array(kernel.operands[1]), geometry)
            return set()
        assert kernel.blocked is not None
        for operand, axis in zip(kernel.operands, kernel.blocked.axes, strict=False):
            if axis is not None and operand in self.graph.weight_of:
                name = self.channels_name(operand, axis)
                if name not in self.made:
                    self.made[name] = _block_array(self._array(operand), axis, self.graph.lanes)
        axes = zip(kernel.operands, kernel.blocked.axes, strict=False)
        return {operand for operand, axis in axes if axis is None}

    def name(self, variable: Any) -> str:
        """Name of a weight."""
        return list(self.graph.weights)[self.graph.weight_of[variable]]

    def _array(self, variable: Any) -> Array:
        return self.graph.weights[self.name(variable)]

    def convolution_name(self, kernel: Kernel) -> str:
        """Name of a convolution's packed weights; the same for the same packing."""
        g = self.geometries[kernel.variable]
        form = "depthwise" if g.depthwise else f"{min(g.source_lanes, g.channels)}x{g.vectors}"
        form = f"groups{g.vectors}" if g.mixes_groups else form
        form = f"winograd{g.winograd}_{form}" if g.winograd else form
        return f"{self.name(kernel.operands[1])}.packed_{form}x{g.lanes}"

    def channels_name(self, variable: Any, axis: int) -> str:
        """Name of a weight with blocked channels."""
        return f"{self.name(variable)}.blocked_{axis}x{self.graph.lanes}"


def _block_array(array: Array, axis: int, lanes: int) -> Array:
    """An array with the channels on ``axis`` in blocks, lanes last; missing ones are zero."""
    missing = -array.shape[axis] % lanes
    widths = [(0, missing if i == axis else 0) for i in range(array.ndim)]
    shape = (*array.shape[:axis], -1, lanes, *array.shape[axis + 1 :])
    split = np.pad(array, widths).reshape(shape)
    return np.ascontiguousarray(np.moveaxis(split, axis + 1, -1))


@dataclass
class _Writer:
    """Writes ``main`` anew, binding by binding.

    Attributes:
        graph: The module and what is known about it.
        chosen: Variables of the kernels whose results are blocked.
        packed: The weights' new forms.
        main: Holds the new weights and kernels.
        blocked: Blocked variable by plain variable.
        bindings: What was written of the block at work.
    """

    graph: Graph
    chosen: set[Any]
    packed: _Packed
    main: MainWriter
    blocked: dict[Any, Any] = field(default_factory=dict)
    bindings: list[Any] = field(default_factory=list)
    read_plain: set[Any] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.read_plain |= self.graph.plain_uses
        for kernel in self.graph.kernels.values():
            if kernel.variable not in self.chosen:
                self.read_plain |= set(kernel.carried(self.graph))

    def block(self, block: Any) -> Any:
        """One block of bindings."""
        self.bindings = []
        for binding in block.bindings:
            if binding.var in self.chosen:
                self._kernel(self.graph.kernels[binding.var])
            elif self.graph.absorbed.get(binding.var) in self.chosen:
                pass  # the convolution reads what is shuffled
            elif binding.var in self.graph.weight_of:
                self._kept_weight(binding)
            else:
                self.bindings.append(binding)
        return type(block)(self.bindings)

    def _kept_weight(self, binding: Any) -> None:
        name = self.packed.name(binding.var)
        if name in self.main.weights:
            self._bind(binding.var, self.main.item(name))

    def _kernel(self, kernel: Kernel) -> None:
        """Write a kernel whose result is blocked, and its plain copy if something reads that."""
        write = self._convolution if kernel.convolution is not None else self._channelwise
        variable = kernel.variable
        self.blocked[variable] = self._twin(variable, write(kernel))
        if variable in self.read_plain:
            shape = dims_of(variable)
            key = ("unblock", shape[1])
            call = self._emit(
                key, lambda data, _: unblock_channels(data, shape[1]), shape, self.blocked[variable]
            )
            self._bind(variable, call)

    def _convolution(self, kernel: Kernel) -> Any:
        geometry = self.packed.geometries[kernel.variable]
        data = kernel.operands[0]
        if is_blocked_source(self.graph, kernel):
            data = self._blocked(data)
        weight = self._weight(kernel.operands[1], self.packed.convolution_name(kernel))
        key = ("convolution", geometry)
        shape = self._blocked_shape(kernel.variable)

        def build(data: te.Tensor, weight: te.Tensor, shape: Sequence[Any]) -> te.Tensor:
            if geometry.winograd:
                return winograd_convolution(geometry, data, weight)
            return blocked_convolution(geometry, data, weight, shape)

        return self._emit(key, build, shape, data, weight)

    def _blocked_shape(self, variable: Any) -> tuple[Any, ...]:
        return blocked_shape(dims_of(variable), CHANNELS, self.graph.lanes)

    def _channelwise(self, kernel: Kernel) -> Any:
        assert kernel.blocked is not None
        operands = []
        for operand, axis in zip(kernel.operands, kernel.blocked.axes, strict=False):
            if axis is None:
                operands.append(operand)
            elif operand in self.graph.weight_of:
                name = self.packed.channels_name(operand, axis)
                operands.append(self._weight(operand, name))
            else:
                operands.append(self._blocked(operand))
        old, function = kernel.call.args[0], kernel.blocked.function
        functions = self.main.functions
        if old not in functions:
            functions[old] = self.main.builder.add_func(function, f"{old.name_hint}_blocked")
        shape = self._blocked_shape(kernel.variable)
        return self.main.call(functions[old], *operands, *kernel.primitives, shape=shape)

    def _blocked(self, variable: Any) -> Any:
        """The blocked form of a tensor, copied if it was computed plain."""
        if variable not in self.blocked:
            lanes = self.graph.lanes
            shape = self._blocked_shape(variable)
            call = self._emit(
                ("block",), lambda data, _: block_channels(data, lanes), shape, variable
            )
            self.blocked[variable] = self._twin(variable, call)
        return self.blocked[variable]

    def _weight(self, variable: Any, name: str) -> Any:
        return self._twin(variable, self.main.item(name))

    def _twin(self, variable: Any, value: Any) -> Any:
        """A variable that is visible where ``variable`` is, bound to another value."""
        kind = self.main.type_of(value)
        return self._bind(type(variable)(f"{variable.name}_blocked", kind), value)

    def _bind(self, variable: Any, value: Any) -> Any:
        self.bindings.append(relax.VarBinding(variable, value))
        return variable

    def _emit(
        self, key: Any, build: Callable[..., te.Tensor], shape: Sequence[Any], *operands: Any
    ) -> Any:
        fuses, name = key[0] == "convolution", f"{key[0]}_blocked"
        return self.main.kernel(name, key, build, *operands, fuses=fuses, shape=shape)
