"""Pack the weights of matrix products at compile time.

Runs before Relax's operators become tensor programs: a float32 product of static data with a known
matrix is replaced by a kernel of ``schedules/packed_product.py``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tvm
from hybridc.targets.fitting import Misfit
from hybridc.targets.llvm.cpu import Cpu
from hybridc.targets.llvm.layout.graph import bindings_of, dims_of, sizes_of
from hybridc.targets.llvm.layout.kernels import pack_weight
from hybridc.targets.llvm.layout.main_writer import MainWriter, weight_names, weights_left
from hybridc.targets.llvm.schedules.blocked_tiles import Geometry, choose_vectors
from hybridc.targets.llvm.schedules.packed_product import PRODUCT
from hybridc.targets.llvm.sizes import Bounds, ranges_of, typical_size
from tvm import te, tirx

from hybridc.bundle.tensors import Array


def product_geometry(rows: int, depth: int, columns: int, cpu: Cpu) -> Geometry:
    """How a product of ``rows x depth`` data with a ``depth x columns`` matrix is computed."""
    lanes = cpu.vector_bytes // 4
    plain = Geometry(
        batch=1,
        groups=1,
        channels=depth,
        blocks=-(-columns // lanes),
        lanes=lanes,
        vectors=1,
        source_lanes=1,
        depthwise=0,
        height=1,
        width=rows,
        rows=1,
        columns=rows,
        kernel_rows=1,
        kernel_columns=1,
        row_step=1,
        column_step=1,
        row_reach=1,
        column_reach=1,
        top=0,
        left=0,
        filters=columns,
    )
    return choose_vectors(plain, cpu)


def pack_matrix(matrix: Array, geometry: Geometry) -> Array:
    """A ``depth x columns`` matrix as ``(panels, 1, 1, 1, depth, columns of a panel)``."""
    return pack_weight(np.ascontiguousarray(matrix.T)[:, :, None, None], geometry)


def packed_product(
    geometry: Geometry, data: te.Tensor, weight: te.Tensor, shape: Sequence[Any] = ()
) -> te.Tensor:
    """The product of ``(..., rows, depth)`` data with a packed matrix."""
    g = geometry
    axis = te.reduce_axis((tirx.IntImm("int64", 0), tirx.IntImm("int64", g.channels)), "k")
    zero = tirx.IntImm("int64", 0)

    def element(*place: Any) -> Any:
        *front, column = place
        block, lane = tirx.floordiv(column, g.lanes), tirx.floormod(column, g.lanes)
        panel = tirx.floordiv(block, g.vectors)
        position = tirx.floormod(block, g.vectors) * g.lanes + lane
        factor = weight(panel, zero, zero, zero, axis, position)
        return te.sum(data(*front, axis) * factor, axis=axis)

    shape = shape or (*data.shape[:-1], tirx.IntImm("int64", g.filters))
    return te.compute(shape, element, name="packed_product", attrs={PRODUCT: g.encode()})


def pack_products(
    module: tvm.IRModule, weights: Mapping[str, Array], cpu: Cpu
) -> tuple[tvm.IRModule, Mapping[str, Array]]:
    """Replace products in ``main`` by kernels for packed weights, and pack these.

    Args:
        module: A Relax module whose ``main`` takes the weights as one tuple, last.
        weights: Their arrays by name, in order.
        cpu: The processor.

    Returns:
        The module and its weights in their new order.
    """
    names, ranges = weight_names(module, weights), ranges_of(module["main"])
    products = {
        binding.var: found
        for binding in bindings_of(module["main"])
        if (found := _product(binding, names, ranges, cpu)) is not None
    }
    if not products:
        return module, weights
    packed = weights_left(module, weights, names, products)
    for product in products.values():
        if product.name not in packed:
            packed[product.name] = pack_matrix(weights[product.weight], product.geometry)
    writer = MainWriter(module, packed)
    items = {variable: product.name for variable, product in products.items()}

    def compute(binding: Any, weight: Any) -> Any:
        return _call(writer, products[binding.var], weight)

    return writer.rewritten(names, items, compute), packed


@dataclass(frozen=True)
class _Product:
    """A product that gets a kernel.

    Attributes:
        data: The variable that it reads.
        result: The variable that it is bound to.
        weight: Name of the weight.
        geometry: How it is computed.
    """

    data: Any
    result: Any
    weight: str
    geometry: Geometry

    @property
    def name(self) -> str:
        """Name of the packed weight."""
        return f"{self.weight}.packed_{self.geometry.vectors}x{self.geometry.lanes}"


def _product(binding: Any, names: Mapping[Any, str], ranges: Bounds, cpu: Cpu) -> _Product | None:
    """The product that a binding computes, if it is one of known weights that gets a kernel."""
    value: Any = getattr(binding, "value", None)
    if getattr(getattr(value, "op", None), "name", "") != "relax.matmul":
        return None
    data, weight = value.args
    kinds = {str(operand.ty.dtype) for operand in (data, weight, binding.var)}
    if kinds != {"float32"} or weight not in names:
        return None
    try:
        sizes, matrix = dims_of(data), sizes_of(weight)
    except Misfit:
        return None
    if len(matrix) != 2 or len(sizes) < 2 or 0 in (*sizes, *matrix) or sizes[-1] != matrix[0]:
        return None
    # Several matrices of one known size are computed as fast by a kernel for batches.
    is_open = not all(isinstance(size, int) for size in sizes)
    count = 1 if is_open else math.prod(sizes[:-2])
    if count != 1 or matrix[1] < cpu.vector_bytes // 4:
        return None
    rows = typical_size(sizes[-2], ranges)
    return _Product(data, binding.var, names[weight], product_geometry(rows, *matrix, cpu))


def _call(writer: MainWriter, product: _Product, packed: Any) -> Any:
    def build(data: te.Tensor, weight: te.Tensor, shape: Sequence[Any]) -> te.Tensor:
        return packed_product(product.geometry, data, weight, shape)

    operands, shape = (product.data, packed), dims_of(product.result)
    return writer.kernel(
        "packed_product", product.geometry, build, *operands, fuses=True, shape=shape
    )
