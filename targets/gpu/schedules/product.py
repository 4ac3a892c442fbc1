"""The form of a product: axes sorted, each kind fused to one, factors gathered by index.

    C[b, m, n] = sum over k of A[b, m, k] * B[b, n, k]

where b are the axes that both factors have, m those of the left one, n those of the right one, and
n is the side of the output's last axis. So a convolution becomes a matrix product whose right
factor is gathered from the image while it is fetched.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import tvm
from hybridc.targets.fitting import Misfit
from hybridc.targets.llvm.schedules.blocks import (
    axes_of,
    blocks_of,
    collect,
    extents_of,
    is_choice,
    is_reduction,
    is_spatial,
    loads_of,
    store_of,
    strides_of,
)
from tvm import tirx
from tvm.s_tir import Schedule

MIN_EXTENT = 8
"""Products with a shorter side are left to other rules."""


@dataclass(frozen=True)
class _Axes:
    """The block's axes by what they belong to, each a position among its axes."""

    extents: tuple[int, ...]
    both: tuple[int, ...]
    left: tuple[int, ...]
    right: tuple[int, ...]
    reduced: tuple[int, ...]

    def size(self, axes: Sequence[int]) -> int:
        return math.prod(self.extents[axis] for axis in axes)

    def ordered(self, strides: Sequence[int] | None) -> _Axes:
        """The same with summands in the order in which they lie in memory."""
        if strides is None:
            return self
        reduced = sorted(self.reduced, key=lambda axis: -strides[axis])
        return replace(self, reduced=tuple(reduced))

    def fused(self, values: dict[int, Any], axes: Sequence[int]) -> Any:
        """One index out of those of several axes; axes that have no value are of extent 1."""
        index: Any = tirx.IntImm("int64", 0)
        for axis in axes:
            if axis in values:
                index = index * self.extents[axis] + values[axis]
        return index


def only_product(schedule: Schedule) -> Any:
    """The only reduction, if it sums products of two tensors."""
    found = [block for block in blocks_of(schedule) if is_reduction(schedule.get(block))]
    if len(found) != 1:
        raise Misfit("not one reduction")
    node = schedule.get(found[0])
    store = store_of(node)
    if store is None or extents_of(node) is None or len(node.reads) != 2:
        raise Misfit("not a static reduction of two tensors")
    if not isinstance(store.value, tirx.Add) or not isinstance(store.value.b, tirx.Mul):
        raise Misfit("not a sum of products")
    if str(store.value.ty.dtype) not in ("float32", "int32"):
        raise Misfit("a type that is not tiled")
    return found[0]


def right_along_depth(schedule: Schedule, main: Any) -> bool:
    """Whether neighbors in memory of the right factor lie along the summands."""
    node = schedule.get(main)
    operands = _operands(node)
    last = max(i for i, axis in enumerate(node.iter_vars) if axis.iter_type == tirx.IterVar.DataPar)
    for load in operands:
        strides = strides_of(load.source, load.indices, axes_of(node))
        if strides is None:
            return False
        if strides[last]:
            return strides[last] != 1
    return False


def _strides(node: Any, buffer: Any) -> list[int] | None:
    """Elements between neighbors along each axis in a factor, where that is constant."""
    load = next(load for load in _operands(node) if load.source.same_as(buffer))
    return strides_of(load.source, load.indices, axes_of(node))


def _operands(node: Any) -> list[Any]:
    store = store_of(node)
    assert store is not None
    return [load for load in loads_of(node) if not load.source.same_as(store.buffer)]


def normalize(schedule: Schedule, main: Any, transposed: bool) -> tuple[str, str]:
    """Bring the product into its form; returns the names of the factors' new buffers' blocks."""
    _check_readers(schedule, main)
    node = schedule.get(main)
    strides = [_strides(node, region.source) for region in node.reads]
    names = []
    for index in range(2):
        names.append(schedule.get(schedule.reindex(main, ("read", index))).name_hint)
    result = schedule.reindex(main, ("write", 0))
    node = schedule.get(main)
    positions = [_positions(node, region.source) for region in node.reads]
    axes = _classify(node, positions)
    if not _has(axes, positions[1], axes.right):
        names.reverse()
        positions.reverse()
        strides.reverse()
    axes = axes.ordered(strides[0])
    forms = ((axes.left, False), (axes.right, not transposed))
    for name, place, (own, depth_first) in zip(names, positions, forms, strict=True):
        _lay_out(schedule, name, axes, place, own, depth_first)
    written = _positions(node, node.writes[0].source)
    schedule.transform_layout(
        result, ("read", 0), _map(axes, written, (axes.both, axes.left, axes.right))
    )
    everything = list(range(len(axes.extents)))
    groups = (axes.both, axes.left, axes.right, axes.reduced)
    schedule.transform_block_layout(main, _map(axes, everything, groups))
    return names[0], names[1]


def _check_readers(schedule: Schedule, main: Any) -> None:
    """Refuse readers of the results that have other elements than these.

    TVM inlines what pads a result, or cuts it off, where the results are written, and so loses
    elements or writes some that do not exist.
    """
    block = main
    while len(readers := list(schedule.get_consumers(block))) == 1:
        written = schedule.get(block).writes[0].source
        if not _keeps_elements(schedule.get(readers[0]), written):
            raise Misfit("the results are padded, cut off, or repeated")
        block = readers[0]


