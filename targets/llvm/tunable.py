"""The kernels of a part for which a choice can be measured, each built alone.

A kernel on packed weights is built anew for each choice, since the packing follows from the choice,
with a maximum in place of what the model does behind it. Others are scheduled as the model has
them.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tvm
import tvm_ffi
from hybridc.targets.llvm.alignment import accept_any_alignment
from hybridc.targets.llvm.cpu import Cpu
from hybridc.targets.llvm.layout.kernels import blocked_convolution, weight_shape
from hybridc.targets.llvm.layout.products import packed_product
from hybridc.targets.llvm.schedules import blocked_tiles, conv2d, matmul, schedule_function
from hybridc.targets.llvm.schedules.blocked_convolution import operands_of
from hybridc.targets.llvm.schedules.blocked_tiles import BLOCKED, Geometry
from hybridc.targets.llvm.schedules.blocks import blocks_of, is_reduction
from hybridc.targets.llvm.schedules.inlining import inline_spatial_blocks
from hybridc.targets.llvm.schedules.loops import Misfit
from hybridc.targets.llvm.schedules.packed_product import PRODUCT
from hybridc.targets.llvm.schedules.written import annotated_anchor
from hybridc.targets.tuning import Figures, Problem, Run, TunableKernel, Tuning
from tvm import relax, te, tirx
from tvm.s_tir import Schedule

from hybridc.bundle.tensors import Array

_EXPRESSIONS = {BLOCKED: blocked_convolution, PRODUCT: packed_product}
"""Definitions of kernels on packed weights."""


def tunable_kernels(module: tvm.IRModule, cpu: Cpu) -> list[TunableKernel]:
    """The kernels of a module before they are scheduled; those of the same problem are one."""
    calls = _count_calls(module["main"])
    found: dict[Problem, TunableKernel] = {}
    for variable, function in module.functions.items():
        kernel = _kernel(function, cpu) if isinstance(function, tirx.PrimFunc) else None
        if kernel is not None and calls[variable.name_hint]:
            known = found[kernel.problem].cost if kernel.problem in found else 0.0
            cost = kernel.cost * calls[variable.name_hint] + known
            found[kernel.problem] = dataclasses.replace(kernel, cost=cost)
    return list(found.values())


def _count_calls(main: relax.Function) -> Counter[str]:
    """Calls of each kernel by its name."""
    calls: Counter[str] = Counter()

    def visit(node: Any) -> None:
        if isinstance(node, tvm.ir.Call) and getattr(node.op, "name", "") == "relax.call_tir":
            calls[node.args[0].name_hint] += 1

    relax.analysis.post_order_visit(main, visit)
    return calls


def _kernel(function: tirx.PrimFunc, cpu: Cpu) -> TunableKernel | None:
    """A kernel with its candidates; ``None`` if there is nothing to choose."""
    for find in (_packed, _convolution, _product):
        try:
            kernel = find(function, cpu)
        except (Misfit, RuntimeError, ValueError, TypeError, ArithmeticError):
            continue
        return kernel if len(kernel.candidates) > 1 else None
    return None


def _packed(function: tirx.PrimFunc, cpu: Cpu) -> TunableKernel:
    """A convolution or a product on packed weights."""
    schedule = Schedule(tvm.IRModule({"main": function}))
    kinds = {kind for block in blocks_of(schedule) for kind in schedule.get(block).annotations}
    (kind,) = kinds & set(_EXPRESSIONS)
    anchor, sizes = annotated_anchor(schedule, kind)
    geometry = Geometry(*sizes)
    data = _sizes(operands_of(anchor)[0])
    choices = blocked_tiles.rank_choices(geometry, cpu)

    def stand_in(choice: Figures) -> tirx.PrimFunc:
        chosen = dataclasses.replace(geometry, vectors=dict(choice)["vectors"])
        shapes = (data, weight_shape(chosen))
        tensors = [te.placeholder([_int(n) for n in shape], "float32") for shape in shapes]
        product = _EXPRESSIONS[kind](chosen, *tensors)
        zero = tirx.const(0, "float32")
        result = te.compute(product.shape, lambda *at: tirx.max(product(*at), zero), name="finish")
        return te.create_prim_func([*tensors, result])

    return _tunable(blocked_tiles.problem_of(geometry), choices, 1, stand_in, cpu)


def _convolution(function: tirx.PrimFunc, cpu: Cpu) -> TunableKernel:
    """A convolution on plain tensors."""
    schedule = Schedule(tvm.IRModule({"main": function}))
    (anchor,) = (b for b in blocks_of(schedule) if is_reduction(schedule.get(b)))
    found = conv2d.find_convolution(schedule.get(anchor))
    if found.is_flat:
        raise Misfit("one spatial axis")
    steps = found.batch * found.groups * found.channels * math.prod(found.kernel)
    choices = conv2d.rank_chunks(found, cpu)
    return _as_it_is(found.problem, choices, steps, function, cpu)


def _product(function: tirx.PrimFunc, cpu: Cpu) -> TunableKernel:
    """A product of two matrices that are not known."""
    schedule = Schedule(tvm.IRModule({"main": function}))
    inline_spatial_blocks(schedule)
    (anchor,) = (b for b in blocks_of(schedule) if is_reduction(schedule.get(b)))
    problem = matmul.problem_of(schedule, anchor, matmul.find_product(schedule, anchor))
    sizes = dict(problem.sizes)
    choices = matmul.rank_tiles(problem, cpu)
    return _as_it_is(problem, choices, sizes["count"] * sizes["depth"], function, cpu)


def _as_it_is(
    problem: Problem,
    choices: Mapping[Figures, float],
    steps: int,
    function: tirx.PrimFunc,
    cpu: Cpu,
) -> TunableKernel:
    """A kernel that is scheduled as it is.

    Raises:
        Misfit: Its schedule does not ask for the choice.
    """
    first, *_, last = (*choices, *choices)
    if tvm_ffi.structural_equal(*(_scheduled(function, problem, c, cpu) for c in (first, last))):
        raise Misfit("another rule schedules it")
    return _tunable(problem, choices, steps, lambda _choice: function, cpu)


def _tunable(
    problem: Problem,
    choices: Mapping[Figures, float],
    steps: int,
    function: Callable[[Figures], tirx.PrimFunc],
    cpu: Cpu,
) -> TunableKernel:
    def build(choice: Figures) -> Run:
        return _compiled(_scheduled(function(choice), problem, choice, cpu), cpu)

    return TunableKernel(problem, min(choices.values()) * steps, tuple(choices), build)


def _scheduled(function: tirx.PrimFunc, problem: Problem, choice: Figures, cpu: Cpu) -> Any:
    tuning = Tuning(((problem, choice),))
    return schedule_function(function, dataclasses.replace(cpu, tuning=tuning))


def _compiled(function: tirx.PrimFunc, cpu: Cpu) -> Run:
    """A scheduled kernel as machine code, with tensors to work on."""
    module = accept_any_alignment(tvm.IRModule({"main": function}))
    kernel = tvm.compile(module, target=cpu.target)["main"]
    tensors = [tvm.runtime.tensor(array) for array in _arrays(function)]

    def run(count: int) -> None:
        for _ in range(count):
            kernel(*tensors)

    return run


def _arrays(function: tirx.PrimFunc) -> Iterator[Array]:
    """Seeded numbers for a kernel's parameters, the result among them."""
    random = np.random.RandomState(0)
    for parameter in function.params:
        numbers = random.uniform(0.5, 1.5, _sizes(parameter))
        yield numbers.astype(str(parameter.dtype))


def _sizes(buffer: Any) -> Sequence[int]:
    return tuple(int(dim) for dim in buffer.shape)


def _int(value: int) -> tirx.IntImm:
    return tirx.IntImm("int64", value)
