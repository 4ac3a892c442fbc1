"""CPU schedules: how the loops of each fused function are tiled, vectorized and shared.

:func:`schedule_module` tries the rules in order on every function; the first that fits wins. A
rule is a function ``(Schedule, Cpu) -> Schedule`` that may change the schedule it is given and
raises if the function is not of its kind; adding a rule means adding a file and an entry here.
"""

from __future__ import annotations

from collections.abc import Callable

import tvm
from hybridc.targets.fitting import Misfit, if_it_fits
from hybridc.targets.llvm.cpu import Cpu
from hybridc.targets.llvm.schedules.amx import schedule_tiled_product
from hybridc.targets.llvm.schedules.attention import schedule_attention
from hybridc.targets.llvm.schedules.blocked_convolution import schedule_blocked_convolution
from hybridc.targets.llvm.schedules.blocked_pooling import schedule_blocked_pooling
from hybridc.targets.llvm.schedules.blocks import blocks_of, is_reduction, is_spatial
from hybridc.targets.llvm.schedules.conditions import compare_starts
from hybridc.targets.llvm.schedules.conv2d import schedule_convolution
from hybridc.targets.llvm.schedules.extrema import with_finite_starts, with_infinite_starts
from hybridc.targets.llvm.schedules.generic import schedule_spatial
from hybridc.targets.llvm.schedules.inlining import inline_spatial_blocks, simplify_indices
from hybridc.targets.llvm.schedules.integer_products import schedule_integer_product
from hybridc.targets.llvm.schedules.matmul import schedule_matmul
from hybridc.targets.llvm.schedules.packed_product import schedule_packed_product
from hybridc.targets.llvm.schedules.reduction import (
    peel_reductions,
    schedule_chain,
    schedule_reduction,
)
from hybridc.targets.llvm.schedules.rounding import round_shortly
from hybridc.targets.llvm.schedules.tails import move_tails
from hybridc.targets.llvm.schedules.variants import with_alternative
from hybridc.targets.llvm.schedules.vector_math import expand_math
from hybridc.targets.llvm.schedules.winograd import schedule_winograd
from hybridc.targets.regions import whole_regions
from hybridc.targets.relax_pipeline import map_kernels
from tvm import tirx
from tvm.s_tir import Schedule

Rule = Callable[[Schedule, Cpu], Schedule]


def schedule_module(module: tvm.IRModule, cpu: Cpu) -> tvm.IRModule:
    """Schedule every fused function of a module.

    Args:
        module: A Relax ``main`` and the functions that ``FuseTIR`` made.
        cpu: The processor.

    Returns:
        The module with the same functions, scheduled; results agree up to the order of sums.
    """
    return map_kernels(module, lambda function: schedule_function(function, cpu))


def schedule_function(function: tirx.PrimFunc, cpu: Cpu) -> tirx.PrimFunc:
    """Schedule one function with the first rule that fits; unchanged if none does."""
    for rule in _RULES:
        scheduled = apply_rule(rule, function, cpu)
        if scheduled is not None:
            return _written_out(scheduled, cpu)
    return _written_out(function, cpu)


def _written_out(function: tirx.PrimFunc, cpu: Cpu) -> tirx.PrimFunc:
    """The function with arithmetic in place of what has no vector instruction, or a slow one."""
    return whole_regions(expand_math(round_shortly(compare_starts(function), cpu)))


def apply_rule(rule: Rule, function: tirx.PrimFunc, cpu: Cpu) -> tirx.PrimFunc | None:
    """The function scheduled by one rule, or ``None`` if the rule does not fit.

    Schedule primitives refuse what would change the result by raising; that, too, means that
    the rule does not fit.
    """
    finite = with_finite_starts(function)
    schedule = Schedule(tvm.IRModule({"main": finite}))

    def attempt() -> tirx.PrimFunc:
        scheduled, needed = move_tails(rule(schedule, cpu).mod["main"])
        return with_alternative(scheduled, finite, needed)

    scheduled = if_it_fits(attempt)
    if scheduled is None or finite.same_as(function):
        return scheduled
    return with_infinite_starts(scheduled)


def _matmul(schedule: Schedule, cpu: Cpu) -> Schedule:
    inline_spatial_blocks(schedule)
    schedule_matmul(schedule, cpu)
    return schedule


def _chain(schedule: Schedule, cpu: Cpu) -> Schedule:
    inline_spatial_blocks(schedule)
    schedule = peel_reductions(schedule, cpu)
    schedule_chain(schedule, cpu)
    return schedule


def _stages(schedule: Schedule, cpu: Cpu) -> Schedule:
    """Schedule block after block; a block for which that fails keeps its plain loops."""
    inline_spatial_blocks(schedule)
    schedule = peel_reductions(simplify_indices(schedule), cpu)
    blocks = [(block, schedule.get(block)) for block in blocks_of(schedule)]
    finished: set[str] = set()
    for block in [block for block, node in blocks if is_reduction(node)]:
        trial = schedule.copy()
        try:
            final = schedule_reduction(trial, block, cpu)
        except (Misfit, RuntimeError):
            continue
        schedule = trial
        finished.add(schedule.get(final).name_hint)
    for block in [block for block, node in blocks if is_spatial(node)]:
        if schedule.get(block).name_hint in finished:
            continue
        trial = schedule.copy()
        try:
            schedule_spatial(trial, block, cpu)
        except (Misfit, RuntimeError):
            continue
        schedule = trial
    return schedule


_RULES: tuple[Rule, ...] = (
    schedule_blocked_convolution,
    schedule_winograd,
    schedule_blocked_pooling,
    schedule_packed_product,
    schedule_attention,
    schedule_tiled_product,
    schedule_integer_product,
    schedule_convolution,
    _matmul,
    _chain,
    _stages,
)