def _keeps_elements(reader: Any, written: Any) -> bool:
    """Whether a block has as many elements as what it reads, and leaves none out by its place."""
    extents = extents_of(reader)
    if extents is None or math.prod(extents) != math.prod(map(int, written.shape)):
        return False
    choices = [call for call in collect(reader.body, tvm.ir.Call) if is_choice(call)]
    return all(collect(choice.args[0], tvm.ir.TensorLoad) for choice in choices)


def _lay_out(
    schedule: Schedule, name: str, axes: _Axes, place: list[int], own: Any, depth_first: bool
) -> None:
    inner = (axes.reduced, own) if depth_first else (own, axes.reduced)
    block = schedule.get_sblock(name)
    schedule.transform_layout(block, ("write", 0), _map(axes, place, (axes.both, *inner)))


def _map(axes: _Axes, place: Sequence[int], groups: Sequence[Sequence[int]]) -> Any:
    """An index map from the axes at ``place`` to one index for each group."""

    def function(*indices: Any) -> list[Any]:
        values = dict(zip(place, indices, strict=True))
        return [axes.fused(values, group) for group in groups]

    return index_map(function, len(place))


def index_map(function: Callable[..., list[Any]], axes: int) -> Any:
    """TVM's form of a function from so many indices to others."""
    return tirx.IndexMap.from_func(function, ndim=axes, index_dtype="int64")


def _positions(node: Any, buffer: Any) -> list[int]:
    """Which axis each index of a reindexed buffer is."""
    accesses = [load.indices for load in loads_of(node) if load.source.same_as(buffer)]
    variables = axes_of(node)
    found = []
    for index in accesses[0]:
        same = [i for i, variable in enumerate(variables) if index.same_as(variable)]
        if len(same) != 1:
            raise Misfit("a factor is read by no plain index")
        found.append(same[0])
    return found


def _has(axes: _Axes, place: Sequence[int], wanted: Sequence[int]) -> bool:
    return all(axis in place or axes.extents[axis] == 1 for axis in wanted)


def _classify(node: Any, positions: Sequence[Sequence[int]]) -> _Axes:
    """Sort the axes; the right factor is the one that has the last axis of the results."""
    extents = tuple(extents_of(node) or ())
    kinds = [axis.iter_type for axis in node.iter_vars]
    groups: dict[tuple[bool, bool], list[int]] = {}
    reduced = []
    for axis, kind in enumerate(kinds):
        owners = (axis in positions[0], axis in positions[1])
        if kind == tirx.IterVar.CommReduce:
            if extents[axis] > 1 and not all(owners):
                raise Misfit("a summand's axis that one factor lacks")
            reduced.append(axis)
        elif extents[axis] > 1 and not any(owners):
            raise Misfit("an axis that no factor has")
        else:
            groups.setdefault(owners if extents[axis] > 1 else (True, True), []).append(axis)
    sides = [tuple(groups.get(key, ())) for key in ((True, False), (False, True))]
    left, right = sorted(sides, key=lambda side: max(side, default=-1))
    axes = _Axes(extents, tuple(groups.get((True, True), ())), left, right, tuple(reduced))
    if min(axes.size(axes.left), axes.size(axes.right), axes.size(axes.reduced)) < MIN_EXTENT:
        raise Misfit("too little to share")
    return axes


def read_index(reads: Sequence[Any], buffer: Any, name: str) -> int:
    """Which of the product's operands a factor is, which may have been padded since."""
    for index, source in enumerate(reads):
        if source.same_as(buffer):
            return index
    for index, source in enumerate(reads):
        if str(source.name).startswith(str(buffer.name)):
            return index
    raise Misfit(f"the factor {name} is lost")


def inline_writers(schedule: Schedule, block: Any) -> None:
    """Inline what computes a factor into its fetch."""
    while True:
        writers = [w for w in schedule.get_producers(block) if is_spatial(schedule.get(w))]
        if not writers:
            return
        for writer in writers:
            schedule.compute_inline(writer)


def inline_readers(schedule: Schedule, block: Any) -> None:
    """Compute what reads the results, one after the other, where they are written."""
    while True:
        readers = list(schedule.get_consumers(block))
        if not readers:
            return
        if len(readers) > 1 or not is_spatial(schedule.get(readers[0])):
            raise Misfit("the results are read by more than one")
        _inline_others(schedule, readers[0], block)
        schedule.reverse_compute_inline(readers[0])


def _inline_others(schedule: Schedule, reader: Any, block: Any) -> None:
    """Inline what else a reader of the results reads, such as a mask that is spread out."""

    def is_other(writer: Any) -> bool:
        node = schedule.get(writer)
        return is_spatial(node) and not node.same_as(schedule.get(block))

    while others := [w for w in schedule.get_producers(reader) if is_other(w)]:
        for writer in others:
            schedule.compute_inline(writer)


def check_one_to_one(schedule: Schedule, block: Any) -> None:
    """Refuse a block that writes several results to one place.

    An axis of the results that is shorter than the threads gives none of its index to what a
    thread counts; TVM inlines what reads it all the same.
    """
    node = schedule.get(block)
    store = store_of(node)
    used = (
        {variable for index in store.indices for variable in collect(index, tirx.Var)}
        if store
        else ()
    )
    for axis in node.iter_vars:
        if int(axis.dom.extent) > 1 and axis.var not in used:
            raise Misfit("an axis of the tile that the results lack")
