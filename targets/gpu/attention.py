"""Attention as one kernel: a product, a softmax of its results, and their product with values.

    scores  = finish(query key')          (batch..., queries, keys)
    weights = softmax(scores)
    out     = finish(weights value)

These are three kernels of a fused module. If nothing else reads the scores and the weights, one
that stores neither takes their place: on tensor cores (:mod:`.schedules.attention_kernel`) or,
if that is asked for, in float32 (:mod:`.schedules.attention_tiles`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import tvm
import tvm_ffi
from hybridc.targets.fitting import Misfit, if_it_fits
from hybridc.targets.gpu.limits import Limits
from hybridc.targets.gpu.schedules import SCHEDULED
from hybridc.targets.gpu.schedules.attention_kernel import Cut, shared_words, write_attention
from hybridc.targets.gpu.schedules.attention_tiles import choose_tile, write_attention_tiles
from hybridc.targets.gpu.schedules.factors import Product, extract_product
from hybridc.targets.gpu.schedules.fragment_choice import MULTIPROCESSORS, SHARED
from hybridc.targets.gpu.schedules.fragments import check_types
from hybridc.targets.gpu.schedules.product import only_product, right_along_depth
from hybridc.targets.gpu.schedules.softmax import check_softmax
from hybridc.targets.llvm.layout.graph import bindings_of, variables_used
from hybridc.targets.llvm.schedules.blocks import changed
from hybridc.targets.llvm.schedules.statements import int64
from hybridc.targets.relax_pipeline import rewrite_main
from tvm import relax, tirx
from tvm.s_tir import SBlockRealize, Schedule

CUTS = tuple(Cut(warps, keys) for warps in (4, 2) for keys in (128, 64, 32))
"""Ways to cut. With as many keys as fit, the first ones took at most 7 % longer than the best of 12
ways in fp16 on an H200, of batches of 1 to 32 and of 128 to 1,024 tokens; in tf32 at most 18 %."""

FEW_BLOCKS = MULTIPROCESSORS // 2
"""Below so many blocks, those with fewer queries take less time."""

MOST_SUMS = 144
"""Most scores and sums that a lane has in registers."""


def attention_in_one(module: tvm.IRModule, limits: Limits, in_tiles: bool = False) -> tvm.IRModule:
    """The module with attention in one kernel where that fits.

    Args:
        module: A Relax ``main`` and the functions that ``FuseTIR`` made.
        limits: What a block of threads may use.
        in_tiles: Whether that is in float32 where there are no tensor cores for the type. A BERT
            encoder takes 2 % less time by that with OpenCL on an H200, and 4 to 10 % more with
            CUDA.
    """
    writers = (_on_tensor_cores, *([_in_tiles] if in_tiles else []))
    chains = _find(module)
    if not chains:
        return module
    builder = relax.BlockBuilder(module)
    kernels: dict[Any, Any] = {}
    replaced = {}
    for chain in chains:
        if chain.functions not in kernels:
            parts = [module[variable] for variable in chain.functions]
            function = _kernel(parts, limits, writers)
            kernels[chain.functions] = function and builder.add_func(function, "attention")
        if kernels[chain.functions] is not None:
            operands = relax.Tuple([*chain.operands])
            call = relax.call_tir(kernels[chain.functions], operands, chain.result.ty)
            replaced[chain.result] = relax.VarBinding(chain.result, call)

    def block(old: Any) -> Any:
        return type(old)([replaced.get(binding.var, binding) for binding in old.bindings])

    return rewrite_main(builder, module, block)


_Writer: TypeAlias = Callable[[Sequence[tirx.PrimFunc], Limits], Any]
"""Gives a kernel for three functions, or raises if it has none."""


@dataclass(frozen=True)
class _Chain:
    """Calls of three kernels, each of which reads what the one before gives.

    Attributes:
        functions: The kernels.
        operands: What they read from elsewhere.
        result: The variable of the last one's result.
    """

    functions: tuple[Any, Any, Any]
    operands: tuple[Any, ...]
    result: Any


def _find(module: tvm.IRModule) -> list[_Chain]:
    """All chains around a kernel of one operand whose second reader multiplies."""
    main = module["main"]
    bindings = list(bindings_of(main))
    calls = {b.var: b.value for b in bindings if _is_kernel(getattr(b, "value", None))}
    readers: dict[Any, list[Any]] = {}
    for binding in bindings:
        for variable in variables_used(binding.value):
            readers.setdefault(variable, []).append(binding.var)
    for variable in variables_used(main.body.body):
        readers.setdefault(variable, []).append(None)
    found = []
    for weights, call in calls.items():
        chain = _chain(weights, call, calls, readers)
        found += [chain] if chain is not None else []
    return found


def _is_kernel(value: Any) -> bool:
    """Whether a value is a call of a kernel with one result, on tensors."""
    name = str(getattr(getattr(value, "op", None), "name", ""))
    known = len(getattr(value, "args", ())) == 2 and isinstance(value.ty, relax.TensorType)
    return name == "relax.call_tir" and known


def _chain(
    weights: Any, call: Any, calls: Mapping[Any, Any], readers: Mapping[Any, list[Any]]
) -> _Chain | None:
    """The chain around what may be a softmax."""
    operands, after = call.args[1].fields, readers.get(weights, [])
    if len(operands) != 1 or operands[0] not in calls or len(after) != 1:
        return None
    scores = operands[0]
    if len(readers[scores]) != 1:
        return None
    result = after[0]
    if result not in calls:
        return None
    before, last = list(calls[scores].args[1].fields), list(calls[result].args[1].fields)
    if not last[0].same_as(weights) or any(o.same_as(weights) for o in last[1:]):
        return None
    functions = (calls[scores].args[0], call.args[0], calls[result].args[0])
    return _Chain(functions, (*before, *last[1:]), result)


def _kernel(
    functions: Sequence[tirx.PrimFunc], limits: Limits, writers: Sequence[_Writer]
) -> tirx.PrimFunc | None:
    """One kernel in place of three, by the first writer that has one."""
    for write in writers:
        kernel = if_it_fits(partial(write, functions, limits))
        if kernel is None:
            continue
        first, _, second = functions
        root = changed(first.body.block, body=kernel, alloc_buffers=[])
        params = [*first.params[:-1], *second.params[1:]]
        body = SBlockRealize([], True, root)
        return tirx.PrimFunc(params, body, first.ret_type, first.attrs).with_attr(SCHEDULED, True)
    return None


def _on_tensor_cores(functions: Sequence[tirx.PrimFunc], limits: Limits) -> Any:
    """The kernel of :mod:`.schedules.attention_kernel`."""
    scores, outputs = _products(functions, lambda node: check_types(node, limits))
    return write_attention(scores, outputs, choose_cut(scores, outputs))


def _in_tiles(functions: Sequence[tirx.PrimFunc], limits: Limits) -> Any:
    """The kernel of :mod:`.schedules.attention_tiles`."""
    scores, outputs = _products(functions, lambda node: None)
    tile = choose_tile(scores, outputs, limits, FEW_BLOCKS)
    return write_attention_tiles(scores, outputs, tile)


def _products(
    functions: Sequence[tirx.PrimFunc], check: Callable[[Any], None]
) -> tuple[Product, Product]:
    """Both products around a softmax, each of which passes a check of its block."""
    first, softmax, second = functions
    check_softmax(softmax)
    scores, outputs = _product(first, check), _product(second, check)
    _check_order(first, second, scores, outputs)
    return scores, outputs


def _product(function: tirx.PrimFunc, check: Callable[[Any], None]) -> Product:
    """The product that a function computes."""
    schedule = Schedule(tvm.IRModule({"main": function}))
    main = only_product(schedule)
    check(schedule.get(main))
    return extract_product(schedule, main, right_along_depth(schedule, main))


def _check_order(
    first: tirx.PrimFunc, second: tirx.PrimFunc, scores: Product, outputs: Product
) -> None:
    """Refuse products of which the second does not read the first one's rows as its rows."""
    batch, rows, keys, _ = scores.shape
    if outputs.shape[:2] != (batch, rows) or outputs.shape[3] != keys:
        raise Misfit("other extents")
    if scores.left.dtype != outputs.left.dtype or not outputs.left.is_loaded:
        raise Misfit("other types")
    source, address, when = outputs.left.address_at(*outputs.left.axes)
    if not (source.same_as(second.params[0]) and scores.store.buffer.same_as(first.params[-1])):
        raise Misfit("other tensors")
    if not tvm_ffi.structural_equal(when, tirx.const(True, "bool")):
        raise Misfit("weights that are left out")
    _check_address(scores.axes, scores.shape[:3], scores.address())
    _check_address(outputs.left.axes, (batch, rows, keys), address)


