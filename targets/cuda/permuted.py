"""Products of tensors whose axes were swapped: read and written as they lie, without copies.

Attention swaps the axes of its factors, multiplies them, and swaps the axes of the results. A
kernel for a product may index its factors and results as it likes:

    matmul(permute(x), permute(y))            ->  sum over k of x[..., k, ...] * y[..., k, ...]
    permute(astype(matmul(left, right)))      ->  the same, stored where the result belongs
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tvm
from hybridc.targets.fitting import Misfit
from hybridc.targets.llvm.layout.graph import bindings_of, sizes_of, variables_used
from hybridc.targets.llvm.layout.main_writer import MainWriter
from hybridc.targets.relax_pipeline import rewrite_main
from tvm import relax, te, tirx

from hybridc.bundle.tensors import Array

MIN_RANK = 3

Axes = tuple[int, ...]


def products_in_place(
    module: tvm.IRModule, weights: Mapping[str, Array], types: frozenset[str]
) -> tvm.IRModule:
    """The module with products that read and write tensors as they lie.

    Args:
        module: A Relax module whose ``main`` takes the weights as one tuple, last.
        weights: Their arrays by name, in order.
        types: Types of factors that go to tensor cores.
    """
    products = _find(module, types)
    if not products:
        return module
    writer = MainWriter(module, weights)
    by_result = {product.result: product for product in products}
    dropped = {v for product in products for v in product.between} - set(by_result)

    def block(old: Any) -> Any:
        bindings: list[Any] = []
        for binding in old.bindings:
            if binding.var in by_result:
                bindings += by_result[binding.var].bindings(writer)
            elif binding.var not in dropped:
                bindings.append(binding)
        return type(old)(bindings)

    return rewrite_main(writer.builder, module, block)


@dataclass(frozen=True)
class _Product:
    """A product with the swaps around it.

    Attributes:
        factors: Both factors before their axes were swapped.
        axes: For each, which axis of it is which of the product's.
        sizes: The product's result before its axes are swapped.
        order: Which axes of that the result has.
        dtype: Type of the sums.
        result: The variable of the result.
        between: Variables of the product and of what follows it up to the result.
    """

    factors: tuple[Any, Any]
    axes: tuple[Axes, Axes]
    sizes: tuple[int, ...]
    order: Axes
    dtype: str
    result: Any
    between: tuple[Any, ...]

    def bindings(self, writer: MainWriter) -> list[Any]:
        """What computes the result."""
        shapes = tuple(map(sizes_of, self.factors))
        types = tuple(str(factor.ty.dtype) for factor in self.factors)
        key = (shapes, types, self.axes, self.order, self.dtype)
        call = writer.kernel("product", key, self._kernel, *self.factors, fuses=True)
        dtype = str(self.result.ty.dtype)
        if dtype == self.dtype:
            return [relax.VarBinding(self.result, call)]
        sums = type(self.between[0])(self.between[0].name, call.ty_args[0])
        converted = relax.op.astype(sums, dtype)
        return [relax.VarBinding(sums, call), relax.VarBinding(self.result, converted)]

    def _kernel(self, left: te.Tensor, right: te.Tensor) -> te.Tensor:
        depth = left.shape[self.axes[0][-1]]
        axis = te.reduce_axis((tirx.IntImm("int64", 0), depth), "k")

        def element(*place: Any) -> Any:
            at = dict(zip(self.order, place, strict=True))
            *batch, row, column = (at[number] for number in range(len(place)))
            first = left(*_swapped(self.axes[0], [*batch, row, axis]))
            second = right(*_swapped(self.axes[1], [*batch, axis, column]))
            return te.sum(_as(first, self.dtype) * _as(second, self.dtype), axis=axis)

        shape = [tirx.IntImm("int64", self.sizes[axis]) for axis in self.order]
        return te.compute(shape, element, name="product")


def _swapped(axes: Axes, place: Sequence[Any]) -> list[Any]:
    """Indices of a tensor, given those of it with swapped axes."""
    at = dict(zip(axes, place, strict=True))
    return [at[axis] for axis in range(len(axes))]


def _as(value: Any, dtype: str) -> Any:
    return value if str(value.ty.dtype) == dtype else value.astype(dtype)


def _find(module: tvm.IRModule, types: frozenset[str]) -> list[_Product]:
    bindings = list(bindings_of(module["main"]))
    values = {binding.var: getattr(binding, "value", None) for binding in bindings}
    readers: dict[Any, list[Any]] = {}
    for binding in bindings:
        for variable in variables_used(values[binding.var]):
            readers.setdefault(variable, []).append(binding.var)
    for variable in variables_used(module["main"].body.body):
        readers.setdefault(variable, []).append(None)
    found = []
    for variable, value in values.items():
        if _name(value) != "relax.matmul":
            continue
        try:
            product = _product(variable, value, values, readers, types)
        except Misfit:
            continue
        found += [product] if product is not None else []
    return found


def _product(
    variable: Any,
    value: Any,
    values: Mapping[Any, Any],
    readers: Mapping[Any, Sequence[Any]],
    types: frozenset[str],
) -> _Product | None:
    """A product with swaps around it, if there are such."""
    sizes, operands = sizes_of(variable), list(value.args)
    shapes = [sizes_of(operand) for operand in operands]
    if len(sizes) < MIN_RANK or any(shape[:-2] != sizes[:-2] for shape in shapes):
        return None
    if {str(operand.ty.dtype) for operand in operands} - types or 0 in sizes:
        return None
    plain = tuple(range(len(sizes)))
    factors, axes = [], []
    for operand in operands:
        factor, swapped = _origin(operand, values, plain)
        factors.append(factor)
        axes.append(swapped)
    chain = _follow(variable, values, readers)
    *between, result = chain or [variable, variable]
    order = _axes(values[result], len(sizes)) if chain else plain
    if axes == [plain, plain] and order == plain:
        return None
    dtype = str(variable.ty.dtype)
    return _Product(
        (factors[0], factors[1]), (axes[0], axes[1]), sizes, order, dtype, result, tuple(between)
    )


def _origin(operand: Any, values: Mapping[Any, Any], plain: Axes) -> tuple[Any, Axes]:
    """A factor before all swaps of its axes, and which axis of it is which of the product's."""
    axes, source = plain, values.get(operand)
    while source is not None and _name(source) == "relax.permute_dims":
        swap = _axes(source, len(plain))
        axes = tuple(swap[axis] for axis in axes)
        operand = source.args[0]
        source = values.get(operand)
    return operand, axes


def _follow(
    variable: Any, values: Mapping[Any, Any], readers: Mapping[Any, Sequence[Any]]
) -> list[Any] | None:
    """From a product to the swap of its results' axes, if nothing else reads them."""
    chain = [variable]
    while len(next_ := readers.get(chain[-1], [])) == 1 and len(chain) < MIN_RANK:
        name = _name(values.get(next_[0]))
        chain.append(next_[0])
        if name == "relax.permute_dims":
            return chain
        if name != "relax.astype":
            return None
    return None


def _name(value: Any) -> str:
    return str(getattr(getattr(value, "op", None), "name", ""))


def _axes(permute: Any, rank: int) -> Axes:
    axes = permute.attrs.axes
    return tuple(reversed(range(rank))) if axes is None else tuple(int(a) % rank for a in axes)
