"""Rewrite a kernel that treats channels alike so that it works on blocked tensors.

A tensor program qualifies if it reads its inputs' channel k only where it computes channel k (or
k plus a multiple of the block's size, as concatenations, slices and DepthToSpace do). Its channel
axis is then split into blocks and lanes, and the lanes become the last axis of every tensor that
has channels: pooling, resizing, element-wise kernels, global pooling and concatenations keep their
form.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import tvm
import tvm_ffi
from hybridc.targets.fitting import Misfit
from hybridc.targets.llvm.schedules.blocks import collect
from hybridc.targets.llvm.schedules.extents import number
from hybridc.targets.llvm.schedules.statements import index
from hybridc.targets.llvm.schedules.tails import variables_of
from tvm import tirx
from tvm.s_tir import SBlock, SBlockRealize

CHANNELS = 1
"""Position of the channel axis in outputs."""

RANKS = (3, 4)
"""Axes of plain tensors that may be blocked: batch, channels, and one or two spatial ones."""

_COMPARISONS = (tirx.LT, tirx.LE, tirx.GT, tirx.GE)


@dataclass(frozen=True)
class Blocked:
    """A rewritten kernel.

    Attributes:
        function: Takes and returns blocked tensors.
        axes: For each parameter, outputs included, the axis that holds its channels in the plain
            layout; ``None`` for a parameter that has none and stays as it is.
    """

    function: tirx.PrimFunc
    axes: tuple[int | None, ...]


def block_kernel(function: tirx.PrimFunc, lanes: int) -> Blocked:
    """The kernel on blocked tensors.

    Raises:
        Misfit: It does not treat channels alike.
    """
    root = function.body.block if isinstance(function.body, SBlockRealize) else None
    output = function.params[-1]
    if root is None or root.match_buffers or len(output.shape) not in RANKS:
        raise Misfit("no kernel with one output over images")
    nests = list(root.body.seq) if isinstance(root.body, tirx.SeqStmt) else [root.body]
    work = _Rewriter(lanes, {output: CHANNELS})
    rewritten = [work.nest(nest) for nest in reversed(nests)]
    work.check_untouched()
    renamed = work.renamed
    body = SBlock(
        root.iter_vars,
        [],
        [],
        root.name_hint,
        tirx.SeqStmt(rewritten[::-1]) if len(rewritten) > 1 else rewritten[0],
        root.init,
        [renamed.get(buffer, buffer) for buffer in root.alloc_buffers],
        [],
        root.annotations,
    )
    parameters = [renamed.get(buffer, buffer) for buffer in function.params]
    attributes = {str(k): v for k, v in function.attrs.items()} if function.attrs else {}
    new = tirx.PrimFunc(parameters, SBlockRealize([], True, body))
    new = new.with_attr(attributes) if attributes else new
    return Blocked(new, tuple(work.axes.get(buffer) for buffer in function.params))


def blocked_shape(shape: tuple[Any, ...], axis: int, lanes: int) -> tuple[Any, ...]:
    """Shape with the channel axis counted in blocks and the lanes last."""
    return (*shape[:axis], -(-shape[axis] // lanes), *shape[axis + 1 :], lanes)


@dataclass
class _Rewriter:
    """Rewrites loop nests, last one first, and learns on the way which buffers have channels.

    Attributes:
        lanes: Channels of one block.
        axes: Channel axis by buffer.
        renamed: Blocked buffer by plain buffer.
        untouched: Nests that were left as they are.
    """

    lanes: int
    axes: dict[Any, int]
    renamed: dict[Any, Any] = field(default_factory=dict)
    untouched: list[Any] = field(default_factory=list)

    def buffer(self, buffer: Any, axis: int) -> Any:
        """The blocked buffer for a plain one whose channels are on ``axis``."""
        if self.axes.setdefault(buffer, axis) != axis:
            raise Misfit("channels on two axes of one tensor")
        if buffer not in self.renamed:
            if not isinstance(buffer.shape[axis], tirx.IntImm):
                raise Misfit("an unknown number of channels")
            shape = blocked_shape(tuple(map(number, buffer.shape)), axis, self.lanes)
            sizes = [index(dim) for dim in shape]
            self.renamed[buffer] = tirx.decl_buffer(sizes, buffer.dtype, buffer.name, layout=None)
        return self.renamed[buffer]

    def nest(self, nest: Any) -> Any:
        """One loop nest, rewritten if it writes a buffer with channels."""
        blocks = collect(nest, SBlock)
        if len(blocks) != 1:
            raise Misfit("nested blocks")
        (block,) = blocks
        stores = collect(block.body, tirx.BufferStore)
        if len(stores) != 1 or not isinstance(block.body, tirx.BufferStore):
            raise Misfit("not one plain store")
        axis = self.axes.get(stores[0].buffer)
        if axis is None:
            self.untouched.append(nest)
            return nest
        _check_realize(nest, block)
        return self._block(block, stores[0].indices[axis])

    def _block(self, block: SBlock, channel: Any) -> Any:
        kinds = {axis.var: axis for axis in block.iter_vars}
        if channel in kinds and not isinstance(kinds[channel].dom.extent, tirx.IntImm):
            raise Misfit("an unknown number of channels")
        if channel not in kinds or kinds[channel].iter_type != tirx.IterVar.DataPar:
            raise Misfit("a channel that is no axis")
        outer = tirx.Var(channel.name, channel.ty.dtype)
        lane = tirx.Var("lane", channel.ty.dtype)
        accesses = _Accesses(self, channel, outer, lane)
        body, init = accesses.rewrite(block.body), None
        if block.init is not None:
            init = accesses.rewrite(block.init)
        spatial: list[Any] = []
        reduced: list[Any] = []
        for axis in block.iter_vars:
            (spatial if axis.iter_type == tirx.IterVar.DataPar else reduced).append(
                self._outer_axis(axis, outer) if axis.var.same_as(channel) else axis
            )
        extent = tirx.IntImm(channel.ty.dtype, self.lanes)
        spatial.append(tirx.IterVar(tvm.ir.Range(0, extent), lane, tirx.IterVar.DataPar))
        return _nest([*spatial, *reduced], block, body, init)

    def _outer_axis(self, axis: Any, outer: Any) -> Any:
        count = -(-int(axis.dom.extent) // self.lanes)
        extent = tirx.IntImm(outer.ty.dtype, count)
        return tirx.IterVar(tvm.ir.Range(0, extent), outer, axis.iter_type)

    def check_untouched(self) -> None:
        """Raise if a nest that was left alone uses a buffer that is blocked now."""
        for nest in self.untouched:
            for access in collect(nest, tvm.ir.TensorLoad, tirx.BufferStore):
                buffer = access.source if isinstance(access, tvm.ir.TensorLoad) else access.buffer
                if buffer in self.renamed:
                    raise Misfit("a tensor with channels that is also used in another way")


def _check_realize(nest: Any, block: SBlock) -> None:
    """Raise unless every axis runs over one whole loop of its own, without a condition."""
    (realize,) = collect(nest, SBlockRealize)
    loops = {loop.loop_var: loop for loop in collect(nest, tirx.For)}
    predicate = realize.predicate
    if not isinstance(predicate, tirx.IntImm) or not int(predicate):
        raise Misfit("a condition")
    for value in realize.iter_values:
        if not isinstance(value, tirx.Var) or value not in loops:
            raise Misfit("an axis that is no loop")


@dataclass(frozen=True)
class _Accesses:
    """Rewrites the accesses of one block."""

    rewriter: _Rewriter
    channel: Any
    outer: Any
    lane: Any

    def rewrite(self, statement: Any) -> Any:
        """The statement on blocked buffers.

        Raises:
            Misfit: The channel is used in another way than to select a channel.
        """
        rules = [
            (tvm.ir.TensorLoad, self._load),
            (tirx.BufferStore, self._store),
            (_COMPARISONS, self._comparison),
        ]
        try:
            result = tvm_ffi.structural_map(statement, rules)
        except RuntimeError as error:
            # What a callback raises comes back as TVM's own error.
            raise Misfit(str(error)) from error
        if self.channel in variables_of(result):
            raise Misfit("a value that depends on the channel's number")
        return result

    def _load(self, load: Any) -> Any:
        found = self._indices(load.source, load.indices)
        return load if found is None else tirx.BufferLoad(*found)

    def _store(self, store: Any) -> Any:
        found = self._indices(store.buffer, store.indices)
        if found is None:
            raise Misfit("a store to a tensor without channels")
        return tirx.BufferStore(found[0], store.value, found[1])

    def _indices(self, buffer: Any, indices: Any) -> tuple[Any, list[Any]] | None:
        used = [i for i, index in enumerate(indices) if self.channel in variables_of(index)]
        if not used:
            if buffer in self.rewriter.axes:
                raise Misfit("one channel read by all")
            return None
        if len(used) != 1:
            raise Misfit("a channel on two axes")
        (axis,) = used
        new = list(indices)
        new[axis] = self._outer_index(indices[axis])
        return self.rewriter.buffer(buffer, axis), [*new, self.lane]

    def _outer_index(self, index: Any) -> Any:
        coefficients = tvm.sym.detect_linear_equation(index, [self.channel])
        scale = coefficients[0] if len(coefficients) == 2 else None
        if not isinstance(scale, tirx.IntImm) or int(scale) != 1:
            raise Misfit("a channel that is not read straight")
        # The offset may depend on the pixel, as where channels are laid out as pixels.
        analyzer, offset, lanes = tvm.sym.Analyzer(), coefficients[1], self.rewriter.lanes
        steps = analyzer.modular_set(offset)
        if int(steps.coeff) % lanes or int(steps.base) % lanes:
            raise Misfit("channels moved by a part of a block")
        return self.outer + analyzer.simplify(tirx.floordiv(offset, lanes))

    def _comparison(self, comparison: Any) -> Any:
        """``k <= channel`` and the like, with k a multiple of the lanes."""
        if self.channel not in variables_of(comparison):
            return comparison
        left, right = comparison.a, comparison.b
        lanes = self.rewriter.lanes
        for side, other, kinds in (
            (left, right, (tirx.LT, tirx.GE)),
            (right, left, (tirx.LE, tirx.GT)),
        ):
            whole = isinstance(other, tirx.IntImm) and int(other) % lanes == 0
            if side.same_as(self.channel) and whole and isinstance(comparison, kinds):
                bound = tirx.IntImm(self.outer.ty.dtype, int(other) // lanes)
                pair = (self.outer, bound) if side is left else (bound, self.outer)
                return type(comparison)(*pair)
        raise Misfit("a condition on the channel's number")


def _nest(axes: list[Any], block: SBlock, body: Any, init: Any) -> Any:
    reads = [_point(load.source, load.indices) for load in collect(body, tvm.ir.TensorLoad)]
    writes = [_point(store.buffer, store.indices) for store in collect(body, tirx.BufferStore)]
    stored = [write.source for write in writes]
    reads = [read for read in reads if not any(read.source.same_as(s) for s in stored)]
    new = SBlock(axes, reads, writes, block.name_hint, body, init, [], [], block.annotations)
    loops = [tirx.Var(axis.var.name, axis.var.ty.dtype) for axis in axes]
    statement: Any = SBlockRealize(loops, True, new)
    for loop, axis in zip(reversed(loops), reversed(axes), strict=True):
        statement = tirx.For(loop, 0, axis.dom.extent, tirx.ForKind.SERIAL, statement)
    return statement


def _point(buffer: Any, indices: Mapping[Any, Any]) -> Any:
    one = [tvm.ir.Range.from_min_extent(i, tirx.IntImm(i.ty.dtype, 1)) for i in indices]
    return tirx.BufferRegion(buffer, one)
