"""CPU schedules: how the loops of each fused function are tiled, vectorized and shared.

:func:`schedule_module` tries the rules in order on every function; the first that fits wins. A
rule is a function ``(Schedule, Cpu) -> Schedule`` that may change the schedule it is given and
raises if the function is not of its kind; adding a rule means adding a file and an entry here.
"""

from __future__ import annotations

from collections.abc import Callable

import tvm
from hybridc.targets.llvm.cpu import Cpu
from hybridc.targets.llvm.schedules.blocks import (
    blocks_of,
    is_reduction,
    is_spatial,
)
from hybridc.targets.llvm.schedules.conv2d import schedule_convolution
from hybridc.targets.llvm.schedules.generic import schedule_spatial
from hybridc.targets.llvm.schedules.inlining import inline_spatial_blocks
from hybridc.targets.llvm.schedules.loops import Misfit
from hybridc.targets.llvm.schedules.matmul import schedule_matmul
from hybridc.targets.llvm.schedules.reduction import (
    peel_reductions,
    schedule_chain,
    schedule_reduction,
)
from hybridc.targets.llvm.schedules.tails import move_tails
from hybridc.targets.llvm.schedules.vector_math import expand_math
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
    functions = {
        variable: schedule_function(function, cpu)
        if isinstance(function, tirx.PrimFunc)
        else function
        for variable, function in module.functions.items()
    }
    return tvm.IRModule(functions, attrs=module.attrs, global_infos=module.global_infos)


def schedule_function(function: tirx.PrimFunc, cpu: Cpu) -> tirx.PrimFunc:
    """Schedule one function with the first rule that fits; unchanged if none does."""
    for rule in _RULES:
        tuple[Rule, ...] = (schedule_convolution, _matmul, _chain, _stages)
