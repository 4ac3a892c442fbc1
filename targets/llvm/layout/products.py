"""Pack the weights of matrix products at compile time.

Runs before Relax's operators become tensor programs: a float32 product of static data with a known
matrix is replaced by a kernel of ``schedules/packed_product.py``.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tvm
from hybridc.targets.llvm.cpu import Cpu
from hybridc.targets.llvm.layout.graph import bindings_of, sizes_of, variables_used
from hybridc.targets.llvm.layout.kernels import pack_weight
from hybridc.targets.llvm.schedules.blocked_tiles import Geometry, choose_tiling, shared_cycles
from hybridc.targets.llvm.schedules.loops import Misfit
from hybridc.targets.llvm.schedules.packed_product import PRODUCT
from tvm import relax, te, tirx

from hybridc.bundle.tensors import Array

FUSES_AHEAD = 4
"""TVM's number for a kernel into which element-wise kernels that follow are fused."""

MAX_VECTORS = 8


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
    choices = (
        dataclasses.replace(plain, vectors=vectors)
        for vectors in range(1, min(plain.blocks, MAX_VECTORS) + 1)
    )
    return min(choices, key=lambda g: shared_cycles(g, choose_tiling(g, cpu, True)))


def pack_matrix(matrix: Array, geometry: Geometry) -> Array:
    """A ``depth x columns`` matrix as ``(panels, 1, 1, 1, depth, columns of a panel)``."""
    return pack_weight(np.ascontiguousarray(matrix.T)[:, :, None, None], geometry)


def packed_product(geometry: Geometry, data: te.Tensor, weight: te.Tensor) -> te.Tensor:
    """The product of ``(1, ..., rows, depth)`` data with a packed matrix."""
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

    shape = [*(int(dim) for dim in data.shape[:-1]), g.filters]
    sizes = tuple(tirx.IntImm("int64", dim) for dim in shape)
    return te.compute(sizes, element, name="packed_product", attrs={PRODUCT: g.encode()})


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
    packer = _Packer(module, weights, cpu)
    packer.find()
    return packer.module() if packer.products else (module, weights)


@dataclass
class _Packer:
    """Finds products and writes ``main`` anew.

    Attributes:
        whole: The module.
        weights: The weights by name, in order.
        cpu: The processor.
        weight_of: Name of the weight, by variable.
        products: What each product's variable computes: data, name of the weight, geometry.
        functions: New kernels by geometry and shape of the data.
    """

    whole: tvm.IRModule
    weights: Mapping[str, Array]
    cpu: Cpu
    weight_of: dict[Any, str] = field(default_factory=dict)
    products: dict[Any, tuple[Any, str, Geometry]] = field(default_factory=dict)
    functions: dict[Any, Any] = field(default_factory=dict)

    def find(self) -> None:
        """Find the products."""
        main, names = self.whole["main"], list(self.weights)
        for binding in bindings_of(main):
            value: Any = getattr(binding, "value", None)
            parameter = main.params[-1]
            if isinstance(value, tvm.ir.TupleGetItem) and value.tuple_value.same_as(parameter):
                self.weight_of[binding.var] = names[int(value.index)]
            elif getattr(getattr(value, "op", None), "name", "") == "relax.matmul":
                self._add(binding.var, *value.args)

    def _add(self, variable: Any, data: Any, weight: Any) -> None:
        kinds = {str(operand.ty.dtype) for operand in (data, weight, variable)}
        if kinds != {"float32"} or weight not in self.weight_of:
            return
        try:
            sizes, matrix = sizes_of(data), sizes_of(weight)
        except Misfit:
            return
        if len(matrix) != 2 or len(sizes) < 2 or 0 in (*sizes, *matrix):
            return
        if math.prod(sizes[:-2]) == 1 and matrix[1] >= self.cpu.vector_bytes // 4:
            geometry = product_geometry(sizes[-2], *matrix, self.cpu)
            self.products[variable] = (data, self.weight_of[weight], geometry)

    def module(self) -> tuple[tvm.IRModule, Mapping[str, Array]]:
        """The new module and its weights."""
        weights = self._packed()
        positions = {name: position for position, name in enumerate(weights)}
        types = [relax.TensorType(array.shape, array.dtype.name) for array in weights.values()]
        parameter = relax.Var("model_params", relax.TupleType(types))
        builder = relax.BlockBuilder(self.whole)
        main = self.whole["main"]
        blocks = []
        for block in main.body.blocks:
            bindings: list[Any] = []
            for binding in block.bindings:
                name = self.weight_of.get(binding.var)
                if binding.var in self.products:
                    data, weight, geometry = self.products[binding.var]
                    item = relax.TupleGetItem(parameter, positions[_name(weight, geometry)])
                    packed = type(binding.var)(f"{binding.var.name}_packed", types[item.index])
                    call = self._call(builder, geometry, data, packed)
                    bindings += [
                        relax.VarBinding(packed, item),
                        relax.VarBinding(binding.var, call),
                    ]
                elif name is None:
                    bindings.append(binding)
                elif name in positions:
                    item = relax.TupleGetItem(parameter, positions[name])
                    bindings.append(relax.VarBinding(binding.var, item))
            blocks.append(type(block)(bindings))
        body = relax.SeqExpr(blocks, main.body.body)
        parameters = [*main.params[:-1], parameter]
        new = relax.Function(parameters, body, main.ret_ty, main.is_pure, main.attrs)
        builder.update_func(self.whole.get_global_var("main"), new)
        return relax.transform.DeadCodeElimination()(builder.finalize()), weights

    def _packed(self) -> dict[str, Array]:
        """The weights that are still read as they are, then the packed ones."""
        main = self.whole["main"]
        needed = variables_used(main.body.body)
        for binding in bindings_of(main):
            if binding.var not in self.products:
                needed |= variables_used(binding.value)
        names = {name for variable, name in self.weight_of.items() if variable in needed}
        weights = {name: array for name, array in self.weights.items() if name in names}
        for _, name, geometry in self.products.values():
            if _name(name, geometry) not in weights:
                weights[_name(name, geometry)] = pack_matrix(self.weights[name], geometry)
        return weights

    def _call(self, builder: Any, geometry: Geometry, data: Any, weight: Any) -> Any:
        """A call of the kernel for a geometry; the same one for the same shapes."""
        shapes = [sizes_of(data), sizes_of(weight)]
        key = (geometry, shapes[0])
        if key not in self.functions:
            tensors = [
                te.placeholder([tirx.IntImm("int64", dim) for dim in shape], "float32", f"p{i}")
                for i, shape in enumerate(shapes)
            ]
            result = packed_product(geometry, *tensors)
            function = te.create_prim_func([*tensors, result]).without_attr("global_symbol")
            function = function.with_attr("tirx.noalias", True)
            function = function.with_attr("op_pattern", FUSES_AHEAD)
            self.functions[key] = builder.add_func(function, "packed_product")
        kind = relax.TensorType([*shapes[0][:-1], geometry.filters], "float32")
        return relax.call_tir(self.functions[key], relax.Tuple([data, weight]), kind)


def _name(weight: str, geometry: Geometry) -> str:
    """Name of a packed weight."""
    return f"{weight}.packed_{geometry.vectors}x{geometry.lanes}"