def _check_address(axes: tuple[Any, ...], extents: tuple[int, ...], address: Any) -> None:
    """Refuse a tensor whose elements are not in the order of these axes."""
    analyzer = tvm.sym.Analyzer()
    expected: Any = int64(0)
    for axis, extent in zip(axes, extents, strict=True):
        analyzer.bind(axis, tvm.ir.Range(int64(0), int64(extent)))
        expected = expected * extent + axis
    if not analyzer.can_prove_equal(address, expected):
        raise Misfit("scores in another order")


def choose_cut(scores: Product, outputs: Product) -> Cut:
    """A way to cut that has room in shared memory and in registers.

    Raises:
        Misfit: Rows are too long.
    """
    batch, rows, keys, _ = scores.shape
    fits = [
        cut
        for cut in CUTS
        if 4 * shared_words(scores, outputs, cut) <= SHARED
        and (cut.keys + outputs.shape[2]) // 2 <= MOST_SUMS
        and (cut.keys < 2 * keys or cut.keys == CUTS[-1].keys)
    ]
    if not fits:
        raise Misfit("heads that are too large")
    many = [cut for cut in fits if batch * -(-rows // cut.rows) >= FEW_BLOCKS]
    return many[0] if many else min(fits, key=lambda cut: cut.rows)
