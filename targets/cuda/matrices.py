"""Matrices that are weights, transposed for kernels for tensor cores.

These want neighbors in memory of both factors along the summands, so that 16 bytes go to shared
memory at once. Matrices are rewritten here, at compile time:

    matmul(data, matrix)  ->  sum over k of data[..., m, k] * matrix'[n, k]
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import tvm
from hybridc.targets.cuda.weights import reorder_weights
from hybridc.targets.fitting import Misfit
from hybridc.targets.gpu.schedules.product import MIN_EXTENT
from hybridc.targets.llvm.layout.graph import sizes_of
from hybridc.targets.llvm.layout.main_writer import MainWriter
from tvm import te, tirx

from hybridc.bundle.tensors import Array

MULTIPLE = 8
"""Depths that are no multiple of this are left alone: their rows would not be aligned."""


def depth_innermost(
    module: tvm.IRModule, weights: Mapping[str, Array], types: frozenset[str]
) -> tuple[tvm.IRModule, Mapping[str, Array]]:
    """The module and its weights with matrices transposed.

    Args:
        module: A Relax module whose ``main`` takes the weights as one tuple, last.
        weights: Their arrays by name, in order.
        types: Types of matrices that are transposed.
    """
    return reorder_weights(
        module,
        weights,
        lambda value, names: _is_chosen(value, names, types),
        lambda name, array: (f"{name}.transposed", array.T),
        _compute,
    )


def _compute(writer: MainWriter, binding: Any, matrix: Any) -> Any:
    """The kernel in place of a product."""
    data, dtype = binding.value.args[0], str(binding.var.ty.dtype)
    key = (sizes_of(data), sizes_of(matrix), str(data.ty.dtype), dtype)

    def build(left: te.Tensor, right: te.Tensor) -> te.Tensor:
        return _product(left, right, dtype)

    return writer.kernel("product", key, build, data, matrix, fuses=True)


def _is_chosen(value: Any, names: Mapping[Any, str], types: frozenset[str]) -> bool:
    """Whether a value is a product whose right factor is transposed."""
    if getattr(getattr(value, "op", None), "name", "") != "relax.matmul":
        return False
    data, matrix = value.args
    if matrix not in names or {str(data.ty.dtype), str(matrix.ty.dtype)} - types:
        return False
    try:
        sizes, shape = sizes_of(data), sizes_of(matrix)
    except Misfit:
        return False
    many = len(sizes) >= 2 and math.prod(sizes[:-1]) >= MIN_EXTENT
    return many and len(shape) == 2 and min(shape) >= MIN_EXTENT and not shape[0] % MULTIPLE


def _product(data: te.Tensor, matrix: te.Tensor, dtype: str) -> te.Tensor:
    """The product of ``(..., m, k)`` with ``(n, k)``, summed up in ``dtype``."""
    columns, depth = matrix.shape
    axis = te.reduce_axis((tirx.IntImm("int64", 0), depth), "k")

    def element(*place: Any) -> Any:
        *front, column = place
        left, right = data(*front, axis), matrix(column, axis)
        return te.sum(_as(left, dtype) * _as(right, dtype), axis=axis)

    return te.compute([*data.shape[:-1], columns], element, name="product")


def _as(value: Any, dtype: str) -> Any:
    return value if str(value.ty.dtype) == dtype else value.astype(dtype)
