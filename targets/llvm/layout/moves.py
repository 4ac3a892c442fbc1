"""Let kernels store their results in the layout that is wanted, where a copy would change it.

    integer product, channels last -> cast, scale -> transpose -> HardSwish -> block
    blocked convolution -> unblock -> bias, HardSwish, quantize -> transpose

TVM fuses element-wise work into the kernel before it, but no transposition. Behind these two kinds
of kernels, a vector of results is one in the other layout, too, so changing it costs nothing: the
kernels on the way that only move elements are declared element-wise, and TVM fuses all of it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import tvm
from hybridc.targets.llvm.layout.graph import (
    bindings_of,
    called_kernel,
    count_uses,
    variables_used,
)
from hybridc.targets.llvm.schedules.blocked_tiles import BLOCKED
from hybridc.targets.llvm.schedules.blocks import (
    axes_of,
    collect,
    inner_blocks,
    is_spatial,
    loads_of,
    same_variables,
    store_of,
)
from hybridc.targets.llvm.schedules.integer_tiles import INTEGER
from hybridc.targets.llvm.schedules.layouts import FIRST, IN_BLOCKS, LAST, is_move
from hybridc.targets.relax_pipeline import MOVES, with_attribute
from tvm import tirx
from tvm.s_tir import SBlock


def fuse_moves(module: tvm.IRModule) -> tvm.IRModule:
    """The module with kernels declared element-wise that change the layout of a kernel's result.

    Args:
        module: Tensor programs that are not fused yet, and ``main``, which calls them.
    """
    return with_attribute(module, _Reader(module).moves(), MOVES, 1)


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
        uses = count_uses(main)
        for binding in bindings_of(main):
            self.values[binding.var] = getattr(binding, "value", None)
            self.readers |= dict.fromkeys(variables_used(binding.value), binding.var)
        self.readers = {v: reader for v, reader in self.readers.items() if uses[v] == 1}

    def moves(self) -> set[Any]:
        """The results of kernels that can become part of a kernel before them."""
        found: set[Any] = set()
        for variable in self.values:
            function = called_kernel(self.module, self.values[variable])
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
        function = called_kernel(self.module, self.values.get(reader))
        blocks = inner_blocks(function) if function is not None else []
        if function is None or len(blocks) != 1 or not is_spatial(blocks[0]):
            return None
        store, axes = store_of(blocks[0]), axes_of(blocks[0])
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


def _annotations(function: tirx.PrimFunc) -> set[str]:
    """Names of the annotations of all blocks."""
    return {str(name) for block in collect(function.body, SBlock) for name in block.annotations}
