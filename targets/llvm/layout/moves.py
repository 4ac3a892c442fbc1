"""Let kernels store their results in the layout that is wanted, where a copy would change it.

    integer product, channels last -> cast, scale -> transpose -> HardSwish -> block
    blocked convolution -> unblock -> bias, HardSwish, quantize -> transpose

TVM fuses element-wise work into the kernel before it, but no transposition. Behind these two kinds
of kernels, a vector of results is one in the other layout, too, so changing it costs nothing: the
kernels on the way that only move elements are declared element-wise, and TVM fuses all of it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import tvm
from hybridc.targets.llvm.layout.graph import bindings_of, variables_used
from hybridc.targets.llvm.schedules.blocked_tiles import BLOCKED
from hybridc.targets.llvm.schedules.blocks import (
    axes_of,
    collect,
    is_spatial,
    loads_of,
    same_variables,
    store_of,
)
from hybridc.targets.llvm.schedules.integer_tiles import INTEGER
from hybridc.targets.llvm.schedules.layouts import FIRST, IN_BLOCKS, LAST, is_move
from hybridc.targets.relax_pipeline import MOVES, rewrite_main
from tvm import relax, tirx
from tvm.s_tir import SBlock


def fuse_moves(module: tvm.IRModule) -> tvm.IRModule:
    """The module with kernels declared element-wise that change the layout of a kernel's result.

    Args:
        module: Tensor programs that are not fused yet, and ``main``, which calls them.
    """
    moves = _Reader(module).moves()
    if not moves:
        return module
    builder = relax.BlockBuilder(module)
    declared: dict[Any, Any] = {}

    def call(old: Any) -> Any:
        variable = old.args[0]
        if variable not in declared:
            function = module[variable].with_attr(MOVES, 1)
            declared[variable] = builder.add_func(function, variable.name_hint)
        return relax.call_tir(declared[variable], old.args[1], old.ty_args[0])

    def block(old: Any) -> Any:
        return type(old)(
            [relax.VarBinding(b.var, call(b.value)) if b.var in moves else b for b in old.bindings]
        )

    return rewrite_main(builder, module, block)


@dataclass
class _Reader:
    """Reads ``main``.

    Attributes:
        module: The module.
        readers: The only reader of a variable, where there is one.
        values: What variables are bound to.
    """

    module: tvm.IRModule
    readers: dict[Any, Any] = field(default_factory=dict)
    values: dict[Any, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        main = self.module["main"]
        uses = Counter(variables_used(main.body.body))
        for binding in bindings_of(main):
            self.values[binding.var] = getattr(binding, "value", None)
            for variable in variables_used(binding.value):
                uses[variable] += 1
                self.readers[variable] = binding.var
        self.readers = {v: reader for v, reader in self.readers.items() if uses[v] == 1}

    def moves(self) -> set[Any]:
        """The results of kernels that can become part of a kernel before them."""
        found: set[Any] = set()
        for variable in self.values:
            function = self._kernel(variable)
            kinds = _annotations(function) if function is not None else set()
            if BLOCKED in kinds:
                found |= self._behind(variable, IN_BLOCKS, LAST)
            elif INTEGER in kinds:
                found |= self._behind(variable, LAST, IN_BLOCKS)
        return found

    def _behind(self, variable: Any, layout: str, wanted: str) -> set[Any]:
        """The moves behind a kernel that lead from one layout to another, or nothing."""
        moves: set[Any] = set()
        while layout != wanted:
            reader = self.readers.get(variable)
            after = self._layout(variable, reader, layout)
            if after is None:
                return set()
            if after != layout:
                moves.add(reader)
            variable, layout = reader, after
        return moves

    def _layout(self, variable: Any, reader: Any, layout: str) -> str | None:
        """The layout of a reader's result, if it works element by element or only moves them."""
        function = self._kernel(reader)
        if function is None:
            return None
        blocks = [b for b in collect(function.body, SBlock) if b.name_hint != "root"]
        store = store_of(blocks[0]) if len(blocks) == 1 and is_spatial(blocks[0]) else None
        axes = axes_of(blocks[0])
        if store is None or not same_variables(store.indices, axes):
            return None
        place = list(self.values[reader].args[1].fields).index(variable)
        operand = function.params[place]
        loads = [load for load in loads_of(blocks[0]) if load.source.same_as(operand)]
        if loads and all(same_variables(load.indices, axes) for load in loads):
            return layout
        if len(loads) != 1 or not store.value.same_as(loads[0]):
            return None
        layouts = (LAST, FIRST, IN_BLOCKS)
        return next((a for a in layouts if is_move(loads, blocks[0].iter_vars, layout, a)), None)

    def _kernel(self, variable: Any) -> tirx.PrimFunc | None:
        """The tensor program whose call a variable is bound to."""
        value: Any = self.values.get(variable)
        is_call = getattr(getattr(value, "op", None), "name", "") == "relax.call_tir"
        return self.module[value.args[0]] if is_call and len(value.args) == 2 else None


def _annotations(function: tirx.PrimFunc) -> set[str]:
    """Names of the annotations of all blocks."""
    return {str(name) for block in collect(function.body, SBlock) for name in block.annotations}
