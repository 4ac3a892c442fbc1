"""Channels innermost: the layout in which tensor cores get the factors of convolutions best.

Where a tensor lies in memory is nobody's business but its kernels'. So the layout of one between
kernels is changed by changing what these kernels index, and nothing is copied:

    y[n, c, h, w]  ->  y[n, h, w, c]        in the kernel that writes it and in those that read it

Tensors of four dimensions that are connected by kernels which keep batch and channels apart, such
as convolutions, pooling and element-wise kernels, change together, if a convolution for tensor
cores is among these kernels. Inputs, outputs and weights of ``main`` stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import tvm
from hybridc.targets.fitting import Misfit, if_it_fits
from hybridc.targets.llvm.layout.graph import bindings_of, sizes_of, variables_used
from hybridc.targets.llvm.schedules.blocks import (
    blocks_of,
    collect,
    is_reduction,
    loads_of,
    store_of,
)
from hybridc.targets.relax_pipeline import rewrite_main
from tvm import relax, tirx
from tvm.s_tir import Schedule

RANK = 4

MIN_CHANNELS = 8
"""Fewer do not fill 16 bytes."""


def channels_last(module: tvm.IRModule, types: frozenset[str]) -> tvm.IRModule:
    """The module with channels innermost where that helps convolutions.

    Args:
        module: A legalized Relax module.
        types: Types of factors that go to tensor cores.
    """
    graph = _Graph(module, types)
    changed = graph.changed()
    return _rewritten(module, changed) if changed else module


@dataclass(frozen=True)
class _Kernel:
    """What matters of a kernel.

    Attributes:
        apart: Whether it keeps batch and channels apart from all else.
        contracts: Whether it sums over the channels of a tensor for tensor cores.
    """

    apart: bool
    contracts: bool


@dataclass
class _Graph:
    """Which tensors are connected by kernels.

    Attributes:
        module: The module.
        types: Types of factors that go to tensor cores.
        kernels: What matters of its kernels, as far as it was asked for.
    """

    module: tvm.IRModule
    types: frozenset[str]
    kernels: dict[Any, _Kernel] = field(default_factory=dict)

    def changed(self) -> set[Any]:
        """The variables of ``main`` whose layout is changed."""
        calls = list(_calls(self.module))
        tensors = {binding.var for binding in calls if _has_image(binding.var)}
        tensors -= self._used_elsewhere({binding.var for binding in calls})
        groups = {variable: {variable} for variable in tensors}
        wanted: set[Any] = set()
        for binding in calls:
            around = [v for v in (*binding.value.args[1].fields, binding.var) if v in tensors]
            kernel = self._kernel(binding.value.args[0])
            if not kernel.apart:
                tensors.difference_update(around)
        for binding in calls:
            around = [v for v in (*binding.value.args[1].fields, binding.var) if v in tensors]
            for variable in around[1:]:
                _join(groups, around[0], variable)
            if around and self._kernel(binding.value.args[0]).contracts:
                wanted.update(around)
        return {v for group in (groups[w] for w in wanted) for v in group if v in tensors}

    def _used_elsewhere(self, called: set[Any]) -> set[Any]:
        """Variables that something else than kernels reads."""
        main = self.module["main"]
        found = variables_used(main.body.body)
        for binding in bindings_of(main):
            if binding.var not in called:
                found |= variables_used(binding.value)
        for block in main.body.blocks:
            for binding in block.bindings:
                if isinstance(block, relax.DataflowBlock) and not isinstance(
                    binding.var, relax.DataflowVar
                ):
                    found.add(binding.var)
        return found

    def _kernel(self, variable: Any) -> _Kernel:
        if variable not in self.kernels:
            found = if_it_fits(partial(self._read, self.module[variable]))
            self.kernels[variable] = found or _Kernel(apart=False, contracts=False)
        return self.kernels[variable]

    def _read(self, function: tirx.PrimFunc) -> _Kernel:
        schedule = Schedule(tvm.IRModule({"main": function}))
        contracts = False
        for block in map(schedule.get, blocks_of(schedule)):
            store = store_of(block)
            if store is None or not _is_image(store.buffer) or len(block.iter_vars) < RANK:
                return _Kernel(apart=False, contracts=False)
            axes = [axis.var for axis in block.iter_vars]
            if not all(i.same_as(a) for i, a in zip(store.indices, axes, strict=False)):
                return _Kernel(apart=False, contracts=False)
            summed = {a.var for a in block.iter_vars if a.iter_type == tirx.IterVar.CommReduce}
            for load in _image_loads(block, store):
                batch, channel, *rest = (set(collect(i, tirx.Var)) for i in load.indices)
                among = any({axes[0], axes[1]} & used for used in rest)
                if among or batch - {axes[0]} or channel - {axes[1]} - summed:
                    if _is_filter(load, axes, summed):
                        continue
                    return _Kernel(apart=False, contracts=False)
                if is_reduction(block) and channel and not channel - summed:
                    contracts |= str(load.source.dtype) in self.types
        return _Kernel(True, contracts)


def _calls(module: tvm.IRModule) -> Iterator[Any]:
    """Bindings of ``main`` to calls of kernels with one result."""
    for binding in bindings_of(module["main"]):
        value: Any = getattr(binding, "value", None)
        name = getattr(getattr(value, "op", None), "name", "")
        if name != "relax.call_tir" or len(value.args) != 2:
            continue
        plain = isinstance(value.args[1], relax.Tuple)
        if plain and isinstance(value.ty_args[0], relax.TensorType):
            yield binding


def _has_image(variable: Any) -> bool:
    """Whether a variable is a tensor of some channels with several places for each."""
    try:
        sizes = sizes_of(variable)
    except Misfit:
        return False
    return len(sizes) == RANK and sizes[2] * sizes[3] > 1 and sizes[1] >= MIN_CHANNELS


def _is_image(buffer: Any) -> bool:
    static = all(isinstance(dim, tirx.IntImm) for dim in buffer.shape)
    return static and len(buffer.shape) == RANK


def _image_loads(block: Any, store: Any) -> Iterator[Any]:
    for load in loads_of(block):
        if len(load.indices) == RANK and not load.source.same_as(store.buffer):
            yield load


def _is_filter(load: Any, axes: list[Any], summed: set[Any]) -> bool:
    """Whether a load is of a convolution's filters: at a channel of the results, and summands."""
    first, *rest = load.indices
    used = {variable for index in rest for variable in collect(index, tirx.Var)}
    return bool(summed) and first.same_as(axes[1]) and not used - summed


