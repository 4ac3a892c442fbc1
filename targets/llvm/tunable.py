"""The kernels of a part for which a choice can be measured, each built alone.

A kernel on packed weights is built anew for each choice, since the packing follows from the choice,
with a maximum in place of what the model does behind it. Others are scheduled as the model has
them.

Between two calls of a kernel, a model reads all its other weights, and there may be more of them
than a cache keeps. So a kernel alone takes turns with as many copies of its weights.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import tvm
import tvm_ffi
from hybridc.targets.fitting import Misfit, if_it_fits
from hybridc.targets.llvm.alignment import accept_any_alignment
from hybridc.targets.llvm.cpu import Cpu
from hybridc.targets.llvm.layout.kernels import blocked_convolution, weight_shape
from hybridc.targets.llvm.layout.products import packed_product
from hybridc.targets.llvm.layout.winograd import winograd_convolution, winograd_weight_shape
from hybridc.targets.llvm.schedules import (
    blocked_tiles,
    conv2d,
    matmul,
    schedule_function,
    winograd_tiles,
)
from hybridc.targets.llvm.schedules.blocked_convolution import operands_of
from hybridc.targets.llvm.schedules.blocked_tiles import BLOCKED, Geometry
from hybridc.targets.llvm.schedules.blocks import blocks_of, is_reduction
from hybridc.targets.llvm.schedules.inlining import inline_spatial_blocks
from hybridc.targets.llvm.schedules.packed_product import PRODUCT
from hybridc.targets.llvm.schedules.statements import int64
from hybridc.targets.llvm.schedules.winograd import WINOGRAD
from hybridc.targets.llvm.schedules.written import annotated_anchor
from hybridc.targets.llvm.sizes import with_typical_sizes
from hybridc.targets.tuning import (
    Figures,
    Problem,
    Run,
    TunableKernel,
    Tuning,
    each_problem_once,
)
from tvm import relax, te, tirx
from tvm.s_tir import Schedule

from hybridc.bundle.tensors import Array

MOST_BYTES = 32 * 2**20
"""Copies of weights for one candidate, at most."""


def tunable_kernels(module: tvm.IRModule, weight_bytes: int, cpu: Cpu) -> list[TunableKernel]:
    """The kernels of a module before they are scheduled; those of the same problem are one.

    Args:
        module: Kernels, fused, and a ``main`` that calls them.
        weight_bytes: Size of all its weights.
        cpu: The processor.
    """
    calls = _count_calls(module["main"])
    found = []
    for variable, function in module.functions.items():
        if not isinstance(function, tirx.PrimFunc):
            continue
        kernel = _kernel(function, min(weight_bytes, MOST_BYTES), cpu)
        if kernel is not None and calls[variable.name_hint]:
            cost = kernel.cost * calls[variable.name_hint]
            found.append(dataclasses.replace(kernel, cost=cost))
    return each_problem_once(found)


def _count_calls(main: relax.Function) -> Counter[str]:
    """Calls of each kernel by its name."""
    calls: Counter[str] = Counter()

    def visit(node: Any) -> None:
        if isinstance(node, tvm.ir.Call) and getattr(node.op, "name", "") == "relax.call_tir":
            calls[node.args[0].name_hint] += 1

    relax.analysis.post_order_visit(main, visit)
    return calls


def _kernel(function: tirx.PrimFunc, weight_bytes: int, cpu: Cpu) -> TunableKernel | None:
    """A kernel with its candidates; ``None`` if there is nothing to choose.

    One for sizes that are not known is measured with typical ones, for which it is planned.
    """
    function = with_typical_sizes(function)
    for find in (partial(_packed, weight_bytes), _convolution, _product):
        kernel = if_it_fits(partial(find, function, cpu))
        if kernel is not None:
            return kernel if len(kernel.candidates) > 1 else None
    return None


def _packed(weight_bytes: int, function: tirx.PrimFunc, cpu: Cpu) -> TunableKernel:
    """A convolution or a product on packed weights, by any algorithm."""
    schedule = Schedule(tvm.IRModule({"main": function}))
    kinds = {kind for block in blocks_of(schedule) for kind in schedule.get(block).annotations}
    (kind,) = kinds & {BLOCKED, PRODUCT, WINOGRAD}
    anchor, sizes = annotated_anchor(schedule, kind)
    geometry = Geometry(*sizes)
    direct = dataclasses.replace(geometry, winograd=0)
    own = _own_choice(geometry, cpu)
    costs = blocked_tiles.rank_choices(direct, cpu)
    if kind != PRODUCT:
        costs |= winograd_tiles.rank_winograd(direct, cpu)
    others = sorted((cost, choice) for choice, cost in costs.items() if choice != own)
    choices = {own: costs[own], **{choice: cost for cost, choice in others}}
    data = _sizes(operands_of(anchor)[0]) if kind != WINOGRAD else _blocked_input(geometry)

    def stand_in(choice: Figures) -> tirx.PrimFunc:
        return _stand_in(direct, dict(choice), data, kind == PRODUCT)

    return _tunable(blocked_tiles.problem_of(geometry), choices, 1, stand_in, cpu, weight_bytes)


def _own_choice(geometry: Geometry, cpu: Cpu) -> Figures:
    """How a geometry is computed without measurements."""
    if geometry.winograd:
        chunking = winograd_tiles.choose_chunking(geometry, cpu)
        return winograd_tiles.choice_of(geometry, chunking)
    return blocked_tiles.choice_of(geometry, blocked_tiles.choose_tiling(geometry, cpu, True))


def _blocked_input(geometry: Geometry) -> Sequence[int]:
    """Shape of the blocked data of a convolution over two axes."""
    g = geometry
    return (g.batch, -(-g.channels // g.source_lanes), g.height, g.width, g.source_lanes)


def _stand_in(
    direct: Geometry, choice: Mapping[str, int], data: Sequence[int], is_product: bool
) -> tirx.PrimFunc:
    """A kernel on packed weights, with the packing that a choice asks for."""
    winograd = choice.get("winograd", 0)
    geometry = dataclasses.replace(direct, vectors=choice["vectors"], winograd=winograd)
    define: Callable[..., te.Tensor] = packed_product if is_product else blocked_convolution
    weight = weight_shape(geometry)
    if winograd:
        define, weight = winograd_convolution, winograd_weight_shape(geometry)
    tensors = [te.placeholder([int64(n) for n in shape], "float32") for shape in (data, weight)]
    product = define(geometry, *tensors)
    zero = tirx.const(0, "float32")
    result = te.compute(product.shape, lambda *at: tirx.max(product(*at), zero), name="finish")
    return te.create_prim_func([*tensors, result])


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
    weight_bytes: int = 0,
) -> TunableKernel:
    def build(choice: Figures) -> Run:
        return _compiled(_scheduled(function(choice), problem, choice, cpu), cpu, weight_bytes)

    return TunableKernel(problem, next(iter(choices.values())) * steps, tuple(choices), build)


def _scheduled(function: tirx.PrimFunc, problem: Problem, choice: Figures, cpu: Cpu) -> Any:
    tuning = Tuning(((problem, choice),))
    return schedule_function(function, dataclasses.replace(cpu, tuning=tuning))


def _compiled(function: tirx.PrimFunc, cpu: Cpu, weight_bytes: int) -> Run:
    """A scheduled kernel as machine code, with tensors to work on.

    Its second parameter are weights, of which there are so many bytes, if that is not 0.
    """
    function = function.with_attr("global_symbol", "main")
    module = accept_any_alignment(tvm.IRModule({"main": function}))
    kernel = tvm.compile(module, target=cpu.target)["main"]
    arrays = list(_arrays(function))
    data, *rest = map(tvm.runtime.tensor, arrays)
    copies = max(weight_bytes // arrays[1].nbytes, 1)
    others = [(tvm.runtime.tensor(arrays[1]), *rest[1:]) for _ in range(copies - 1)]
    operands = itertools.cycle([tuple(rest), *others])

    def run(count: int) -> None:
        for tensors in itertools.islice(operands, count):
            kernel(data, *tensors)

    return run


def _arrays(function: tirx.PrimFunc) -> Iterator[Array]:
    """Seeded numbers for a kernel's parameters, the result among them."""
    random = np.random.RandomState(0)
    for parameter in function.params:
        numbers = random.uniform(0.5, 1.5, _sizes(parameter))
        yield numbers.astype(str(parameter.dtype))


def _sizes(buffer: Any) -> Sequence[int]:
    return tuple(int(dim) for dim in buffer.shape)
