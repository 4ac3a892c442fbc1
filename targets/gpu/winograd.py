"""Convolutions of 3 x 3 taps by Winograd's algorithm where it takes less time.

    conv2d(data, filters)  ->  transformed outputs of, for each position of a tile,
                               filters'[position] * transformed inputs[position]

The filters are transformed here, at compile time, in float64, and rounded once. What follows the
convolution is fused into the kernel that transforms the outputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import tvm
from hybridc.targets.fitting import Misfit
from hybridc.targets.gpu.limits import Limits
from hybridc.targets.gpu.schedules.choices import in_order
from hybridc.targets.gpu.schedules.winograd import INPUTS, OUTPUTS
from hybridc.targets.gpu.schedules.winograd_choice import (
    NONE,
    Geometry,
    winograd_choices,
    winograd_problem,
)
from hybridc.targets.llvm.layout.graph import bindings_of, sizes_of
from hybridc.targets.llvm.layout.main_writer import MainWriter, weight_names, weights_left
from hybridc.targets.llvm.layout.winograd import entry
from hybridc.targets.llvm.schedules.statements import int64
from hybridc.targets.llvm.schedules.winograd_transforms import (
    TAPS,
    input_matrix,
    output_matrix,
    transform_weight,
)
from tvm import relax, te, tirx

from hybridc.bundle.tensors import Array

DTYPE = "float32"

PLAIN = {"data_layout": "NCHW", "kernel_layout": "OIHW", "out_layout": "NCHW", "groups": 1}
"""Attributes of the convolutions that the algorithm is for."""


def with_winograd(
    module: tvm.IRModule, weights: Mapping[str, Array], limits: Limits
) -> tuple[tvm.IRModule, Mapping[str, Array]]:
    """The module and its weights with some convolutions in three steps.

    Args:
        module: A Relax module whose ``main`` takes the weights as one tuple, last.
        weights: Their arrays by name, in order.
        limits: What the device can do, and choices that were measured.
    """
    names = weight_names(module, weights)
    chosen = {}
    for binding in bindings_of(module["main"]):
        geometry = _chosen(getattr(binding, "value", None), names, limits)
        if geometry is not None:
            chosen[binding.var] = (geometry, names[binding.value.args[1]])
    if not chosen:
        return module, weights
    packed = weights_left(module, weights, names, chosen)
    items = {}
    for variable, (geometry, name) in chosen.items():
        items[variable] = f"{name}.winograd{geometry.size}"
        packed[items[variable]] = pack(weights[name], geometry.size)
    writer = MainWriter(module, packed)
    return writer.written(lambda old: _block(old, writer, names, chosen, items)), packed


def geometry_of(value: Any, names: Mapping[Any, str]) -> Geometry | None:
    """The convolution that a value is, if the algorithm can compute it.

    Args:
        value: What a variable is bound to.
        names: Names of the weights, by their variables.
    """
    if getattr(getattr(value, "op", None), "name", "") != "relax.nn.conv2d":
        return None
    data, filters = value.args
    if filters not in names or {str(data.ty.dtype), str(filters.ty.dtype)} != {DTYPE}:
        return None
    attributes = value.attrs
    ones = {int(size) for size in (*attributes.strides, *attributes.dilation)}
    if ones != {1} or any(getattr(attributes, name) != kind for name, kind in PLAIN.items()):
        return None
    try:
        batch, channels, height, width = sizes_of(data)
        _, _, rows, columns = sizes_of(value)
    except Misfit:
        return None
    count, _, *taps = sizes_of(filters)
    if taps != [TAPS, TAPS] or min(batch, rows, columns) < 1:
        return None
    top, left, *_ = map(int, attributes.padding)
    return Geometry(batch, channels, count, height, width, rows, columns, top, left)


def pack(filters: Array, size: int) -> Array:
    """Filters ``(filters, channels, 3, 3)`` as ``(positions, filters, channels)``."""
    count, channels, *_ = filters.shape
    transformed = transform_weight(filters, size).reshape(count, channels, -1)
    return np.ascontiguousarray(transformed.transpose(2, 0, 1))


def can_choose(limits: Limits) -> bool:
    """Whether there is a choice: products on tensor cores take less time than the transforms."""
    return not limits.strict_math and DTYPE not in limits.matrix_types


def _chosen(value: Any, names: Mapping[Any, str], limits: Limits) -> Geometry | None:
    """A convolution with its tiles, if the algorithm is chosen for it."""
    if not can_choose(limits):
        return None
    geometry = geometry_of(value, names)
    if geometry is None:
        return None
    size = in_order(winograd_problem(geometry), winograd_choices(geometry), limits.tuning)[0]
    return None if size == NONE else replace(geometry, size=size)


def _block(
    old: Any,
    writer: MainWriter,
    names: Mapping[Any, str],
    chosen: Mapping[Any, tuple[Geometry, str]],
    items: Mapping[Any, str],
) -> Any:
    """A block of bindings with the chosen convolutions in three steps."""
    bindings: list[Any] = []

    def emit(variable: Any, name: str, value: Any) -> Any:
        new = type(variable)(f"{variable.name}_{name}", writer.type_of(value))
        bindings.append(relax.VarBinding(new, value))
        return new

    for binding in old.bindings:
        variable = binding.var
        if variable in chosen:
            geometry, _ = chosen[variable]
            filters = emit(variable, "filters", writer.item(items[variable]))
            data = binding.value.args[0]
            inputs = emit(variable, "inputs", _call(writer, geometry, _inputs, data))
            call = _call(writer, geometry, _products, filters, inputs)
            products = emit(variable, "products", call)
            outputs = _call(writer, geometry, _outputs, products)
            bindings.append(relax.VarBinding(variable, outputs))
        elif variable not in names:
            bindings.append(binding)
        elif names[variable] in writer.weights:
            bindings.append(relax.VarBinding(variable, writer.item(names[variable])))
    return type(old)(bindings)


def _call(writer: MainWriter, geometry: Geometry, step: Any, *operands: Any) -> Any:
    """A call of the kernel of one step."""
    name = f"winograd{step.__name__}"
    key = (name, geometry)
    return writer.kernel(
        name, key, lambda *tensors: step(geometry, *tensors), *operands, fuses=step is _outputs
    )


def _inputs(g: Geometry, data: te.Tensor) -> te.Tensor:
    """Transformed tiles ``(position, channel, tile)`` of an image with zeros around it."""
    matrix = input_matrix(g.size)
    first, second = _axes(g.edge, g.edge)

    def element(position: Any, channel: Any, tile: Any) -> Any:
        image, rest = tirx.floordiv(tile, g.down * g.across), tirx.floormod(tile, g.down * g.across)
        row = tirx.floordiv(rest, g.across) * g.size + first - g.top
        column = tirx.floormod(rest, g.across) * g.size + second - g.left
        is_read = tirx.all(row >= 0, row < g.height, column >= 0, column < g.width)
        value = data(image, channel, row, column)
        value = tirx.if_then_else(is_read, value, tirx.const(0, DTYPE))
        factor = entry(matrix, tirx.floordiv(position, g.edge), first, DTYPE)
        factor = factor * entry(matrix, tirx.floormod(position, g.edge), second, DTYPE)
        return te.sum(value * factor, axis=[first, second])

    shape = _shape(g.positions, g.channels, g.tiles)
    return te.compute(shape, element, "winograd_inputs", attrs={INPUTS: g.encode()})


def _products(g: Geometry, filters: te.Tensor, inputs: te.Tensor) -> te.Tensor:
    """Products ``(position, filter, tile)`` of transformed filters and tiles."""
    (channel,) = _axes(g.channels)

    def element(position: Any, count: Any, tile: Any) -> Any:
        value = filters(position, count, channel) * inputs(position, channel, tile)
        return te.sum(value, axis=channel)

    return te.compute(_shape(g.positions, g.filters, g.tiles), element, "winograd_products")


def _outputs(g: Geometry, products: te.Tensor) -> te.Tensor:
    """The convolution's results ``(image, filter, row, column)`` of products."""
    matrix = output_matrix(g.size)
    first, second = _axes(g.edge, g.edge)

    def element(image: Any, count: Any, row: Any, column: Any) -> Any:
        tile = image * (g.down * g.across) + tirx.floordiv(row, g.size) * g.across
        tile = tile + tirx.floordiv(column, g.size)
        factor = entry(matrix, tirx.floormod(row, g.size), first, DTYPE)
        factor = factor * entry(matrix, tirx.floormod(column, g.size), second, DTYPE)
        value = products(first * g.edge + second, count, tile)
        return te.sum(value * factor, axis=[first, second])

    shape = _shape(g.batch, g.filters, g.rows, g.columns)
    return te.compute(shape, element, "winograd_outputs", attrs={OUTPUTS: g.encode()})


def _shape(*extents: int) -> tuple[Any, ...]:
    return tuple(map(int64, extents))


def _axes(*extents: int) -> list[Any]:
    return [te.reduce_axis((int64(0), int64(extent)), "k") for extent in extents]