def _join(groups: dict[Any, set[Any]], first: Any, second: Any) -> None:
    if groups[first] is groups[second]:
        return
    groups[first] |= groups[second]
    for variable in groups[second]:
        groups[variable] = groups[first]


def _rewritten(module: tvm.IRModule, changed: set[Any]) -> tvm.IRModule:
    """The module with the layout of some variables changed."""
    builder = relax.BlockBuilder(module)
    kernels: dict[Any, Any] = {}
    new = {variable: type(variable)(variable.name, _last(variable.ty)) for variable in changed}

    def call(binding: Any) -> Any:
        value, variable = binding.value, binding.var
        operands = list(value.args[1].fields)
        places = tuple(i for i, v in enumerate([*operands, variable]) if v in changed)
        key = (value.args[0], places)
        if key not in kernels:
            function = _changed_kernel(module[value.args[0]], places)
            kernels[key] = builder.add_func(function, value.args[0].name_hint)
        arguments = relax.Tuple([new.get(operand, operand) for operand in operands])
        kind = _last(variable.ty) if variable in changed else value.ty_args[0]
        return relax.call_tir(kernels[key], arguments, kind)

    touched = {
        binding.var: binding
        for binding in _calls(module)
        if changed & {binding.var, *binding.value.args[1].fields}
    }

    def rewritten(binding: Any) -> Any:
        if binding.var not in touched:
            return binding
        return relax.VarBinding(new.get(binding.var, binding.var), call(binding))

    return rewrite_main(builder, module, lambda b: type(b)(list(map(rewritten, b.bindings))))


def _last(kind: Any) -> Any:
    batch, channels, height, width = kind.shape.values
    return relax.TensorType(relax.ShapeExpr([batch, height, width, channels]), kind.dtype)


def _changed_kernel(function: tirx.PrimFunc, places: tuple[int, ...]) -> tirx.PrimFunc:
    """A kernel with the channels of some parameters innermost, and those of all that it keeps."""
    schedule = Schedule(tvm.IRModule({"main": function}))
    tensors = [function.params[place] for place in places]
    for block in blocks_of(schedule):
        node = schedule.get(block)
        store: Any = store_of(node)
        inner = not any(store.buffer.same_as(given) for given in function.params)
        if inner or any(store.buffer.same_as(tensor) for tensor in tensors):
            schedule.transform_layout(block, ("write", 0), _channels_last)
            count = len(node.iter_vars)
            schedule.transform_block_layout(block, _with_channels_last(count))
        for index, region in enumerate(node.reads):
            if any(region.source.same_as(tensor) for tensor in tensors):
                schedule.transform_layout(block, ("read", index), _channels_last)
    changed = schedule.mod["main"]
    return changed.without_attr("global_symbol") if "global_symbol" in changed.attrs else changed


def _with_channels_last(count: int) -> Any:
    def order(*axes: Any) -> list[Any]:
        batch, channels, height, width, *summed = axes
        return [batch, height, width, channels, *summed]

    return tirx.IndexMap.from_func(order, ndim=count, index_dtype="int64")


def _channels_last(batch: Any, channels: Any, height: Any, width: Any) -> list[Any]:
    return [batch, height, width, channels]
