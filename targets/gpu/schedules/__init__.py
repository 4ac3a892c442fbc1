"""Schedules for GPUs: which loops of a fused function become blocks and threads.

:func:`schedule_module` schedules every function that was not before. One that is written as a
program gets the threads that its parallel loops offer. For the others the rules are tried in order;
the first that fits wins. A rule is a function ``(Schedule, Limits) -> Schedule`` that may change
the schedule it is given and raises if the function is not of its kind. Every rule must give a right
kernel for every function that it takes, so no barrier may stand where only some threads of a block
come by.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tvm
from hybridc.targets.fitting import if_it_fits
from hybridc.targets.gpu.limits import Limits
from hybridc.targets.gpu.schedules.fragments import schedule_fragments
from hybridc.targets.gpu.schedules.grids import never_empty
from hybridc.targets.gpu.schedules.programs import schedule_program
from hybridc.targets.gpu.schedules.rows import schedule_rows
from hybridc.targets.gpu.schedules.stages import schedule_stages
from hybridc.targets.gpu.schedules.tiles import schedule_tiles
from hybridc.targets.gpu.schedules.winograd import schedule_winograd
from hybridc.targets.llvm.schedules.blocks import (
    ROOT,
    blocks_of,
    is_reduction,
    is_spatial,
    store_of,
)
from hybridc.targets.relax_pipeline import map_kernels
from tvm import tirx
from tvm.s_tir import Schedule

SCHEDULED = "tirx.is_scheduled"
"""The attribute of a function whose loops are bound to threads already."""

Rule = Callable[[Schedule, Limits], Schedule]


def schedule_module(module: tvm.IRModule, target: Any, limits: Limits) -> tvm.IRModule:
    """Schedule every fused function of a module.

    Args:
        module: A Relax ``main`` and the functions that ``FuseTIR`` made.
        target: The ``tvm.target.Target``.
        limits: What a block of threads may use.
    """
    with target:
        return map_kernels(module, lambda kernel: never_empty(schedule_function(kernel, limits)))


def schedule_function(function: tirx.PrimFunc, limits: Limits) -> tirx.PrimFunc:
    """Schedule one function with the first rule that fits; one fits every function."""
    if SCHEDULED in (function.attrs or {}):
        return function
    schedule = Schedule(tvm.IRModule({"main": function}))
    if function.body.block.name_hint != ROOT or not _is_computed(schedule):
        return schedule_program(function, limits)
    for rule in _RULES:
        scheduled = apply_rule(rule, function, limits)
        if scheduled is not None:
            return scheduled
    return schedule_stages(schedule, limits).mod["main"]


def apply_rule(rule: Rule, function: tirx.PrimFunc, limits: Limits) -> tirx.PrimFunc | None:
    """The function scheduled by one rule, or ``None`` if the rule does not fit.

    Schedule primitives refuse what would change the result by raising; that, too, means that
    the rule does not fit.
    """
    schedule = Schedule(tvm.IRModule({"main": function}))
    return if_it_fits(lambda: rule(schedule, limits).mod["main"])


def _is_computed(schedule: Schedule) -> bool:
    """Whether every block computes elements by a formula or by a reduction."""
    blocks = map(schedule.get, blocks_of(schedule))
    return all((is_spatial(b) and store_of(b) is not None) or is_reduction(b) for b in blocks)


_RULES: tuple[Rule, ...] = (
    schedule_winograd,
    schedule_fragments,
    schedule_tiles,
    schedule_rows,
)
