"""Normalization over the last axis in one kernel.

It is lowered to a mean, differences, their squares, the mean of these, and so on, each an operator
of its own. One kernel that has a row at hand computes them all:

    mean(x); d = x - mean; mean(d * d); scale = f(...); d * scale   ->   normalized(x)
"""

from __future__ import annotations

from typing import Any

import tvm
import tvm_ffi
from hybridc.targets.fitting import Misfit
from hybridc.targets.llvm.layout.graph import bindings_of, sizes_of
from hybridc.targets.llvm.layout.main_writer import FUSES_AHEAD
from hybridc.targets.llvm.schedules.blocks import blocks_of, store_of
from hybridc.targets.relax_pipeline import rewrite_main
from tvm import relax, te, tirx
from tvm.s_tir import Schedule

DTYPE = "float32"


def rows_normalized(module: tvm.IRModule) -> tvm.IRModule:
    """The module with each normalization over the last axis as one kernel."""
    values: dict[Any, Any] = {}
    for binding in bindings_of(module["main"]):
        values[binding.var] = getattr(binding, "value", None)
    builder = relax.BlockBuilder(module)
    kernels: dict[Any, Any] = {}

    def rewritten(binding: Any) -> Any:
        match = _match(module, binding.value if binding.var in values else None, values)
        if match is None:
            return binding
        data, scale = match
        key = (sizes_of(data), str(data.ty.dtype), str(scale))
        if key not in kernels:
            function = _kernel(data, scale)
            kernels[key] = builder.add_func(function, "normalized")
        call = relax.call_tir(kernels[key], relax.Tuple([data]), binding.var.ty)
        return relax.VarBinding(binding.var, call)

    return rewrite_main(builder, module, lambda b: type(b)(list(map(rewritten, b.bindings))))


def _match(module: tvm.IRModule, value: Any, values: dict[Any, Any]) -> tuple[Any, Any] | None:
    """What a normalization reads, and the function from the variance to the scale."""
    if _name(value) != "relax.multiply":
        return None
    difference, scale = value.args
    scaled: Any = values.get(scale)
    if _name(values.get(difference)) != "relax.subtract" or _name(scaled) != "relax.call_tir":
        return None
    data, mean = values[difference].args
    (variance, *others) = scaled.args[1].fields
    if others or not (_is_mean(values.get(mean), data) and _is_mean(values.get(variance), None)):
        return None
    squares: Any = values.get(values[variance].args[0])
    if _name(squares) != "relax.multiply":
        return None
    if not all(factor.same_as(difference) for factor in squares.args):
        return None
    try:
        sizes = sizes_of(data)
        function = _elementwise(module[scaled.args[0]])
    except Misfit:
        return None
    if str(data.ty.dtype) != DTYPE or 0 in sizes:
        return None
    source: Any = values.get(data)
    if _name(source) == "relax.astype" and str(source.args[0].ty.dtype) in ("float16", "bfloat16"):
        data = source.args[0]
    return data, function


def _is_mean(value: Any, data: Any) -> bool:
    """Whether a value is a mean over the last axis, which it keeps; of ``data``, if given."""
    if _name(value) != "relax.mean" or (data is not None and not value.args[0].same_as(data)):
        return False
    axes, rank = value.attrs.axis, len(value.args[0].ty.shape.values)
    last = axes is not None and [int(axis) % rank for axis in axes] == [rank - 1]
    return bool(last and value.attrs.keepdims)


def _elementwise(function: tirx.PrimFunc) -> Any:
    """The value of a kernel that computes each element from the one at the same place."""
    schedule = Schedule(tvm.IRModule({"main": function}))
    blocks = blocks_of(schedule)
    store = store_of(schedule.get(blocks[0]))
    if len(blocks) != 1 or store is None:
        raise Misfit("more than one element at a time")
    loads: list[Any] = []
    tvm_ffi.structural_walk(store.value, (tvm.ir.TensorLoad, loads.append))
    for load in loads:
        pairs = zip(load.indices, store.indices, strict=True)
        if not all(tvm_ffi.structural_equal(a, b) for a, b in pairs):
            raise Misfit("another element")
    return store.value


def _kernel(data: Any, scale: Any) -> tirx.PrimFunc:
    shape = [tirx.IntImm("int64", size) for size in sizes_of(data)]
    tensor = te.placeholder(shape, str(data.ty.dtype), "data")
    columns = shape[-1]

    def axis(name: str) -> Any:
        return te.reduce_axis((tirx.IntImm("int64", 0), columns), name)

    def at(*place: Any) -> Any:
        value = tensor(*place)
        return value if str(tensor.dtype) == DTYPE else value.astype(DTYPE)

    def apply(variance: Any) -> Any:
        return tvm_ffi.structural_map(scale, [(tvm.ir.TensorLoad, lambda _: variance)])

    count = tirx.const(float(int(columns)), DTYPE)
    k, j = axis("k"), axis("j")
    total = te.compute(shape[:-1], lambda *i: te.sum(at(*i, k), axis=k), "total")

    def difference(*place: Any) -> Any:
        return at(*place) - total(*place[:-1]) / count

    squares = te.compute(
        shape[:-1],
        lambda *i: te.sum(difference(*i, j) * difference(*i, j), axis=j),
        "squares",
    )
    result = te.compute(
        shape, lambda *i: difference(*i) * apply(squares(*i[:-1]) / count), "normalized"
    )
    function = te.create_prim_func([tensor, result]).without_attr("global_symbol")
    return function.with_attr("tirx.noalias", True).with_attr("op_pattern", FUSES_AHEAD)


def _name(value: Any) -> str:
    return str(getattr(getattr(value, "op", None), "name", ""))
