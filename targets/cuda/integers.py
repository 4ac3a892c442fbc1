"""Products of 8-bit tensors with weights, brought to the form of tensor cores.

Zero points are subtracted while lowering, so that factors have 9 bits and are held as int16. Tensor
cores multiply 8 bits. Where the weights fit, which those without a zero point of their own always
do, the data's zero point is taken out of the sum, which stays exact:

    sum over k of (x[m, k] - zero) * w[k, n]  =  sum of x[m, k] * w'[n, k]  -  zero * sums[n]

w' are the weights as int8 with summands innermost, and ``sums`` their sums, both made while
compiling. A convolution that pads its image pads it with the zero point.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import tvm
import tvm_ffi
from hybridc.targets.fitting import Misfit
from hybridc.targets.gpu.schedules.fragment_kernel import INTEGERS
from hybridc.targets.gpu.schedules.product import MIN_EXTENT
from hybridc.targets.llvm.layout.graph import bindings_of, sizes_of
from hybridc.targets.llvm.layout.main_writer import MainWriter, weight_names, weights_left
from hybridc.targets.llvm.schedules.blocks import axes_of, blocks_of, same_variables, store_of
from tvm import relax, te, tirx
from tvm.s_tir import Schedule

from hybridc.bundle.tensors import Array

MULTIPLE = 16
"""Summands that lie side by side must be a multiple of this: chunks of 16 bytes."""

SUMS = "int32"


def integers_on_tensor_cores(
    module: tvm.IRModule, weights: Mapping[str, Array], types: frozenset[str]
) -> tuple[tvm.IRModule, Mapping[str, Array]]:
    """The module and its weights with products of 8 bits where they were of 16.

    Args:
        module: A Relax module whose ``main`` takes the weights as one tuple, last.
        weights: Their arrays by name, in order.
        types: Types of factors that go to tensor cores.
    """
    if not types >= set(INTEGERS):
        return module, weights
    names = weight_names(module, weights)
    bound = {b.var: getattr(b, "value", None) for b in bindings_of(module["main"])}
    products = {}
    for variable, value in bound.items():
        try:
            product = _product(module, value, bound, names, weights)
        except Misfit:
            continue
        products[variable] = product
    if not products:
        return module, weights
    packed = weights_left(module, weights, names, products)
    for product in products.values():
        packed |= product.arrays(weights[product.weight])
    return _rewritten(MainWriter(module, packed), names, products), packed


def _rewritten(
    writer: MainWriter, names: Mapping[Any, str], products: Mapping[Any, _Product]
) -> tvm.IRModule:
    def block(old: Any) -> Any:
        bindings: list[Any] = []
        for binding in old.bindings:
            variable = binding.var
            if variable in products:
                bindings += products[variable].bindings(writer, variable)
            elif variable not in names:
                bindings.append(binding)
            elif names[variable] in writer.weights:
                bindings.append(relax.VarBinding(variable, writer.item(names[variable])))
        return type(old)(bindings)

    return writer.written(block)


@dataclass(frozen=True)
class _Product:
    """A product, or a convolution, which is one with summands gathered from the image.

    Attributes:
        data: The tensor of 8 bits.
        zero: Its zero point; or its variable, where that is computed while the model runs.
        weight: Name of the weights.
        order: How their axes are moved, so that summands come last.
        window: Of a convolution.
    """

    data: Any
    zero: Any
    weight: str
    order: tuple[int, ...]
    window: _Window | None = None

    @property
    def names(self) -> tuple[str, str]:
        """Names of the weights as they are stored now, and of their sums."""
        return f"{self.weight}.8bits", f"{self.weight}.sums"

    @property
    def is_centered(self) -> bool:
        """Whether there is a zero point to take out of the sum."""
        return not isinstance(self.zero, int) or self.zero != 0

    def arrays(self, array: Array) -> dict[str, Array]:
        """The weights as they are stored now, and their sums, by name."""
        moved = np.ascontiguousarray(array.transpose(self.order).astype(np.int8))
        name, sums = self.names
        found = {name: moved}
        if self.is_centered:
            axes = tuple(range(1, moved.ndim))
            found[sums] = moved.sum(axis=axes, dtype=np.int32)
        return found

    def bindings(self, writer: MainWriter, result: Any) -> list[Any]:
        """What computes the result."""
        items = [writer.item(name) for name in self.names if name in writer.weights]
        items = items if self.is_centered else items[:1]
        given = [
            type(result)(f"{result.name}_{kind}", writer.type_of(item))
            for kind, item in zip(("weight", "sums"), items, strict=False)
        ]
        found = [relax.VarBinding(*pair) for pair in zip(given, items, strict=True)]
        data = self.data
        if self.window is not None and any(self.window.padding) and self.is_centered:
            call = self._padded(writer)
            data = type(result)(f"{result.name}_padded", call.ty_args[0])
            found.append(relax.VarBinding(data, call))
        known = isinstance(self.zero, int)
        given += [] if known else [self.zero]
        key = (self.zero if known else "zero", self.window, str(data.ty.dtype))
        call = writer.kernel("product", key, self._compute, data, *given, fuses=True)
        return [*found, relax.VarBinding(result, call)]

    def _padded(self, writer: MainWriter) -> Any:
        """The image with the zero point around it."""
        window, dtype = self.window, str(self.data.ty.dtype)
        assert window is not None

        def build(image: te.Tensor) -> te.Tensor:
            return window.padded(image, tirx.const(self.zero, dtype))

        return writer.kernel("pad", (self.zero, window, dtype), build, self.data)

    def _compute(self, data: te.Tensor, weight: te.Tensor, *others: te.Tensor) -> te.Tensor:
        """The sums without the zero point."""
        if self.window is None:
            total = _matrix_product(data, weight)
        else:
            if any(self.window.padding) and not self.is_centered:
                data = self.window.padded(data, tirx.const(0, str(data.dtype)))
            total = self.window.convolved(data, weight)
        if not self.is_centered:
            return total
        sums, *given = others
        zero = given[0](*[0] * len(given[0].shape)).astype(SUMS) if given else self.zero
        return te.compute(
            total.shape, lambda *place: total(*place) - sums(place[-1]) * zero, "centered"
        )


@dataclass(frozen=True)
class _Window:
    """How a convolution goes over an image with channels innermost.

    Attributes:
        strides: From one result to the next.
        padding: Top, left, bottom, right.
        dilation: From one summand to the next.
    """

    strides: tuple[int, int]
    padding: tuple[int, int, int, int]
    dilation: tuple[int, int]

    def padded(self, image: te.Tensor, value: Any) -> te.Tensor:
        """The image with a value around it."""
        top, left, bottom, right = self.padding
        batch, height, width, channels = image.shape

        def element(n: Any, y: Any, x: Any, c: Any) -> Any:
            rows = [y >= top, y < height + top] if top or bottom else []
            columns = [x >= left, x < width + left] if left or right else []
            inside = tirx.all(*rows, *columns)
            return tirx.if_then_else(inside, image(n, y - top, x - left, c), value)

        shape = [batch, height + (top + bottom), width + (left + right), channels]
        return te.compute(shape, element, "padded")

    def convolved(self, image: te.Tensor, filters: te.Tensor) -> te.Tensor:
        """The convolution of a padded image."""
        count, height, width, channels = filters.shape
        zero = tirx.IntImm("int64", 0)
        axes = [te.reduce_axis((zero, size), "k") for size in (height, width, channels)]
        (down, across), (far_down, far_across) = self.strides, self.dilation

        def element(n: Any, y: Any, x: Any, f: Any) -> Any:
            i, j, c = axes
            pixel = image(n, y * down + i * far_down, x * across + j * far_across, c)
            return te.sum(pixel.astype(SUMS) * filters(f, i, j, c).astype(SUMS), axis=axes)

        rows = (image.shape[1] - (height - 1) * far_down - 1) // down + 1
        columns = (image.shape[2] - (width - 1) * far_across - 1) // across + 1
        return te.compute([image.shape[0], rows, columns, count], element, "product")


def _matrix_product(data: te.Tensor, matrix: te.Tensor) -> te.Tensor:
    """The product of ``(..., m, k)`` with ``(n, k)``."""
    columns, depth = matrix.shape
    axis = te.reduce_axis((tirx.IntImm("int64", 0), depth), "k")

    def element(*place: Any) -> Any:
        *front, column = place
        left, right = data(*front, axis).astype(SUMS), matrix(column, axis).astype(SUMS)
        return te.sum(left * right, axis=axis)

    return te.compute([*data.shape[:-1], columns], element, "product")


def _product(
    module: tvm.IRModule,
    value: Any,
    bound: Mapping[Any, Any],
    names: Mapping[Any, str],
    weights: Mapping[str, Array],
) -> _Product:
    """The product that a value is.

    Raises:
        Misfit: It is none, or it does not fit.
    """
    operator = _name(value)
    if operator not in ("relax.matmul", "relax.nn.conv2d") or value.args[1] not in names:
        raise Misfit("no product with weights")
    if str(value.attrs.out_dtype) != SUMS:
        raise Misfit("other sums")
    name = names[value.args[1]]
    array = weights[name]
    limits = np.iinfo(np.int8)
    if array.dtype != np.int16 or array.size == 0:
        raise Misfit("other weights")
    if array.min() < limits.min or array.max() > limits.max:
        raise Misfit("weights of 9 bits")
    data, zero = _data(module, value.args[0], bound)
    if operator == "relax.matmul":
        _check_matrices(sizes_of(data), array.shape)
        return _Product(data, zero, name, (1, 0))
    window = _window(value.attrs, sizes_of(data), array)
    if any(window.padding) and not isinstance(zero, int):
        raise Misfit("padding that is not known")
    return _Product(data, zero, name, (0, 2, 3, 1), window)


def _check_matrices(sizes: tuple[int, ...], shape: tuple[int, ...]) -> None:
    """Refuse matrices that are too small to share, or whose rows are no chunks."""
    if len(shape) != 2 or len(sizes) < 2 or shape[0] % MULTIPLE:
        raise Misfit("rows that are no chunks")
    if min(math.prod(sizes[:-1]), *shape) < MIN_EXTENT:
        raise Misfit("too little to share")


def _window(attributes: Any, sizes: tuple[int, ...], filters: Array) -> _Window:
    """How a convolution goes over its image."""
    layouts = (attributes.data_layout, attributes.kernel_layout, attributes.out_layout)
    if tuple(map(str, layouts)) != ("NHWC", "OIHW", "NHWC") or int(attributes.groups) != 1:
        raise Misfit("another layout")
    if sizes[3] % MULTIPLE or filters.shape[0] < MIN_EXTENT:
        raise Misfit("channels that are no chunks, or few filters")
    down, across = map(int, attributes.strides)
    top, left, bottom, right = map(int, attributes.padding)
    far_down, far_across = map(int, attributes.dilation)
    return _Window((down, across), (top, left, bottom, right), (far_down, far_across))


def _data(module: tvm.IRModule, value: Any, bound: Mapping[Any, Any]) -> tuple[Any, Any]:
    """The tensor of 8 bits and the zero point that an int16 tensor is made of."""
    source: Any = bound.get(value)
    if _name(source) == "relax.call_tir":
        operands = source.args[1].fields
        _check_centered(module[source.args[0]])
        return operands[0], operands[1]
    zero = 0
    if _name(source) == "relax.subtract" and isinstance(source.args[1], tvm.ir.Constant):
        number = source.args[1].value.numpy()
        if number.size != 1:
            raise Misfit("many zero points")
        zero = int(number.item())
        source = bound.get(source.args[0])
    if _name(source) != "relax.astype" or str(source.args[0].ty.dtype) not in INTEGERS:
        raise Misfit("no tensor of 8 bits")
    return source.args[0], zero


def _check_centered(function: tirx.PrimFunc) -> None:
    """Refuse a kernel that does not subtract one number of 8 bits from all others."""
    schedule = Schedule(tvm.IRModule({"main": function}))
    nodes = list(map(schedule.get, blocks_of(schedule)))
    store = store_of(nodes[0])
    if len(nodes) != 1 or len(function.params) != 3 or store is None:
        raise Misfit("more than a subtraction")
    data, zero, result = function.params
    if any(str(tensor.dtype) not in INTEGERS for tensor in (data, zero)):
        raise Misfit("other types")
    axes = axes_of(nodes[0])
    number = tirx.BufferLoad(zero, [tirx.IntImm("int64", 0)] * len(zero.shape))
    difference = tirx.BufferLoad(data, axes).astype("int16") - number.astype("int16")
    if not (store.buffer.same_as(result) and same_variables(store.indices, axes)):
        raise Misfit("another order")
    if math.prod(map(int, zero.shape)) != 1 or not tvm_ffi.structural_equal(
        store.value, difference
    ):
        raise Misfit("another formula")


def _name(value: Any) -> str:
    return str(getattr(getattr(value, "op", None), "name", ""))
