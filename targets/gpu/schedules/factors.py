"""A product as expressions: its factors, and where and what its results become.

    sum[b, m, n] = sum over k of left(b, m, k) * right(b, n, k)
    out[place(b, m, n)] = finish(sum[b, m, n], b, m, n)

For schedules that are written out as statements. It also says how many elements that are neighbors
along an axis lie side by side in memory, so that they can be moved at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tvm
import tvm_ffi
from hybridc.targets.fitting import Misfit
from hybridc.targets.gpu.schedules.product import (
    check_one_to_one,
    inline_readers,
    inline_writers,
    normalize,
    read_index,
)
from hybridc.targets.llvm.schedules.blocks import (
    axes_of,
    blocks_of,
    extents_of,
    is_choice,
    realize_of,
    same_variables,
    store_of,
)
from hybridc.targets.llvm.schedules.statements import int64
from hybridc.targets.llvm.schedules.tails import substitute
from tvm import DataType, tirx
from tvm.s_tir import Schedule

VECTOR_BYTES = 16
"""Most bytes that a thread moves at once."""


@dataclass(frozen=True)
class Element:
    """An element as an expression.

    Attributes:
        axes: Its variables.
        extents: Their extents.
        value: The expression.
    """

    axes: tuple[Any, ...]
    extents: tuple[int, ...]
    value: Any

    @property
    def dtype(self) -> str:
        """Its type."""
        return str(self.value.ty.dtype)

    def at(self, *places: Any) -> Any:
        """The expression at a place."""
        return substitute(self.value, dict(zip(self.axes, places, strict=True)))

    @property
    def is_loaded(self) -> bool:
        """Whether it is an element of a buffer, or 0."""
        return _guarded_load(self.value) is not None

    def address_at(self, *places: Any) -> tuple[Any, Any, Any]:
        """The buffer and the number of the element that is loaded, and when; otherwise it is 0.

        Only where it :attr:`is_loaded`.
        """
        found = _guarded_load(self.value)
        assert found is not None
        load, when = found
        analyzer = tvm.sym.Analyzer()
        address = _address(analyzer, self.axes, self.extents, load.source, load.indices)
        mapping = dict(zip(self.axes, places, strict=True))
        return load.source, substitute(address, mapping), substitute(when, mapping)

    def width(self, axis: int) -> int:
        """How many elements along an axis always lie side by side, aligned to so many."""
        widest = VECTOR_BYTES // (int(DataType(self.dtype).bits) // 8)
        found = _guarded_load(self.value)
        if found is None:
            return 1
        load, when = found
        return side_by_side(self.axes, self.extents, axis, load.source, load.indices, widest, when)


@dataclass(frozen=True)
class Product:
    """A product and what follows it.

    Attributes:
        shape: Extents of b, m, n and k.
        left: The left factor at (b, m, k).
        right: The right factor at (b, n, k).
        axes: The variables b, m and n of the store.
        sums: The buffer that stands for the sums in the store.
        store: What is done with a sum.
    """

    shape: tuple[int, int, int, int]
    left: Element
    right: Element
    axes: tuple[Any, ...]
    sums: Any
    store: tirx.BufferStore

    def result(self, places: Sequence[Any], total: Any) -> tuple[Any, list[Any]]:
        """The value of a result and its indices, given the sum."""

        def replace(load: Any) -> Any:
            return total if load.source.same_as(self.sums) else load

        value = tvm_ffi.structural_map(self.store.value, [(tvm.ir.TensorLoad, replace)])
        at = dict(zip(self.axes, places, strict=True))
        return substitute(value, at), [substitute(index, at) for index in self.store.indices]

    def address(self) -> Any:
        """The number of the element of the store's buffer that a result is, by :attr:`axes`."""
        analyzer = tvm.sym.Analyzer()
        buffer, indices = self.store.buffer, self.store.indices
        return _address(analyzer, self.axes, self.shape[:3], buffer, indices)

    def width(self) -> int:
        """How many results along n always lie side by side, aligned to so many."""
        buffer = self.store.buffer
        widest = VECTOR_BYTES // (int(DataType(str(buffer.dtype)).bits) // 8)
        return side_by_side(
            self.axes, self.shape[:3], 2, buffer, self.store.indices, min(widest, 8)
        )


