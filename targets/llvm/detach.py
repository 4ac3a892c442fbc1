"""Take kernels out of a module, under names that say what they hold.

What a kernel and its parameters are called depends on the whole model: a node more, and all that
follow have other numbers. Here parameters are numbered anew and a kernel is named after its
content, so that the same kernel is the same object file whatever model it is in. The names matter,
since a kernel's error messages quote them.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import tvm
import tvm_ffi
from hybridc.targets.llvm.cpu import Cpu
from hybridc.targets.llvm.schedules import schedule_function
from hybridc.targets.relax_pipeline import map_kernels
from tvm import relax, tirx
from tvm.tirx.buffer import is_buffer_var

_NUMBER = re.compile(r"\d+(?=_|$)")
_ANCHOR = "hybridc_part"


@dataclass(frozen=True)
class Kernel:
    """A fused function that is not scheduled yet.

    Attributes:
        symbol: Its name in the library; two kernels of one name are the same.
        function: The tensor program, with its parameters numbered.
        text: All of it, as text.
    """

    symbol: str
    function: tirx.PrimFunc
    text: str


def show_views(module: tvm.IRModule, cpu: Cpu) -> tvm.IRModule:
    """The fused module with kernels scheduled that move nothing once that is done.

    TVM takes such a kernel for a reshape and computes nothing. It sees so only where what was fused
    is inlined, as schedules do.
    """

    def scheduled(function: tirx.PrimFunc) -> tirx.PrimFunc:
        if not _may_be_view(function):
            return function
        trial = schedule_function(function, cpu)
        return trial if relax.analysis.has_reshape_pattern(trial) else function

    return map_kernels(module, scheduled)


def detach_kernels(
    graph: tvm.IRModule, fused: tvm.IRModule
) -> tuple[tvm.IRModule, Mapping[str, Kernel]]:
    """Split a finalized module into its graph and the kernels that it calls.

    Args:
        graph: The finalized module.
        fused: The module in which the kernels are as they were fused.

    Returns:
        A module that calls kernels by their symbols, and the kernels by symbol, sorted.
    """
    names = {variable.name_hint: function for variable, function in fused.functions.items()}
    called: dict[str, Kernel] = {}

    def by_symbol(variable: tvm.ir.GlobalVar) -> Any:
        function = names.get(variable.name_hint)
        if not isinstance(function, tirx.PrimFunc):
            return variable
        if variable.name_hint not in called:
            called[variable.name_hint] = kernel_of(variable.name_hint, function)
        return relax.ExternFunc(called[variable.name_hint].symbol)

    functions: dict[Any, Any] = {_ANCHOR: _anchor()}
    for variable, function in graph.functions.items():
        if isinstance(function, relax.Function):
            function = tvm_ffi.structural_map(function, [(tvm.ir.GlobalVar, by_symbol)])
        elif variable.name_hint in names:
            continue
        functions[variable] = function
    detached = tvm.IRModule(functions, attrs=graph.attrs, global_infos=graph.global_infos)
    kernels = {kernel.symbol: kernel for kernel in called.values()}
    return detached, dict(sorted(kernels.items()))


def kernel_of(name: str, function: tirx.PrimFunc) -> Kernel:
    """A fused function as a kernel, whatever its parameters are called."""
    numbered = _number_parameters(function)
    text = numbered.script(show_meta=True)
    digest = hashlib.sha256(text.encode()).hexdigest()
    return Kernel(f"{_NUMBER.sub('', name)}_{digest[:16]}", numbered, text)


def _number_parameters(function: tirx.PrimFunc) -> tirx.PrimFunc:
    numbered = {
        parameter.__chandle__(): tirx.decl_buffer(
            parameter.shape,
            parameter.dtype,
            f"parameter{position}",
            elem_offset=parameter.elem_offset,
        )
        for position, parameter in enumerate(function.params)
        if is_buffer_var(parameter)
    }

    def replace(variable: Any) -> Any:
        return numbered.get(variable.__chandle__(), variable)

    return tvm_ffi.structural_map(function, [(tvm.ir.Var, replace)])


def _may_be_view(function: tirx.PrimFunc) -> bool:
    """Whether a function has one input and one output of the same type and size."""
    if len(function.params) != 2 or not all(map(is_buffer_var, function.params)):
        return False
    source, result = function.params
    if str(source.dtype) != str(result.dtype):
        return False
    sizes = [_elements(buffer) for buffer in function.params]
    return None in sizes or sizes[0] == sizes[1]


def _elements(buffer: Any) -> int | None:
    """How many elements a buffer has; ``None`` if that is known only at run time."""
    if not all(isinstance(dim, tirx.IntImm) for dim in buffer.shape):
        return None
    return math.prod(int(dim) for dim in buffer.shape)


def _anchor() -> tirx.PrimFunc:
    """A function that does nothing: TVM packs a graph only beside machine code of its module."""
    nothing = tirx.PrimFunc([], tirx.Evaluate(tirx.IntImm("int32", 0)))
    return nothing.with_attr("global_symbol", _ANCHOR)
