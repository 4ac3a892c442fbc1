"""Find integer convolutions and matrix products of known weights, and pack their weights.

Runs before Relax's operators become tensor programs. A product of int16 tensors with an int32
result is replaced by a kernel of ``integer_products.py`` with the weights in its order, stored in
8 bits where they fit. What has no such kernel stays as it is: grouped and one-dimensional
convolutions, sizes known only at run time, CPUs without the instructions.

Where the CPU multiplies 8-bit data, the data's zero point is not subtracted first. It is left in
the data and taken off the sums: sum((x - z) w) = sum(x w) - z sum(w).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import tvm
from hybridc.targets.fitting import Misfit
from hybridc.targets.llvm.cpu import Cpu
from hybridc.targets.llvm.layout.graph import bindings_of, sizes_of
from hybridc.targets.llvm.layout.main_writer import MainWriter, weight_names, weights_left
from hybridc.targets.llvm.schedules.amx import tiled_product
from hybridc.targets.llvm.schedules.amx_tiles import (
    TILED,
    is_tiled_faster,
    pack_tiles,
    tile_geometry,
)
from hybridc.targets.llvm.schedules.integer_depthwise import pairs_taps
from hybridc.targets.llvm.schedules.integer_products import integer_product
from hybridc.targets.llvm.schedules.integer_strips import uses_strips, with_best_panel
from hybridc.targets.llvm.schedules.integer_tiles import (
    PAIRS,
    QUADS,
    SINGLE,
    Geometry,
    choose_panel,
    has_pairs,
    pack,
    quads_type,
    vector_lanes,
)
from hybridc.targets.llvm.schedules.integer_winograd import with_winograd
from tvm import relax, te, tirx

from hybridc.bundle.tensors import Array

SIGN = 128
"""What is added to int8 data to make uint8 of it, and subtracted to make int8 of uint8."""

Pads: TypeAlias = tuple[int, int, int, int]
"""Rows before and after, columns before and after."""

Steps: TypeAlias = tuple[int, int, int, int]
"""Strides of rows and columns, and dilations; these are 0 for a matrix product."""


@dataclass(frozen=True)
class Product:
    """A product that gets a kernel.

    Attributes:
        geometry: The kernel.
        data: The variable that it reads: int16, or 8-bit data with its zero point.
        kind: Type of 8-bit data that the kernel takes; ``None`` for int16 data.
        zero: The zero point, as it is in data of that type.
        pads: Elements to put around the data: rows before and after, then columns.
        weight: Name of the weight in the model.
        name: Name of the packed weight.
    """

    geometry: Geometry
    data: Any
    kind: str | None
    zero: int
    pads: Pads
    weight: str
    name: str


def pack_integer_products(
    module: tvm.IRModule, weights: Mapping[str, Array], cpu: Cpu
) -> tuple[tvm.IRModule, Mapping[str, Array]]:
    """Replace integer products in ``main``, and pack their weights.

    Args:
        module: A Relax module whose ``main`` takes the weights as one tuple, last.
        weights: Their arrays by name, in order.
        cpu: The processor.

    Returns:
        The module and its weights in their new order.
    """
    if not vector_lanes(cpu):
        return module, weights
    names = weight_names(module, weights)
    products = _Reader(module, weights, names, cpu).products()
    if not products:
        return module, weights
    main = MainWriter(module, _packed_weights(module, weights, names, products))
    return main.written(_Writer(main, names, products).block), main.weights


@dataclass
class _Reader:
    """Finds the products."""

    module: tvm.IRModule
    weights: Mapping[str, Array]
    weight_of: Mapping[Any, str]
    cpu: Cpu
    values: dict[Any, Any] = field(default_factory=dict)

    def products(self) -> dict[Any, Product]:
        """The products by the variable that they are bound to."""
        found = {}
        for binding in bindings_of(self.module["main"]):
            value = getattr(binding, "value", None)
            self.values[binding.var] = value
            try:
                product = self._product(value)
            except Misfit:
                continue
            if product is not None:
                found[binding.var] = product
        return found

    def _product(self, value: Any) -> Product | None:
        name = getattr(getattr(value, "op", None), "name", "")
        if name not in ("relax.nn.conv2d", "relax.matmul"):
            return None
        data, weight = value.args
        kinds = [str(operand.ty.dtype) for operand in value.args]
        if kinds != ["int16", "int16"] or weight not in self.weight_of:
            return None
        if str(value.attrs.out_dtype) != "int32":
            return None
        return self._matmul(data, weight) if name == "relax.matmul" else self._conv(value)

    def _matmul(self, data: Any, weight: Any) -> Product | None:
        sizes, shape = sizes_of(data), sizes_of(weight)
        if len(shape) != 2 or len(sizes) < 2 or 0 in sizes:
            return None
        image = (int(np.prod(sizes[:-1])), 1, 1, sizes[-1])
        return self._make(data, weight, image, (1, 1, 0, 0), (0, 0, 0, 0), 1)

    def _conv(self, value: Any) -> Product | None:
        attributes = value.attrs
        if str(attributes.data_layout) != "NHWC" or str(attributes.kernel_layout) != "OIHW":
            return None
        top, left, bottom, right = map(int, attributes.padding)
        strides, dilation = list(attributes.strides), list(attributes.dilation)
        steps = (int(strides[0]), int(strides[1]), int(dilation[0]), int(dilation[1]))
        data, weight = value.args
        sizes = sizes_of(data)
        if 0 in sizes:
            return None
        return self._make(
            data, weight, sizes, steps, (top, bottom, left, right), int(attributes.groups)
        )

    def _make(
        self,
        data: Any,
        weight: Any,
        sizes: tuple[int, ...],
        steps: Steps,
        pads: Pads,
        groups: int,
    ) -> Product | None:
        name = self.weight_of[weight]
        array = as_filters(self.weights[name])
        filters, _, _, channels = array.shape
        if array.size == 0 or (groups > 1 and not channels == 1 < groups == filters == sizes[3]):
            return None
        panel = choose_panel(filters, SINGLE if groups > 1 else QUADS, self.cpu)
        if panel is None:
            return None
        kind = None
        if groups == 1 and _is_narrow(array) and array[0].size * 255 * SIGN < 2**31:
            kind = quads_type(self.cpu, panel[0])
        source, zero = (None, 0) if kind is None else self._uncentered(data, kind)
        if source is None:
            source, kind = data, None
        group = SINGLE if groups > 1 else PAIRS if kind is None else QUADS
        if group == PAIRS and not has_pairs(self.cpu):
            return None
        geometry = _geometry(array, group, panel, sizes, steps, pads)
        if group == QUADS and is_tiled_faster(geometry, self.cpu):
            source, zero = self._uncentered(data, None)
            kind, geometry = str(source.ty.dtype), tile_geometry(geometry, channels)
        if uses_strips(geometry, self.cpu):
            geometry = with_best_panel(geometry, self.cpu)
            if self._uncentered(data, None)[0] is not None:  # the data have 9 bits
                geometry = with_winograd(geometry, array, self.cpu)
        if pairs_taps(geometry, self.cpu):
            geometry = dataclasses.replace(geometry, vectors=2)
        packed = f"{name}.packed_{geometry.group}x{geometry.lanes}x{geometry.vectors}"
        return Product(geometry, source, kind, zero, pads, name, packed)

    def _uncentered(self, data: Any, kind: str | None) -> tuple[Any, int]:
        """The 8-bit data that int16 data was made of, if it was, and its zero point.

        The zero point is as it is in ``kind``, or in the data's own type.
        """
        zero = 0
        value: Any = self.values.get(data)
        if _is(value, "relax.subtract"):
            constant = value.args[1]
            if isinstance(constant, tvm.ir.Constant):
                zero = int(constant.value.numpy().item())
                value = self.values.get(value.args[0])
        if not _is(value, "relax.astype"):
            return None, 0
        source = value.args[0]
        dtype = str(source.ty.dtype)
        if dtype not in ("int8", "uint8"):
            return None, 0
        return source, zero + _shift(dtype, kind or dtype)


def _shift(dtype: str, kind: str) -> int:
    """What makes 8-bit data of one type of that of another."""
    return 0 if dtype == kind else SIGN if kind == "uint8" else -SIGN


def _is_narrow(array: Array) -> bool:
    """Whether all elements fit in 8 bits."""
    return bool(array.min() >= -SIGN and array.max() < SIGN)


def _geometry(
    array: Array,
    group: int,
    panel: tuple[int, int],
    sizes: Sequence[int],
    steps: Steps,
    pads: Pads,
) -> Geometry:
    """The kernel for a weight of ``(filters, rows, columns, channels)`` and data of ``sizes``."""
    filters, rows, columns, channels = array.shape
    extents = [1, 1]
    if steps[2]:
        extents = [
            (size + before + after - (taps - 1) * reach - 1) // step + 1
            for size, before, after, taps, step, reach in (
                (sizes[1], *pads[:2], rows, steps[0], steps[2]),
                (sizes[2], *pads[2:], columns, steps[1], steps[3]),
            )
        ]
    return Geometry(
        group=group,
        batch=sizes[0],
        rows=extents[0],
        columns=extents[1],
        channels=1 if group == SINGLE else -(-channels // group) * group,
        filters=filters,
        kernel_rows=rows,
        kernel_columns=columns,
        row_step=steps[0],
        column_step=steps[1],
        row_reach=steps[2],
        column_reach=steps[3],
        lanes=panel[0],
        vectors=panel[1],
    )


def _is(value: Any, name: str) -> bool:
    return getattr(getattr(value, "op", None), "name", "") == name


def as_filters(array: Array) -> Array:
    """A weight as ``(filters, rows, columns, channels)``: a kernel, or a matrix of columns."""
    if array.ndim == 2:
        return np.ascontiguousarray(array.T)[:, None, None, :]
    return np.ascontiguousarray(array.transpose(0, 2, 3, 1))


@dataclass
class _Writer:
    """Writes ``main`` anew.

    Attributes:
        main: Holds the new weights and kernels.
        weight_of: Name of the weight, by variable.
        products: What gets a kernel, by variable.
        bindings: What was written of the block at work.
    """

    main: MainWriter
    weight_of: Mapping[Any, str]
    products: Mapping[Any, Product]
    bindings: list[Any] = field(default_factory=list)

    def block(self, block: Any) -> Any:
        """One block of bindings."""
        self.bindings = []
        for binding in block.bindings:
            name = self.weight_of.get(binding.var)
            if binding.var in self.products:
                self._write(binding.var, self.products[binding.var])
            elif name is None:
                self.bindings.append(binding)
            elif name in self.main.weights:
                self._bind(binding.var, self.main.item(name))
        return type(block)(self.bindings)

    def _write(self, variable: Any, product: Product) -> None:
        g = product.geometry
        data = self._data(variable, product)
        weight = self._named(variable, "packed", self.main.item(product.name))
        key = ("product", g, sizes_of(data), str(data.ty.dtype), str(weight.ty.dtype))

        def build(tensor: te.Tensor, packed: te.Tensor) -> te.Tensor:
            make = tiled_product if g.group == TILED else integer_product
            return make(g, tensor, packed)

        call = self.main.kernel("integer_product", key, build, data, weight, fuses=True)
        if product.zero:
            sums = self._named(variable, "sums", call)
            offset = self._named(variable, "offset", self.main.item(_offset_name(product)))
            call = self.main.builder.normalize(relax.op.add(sums, offset))
        self._bind(variable, call)

    def _data(self, variable: Any, product: Product) -> Any:
        """The data in the type and with the channels and padding that the kernel wants."""
        g, data = product.geometry, product.data
        sizes = sizes_of(data)
        missing = 0 if g.group == SINGLE else g.channels - sizes[-1]
        dtype = str(data.ty.dtype)
        kind = product.kind or dtype
        if not (missing or dtype != kind or any(product.pads)):
            return data

        def prepare(source: te.Tensor) -> te.Tensor:
            return _prepared(source, product.pads, missing, product.zero, kind)

        key = ("prepare", sizes, dtype, kind, product.pads, missing, product.zero)
        return self._named(
            variable, "data", self.main.kernel("integer_prepare", key, prepare, data)
        )

    def _named(self, like: Any, suffix: str, value: Any) -> Any:
        """A variable of the same kind as ``like`` for a value."""
        kind = self.main.type_of(value)
        return self._bind(type(like)(f"{like.name}_{suffix}", kind), value)

    def _bind(self, variable: Any, value: Any) -> Any:
        self.bindings.append(relax.VarBinding(variable, value))
        return variable


def _packed_weights(
    module: tvm.IRModule,
    weights: Mapping[str, Array],
    names: Mapping[Any, str],
    products: Mapping[Any, Product],
) -> dict[str, Array]:
    """Weights that are still read as they are, then the packed ones and their sums."""
    packed = weights_left(module, weights, names, products)
    for product in products.values():
        array = as_filters(weights[product.weight])
        if product.name not in packed:
            narrow = np.int8 if _is_narrow(array) else np.int16
            order = pack_tiles if product.geometry.group == TILED else pack
            packed[product.name] = order(array.astype(narrow), product.geometry)
        if product.zero:
            sums = array.astype(np.int64).sum(axis=(1, 2, 3)) * -product.zero
            packed[_offset_name(product)] = sums.astype(np.int32)
    return packed


def _offset_name(product: Product) -> str:
    return f"{product.weight}.offset_{product.zero}"


def _prepared(data: te.Tensor, pads: Pads, missing: int, fill: int, kind: str) -> te.Tensor:
    """Data of type ``kind``, padded with ``fill`` in space and with anything in channels."""
    shift = _shift(str(data.dtype), kind)
    shape = [int(dim) for dim in data.shape]
    channels = shape[-1]
    shape[-1] += missing
    if any(pads):
        shape[1] += pads[0] + pads[1]
        shape[2] += pads[2] + pads[3]

    def element(*index: Any) -> Any:
        place = list(index)
        conditions = []
        if missing:
            conditions.append(index[-1] < channels)
        if any(pads):
            for axis, before in ((1, pads[0]), (2, pads[2])):
                place[axis] = index[axis] - before
                conditions += [place[axis] >= 0, place[axis] < int(data.shape[axis])]
        value = data(*place)
        if shift:
            value = (value.astype("int16") + tirx.const(shift, "int16")).astype(kind)
        if not conditions:
            return value
        return tirx.if_then_else(tirx.all(*conditions), value, tirx.const(fill, kind))

    return te.compute([tirx.IntImm("int64", dim) for dim in shape], element, name="prepared")