def extract_product(schedule: Schedule, main: Any, transposed: bool) -> Product:
    """The expressions of a function around one product; changes the schedule.

    Args:
        schedule: Of the function.
        main: The product's block.
        transposed: As for :func:`normalize`.

    Raises:
        Misfit: More is computed than a product and what follows it, element by element.
    """
    factors = normalize(schedule, main, transposed)
    batch, rows, columns, depth = extents_of(schedule.get(main)) or (1, 1, 1, 1)
    left, right = (_factor(schedule, main, name) for name in factors)
    total = schedule.cache_write(main, 0, "local")
    inline_readers(schedule, total)
    check_one_to_one(schedule, total)
    if len(blocks_of(schedule)) != 4 or not _is_always(realize_of(schedule, total).predicate):
        raise Misfit("more than a product")
    node = schedule.get(total)
    store = store_of(node)
    if store is None or extents_of(node) != [batch, rows, columns]:
        raise Misfit("results that are not stored one by one")
    if not transposed:
        right = Element((right.axes[0], right.axes[2], right.axes[1]), *_swapped(right))
    sums = node.reads[0].source
    for region in node.reads:
        if "local" in region.source.scope():
            sums = region.source
    return Product((batch, rows, columns, depth), left, right, tuple(axes_of(node)), sums, store)


def _swapped(element: Element) -> tuple[tuple[int, ...], Any]:
    first, second, third = element.extents
    return (first, third, second), element.value


def _factor(schedule: Schedule, main: Any, name: str) -> Element:
    """A factor with all that computes it."""
    buffer = schedule.get(schedule.get_sblock(name)).writes[0].source
    reads = [region.source for region in schedule.get(main).reads]
    block = schedule.cache_read(main, read_index(reads, buffer, name), "local")
    inline_writers(schedule, block)
    node = schedule.get(block)
    store = store_of(node)
    if store is None or not _is_always(realize_of(schedule, block).predicate):
        raise Misfit("a factor that is not computed by a formula")
    if not same_variables(store.indices, axes_of(node)):
        raise Misfit("a factor that is not stored by its axes")
    return Element(tuple(axes_of(node)), tuple(extents_of(node) or ()), store.value)


def _is_always(predicate: Any) -> bool:
    return isinstance(predicate, tirx.IntImm) and bool(int(predicate))


def _guarded_load(value: Any) -> tuple[Any, Any] | None:
    """A load, and the condition without which the value is 0."""
    if isinstance(value, tvm.ir.TensorLoad):
        return value, tirx.const(True, "bool")
    if is_choice(value) and isinstance(value.args[1], tvm.ir.TensorLoad):
        other = value.args[2]
        if isinstance(other, tirx.FloatImm | tirx.IntImm) and float(other.value) == 0.0:
            return value.args[1], value.args[0]
    return None


def side_by_side(
    axes: Sequence[Any],
    extents: Sequence[int],
    axis: int,
    buffer: Any,
    indices: Sequence[Any],
    widest: int,
    when: Any | None = None,
) -> int:
    """How many neighbors along an axis are neighbors in memory, aligned to so many elements.

    Args:
        axes: The variables of an access.
        extents: Their extents.
        axis: Which of them.
        buffer: What is accessed.
        indices: Where.
        widest: The most that is asked for, a power of two.
        when: A condition that must be the same for all of them.
    """
    width = widest
    while width > 1:
        if extents[axis] % width == 0 and _is_vector(
            axes, extents, axis, buffer, indices, width, when
        ):
            return width
        width //= 2
    return 1


def _address(
    analyzer: Any, axes: Sequence[Any], extents: Sequence[int], buffer: Any, indices: Sequence[Any]
) -> Any:
    """The number of an element of a buffer; tells the analyzer how far the axes go."""
    for variable, extent in zip(axes, extents, strict=True):
        analyzer.bind(variable, tvm.ir.Range(int64(0), int64(extent)))
    place: Any = int64(0)
    for dim, index in zip(buffer.shape, indices, strict=True):
        place = place * dim + index
    return analyzer.simplify(place)


def _is_vector(
    axes: Sequence[Any],
    extents: Sequence[int],
    axis: int,
    buffer: Any,
    indices: Sequence[Any],
    width: int,
    when: Any | None,
) -> bool:
    analyzer = tvm.sym.Analyzer()
    address = _address(analyzer, axes, extents, buffer, indices)
    group = tirx.Var("group", "int64")
    analyzer.bind(group, tvm.ir.Range(int64(0), int64(extents[axis] // width)))

    def member(number: int, expression: Any) -> Any:
        return analyzer.simplify(substitute(expression, {axes[axis]: group * width + number}))

    first = member(0, address)
    if not analyzer.can_prove_equal(tirx.floormod(first, int64(width)), int64(0)):
        return False
    for number in range(1, width):
        if not analyzer.can_prove_equal(member(number, address) - first, int64(number)):
            return False
        if when is not None and not tvm_ffi.structural_equal(member(0, when), member(number, when)):
            return False
    return True
