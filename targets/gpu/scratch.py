"""Scratch memory between the kernels of one function becomes one more output of it.

A function of several kernels passes tensors between them in memory of its own. TVM would take that
from a pool of the calling thread in every call, so it could not be part of a CUDA graph, whose
addresses stay, and would be missing from the memory that is planned.

    f(in, out) { scratch = alloc; first(in, scratch); second(scratch, out) }
    out        = call_tir(f, in)

    f(in, out, scratch) { first(in, scratch); second(scratch, out) }
    (out, _)   = call_tir(f, in)

Scratch of a size that is known only at run time stays where it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tvm
from hybridc.targets.llvm.schedules.blocks import changed
from tvm import relax, tirx
from tvm.ir import Op
from tvm.relax.expr_functor import PyExprMutator, mutator
from tvm.s_tir import SBlockRealize


def lift_scratch(module: tvm.IRModule) -> tvm.IRModule:
    """The module with the scratch of all scheduled functions planned like other tensors."""
    lifted: dict[Any, tuple[tirx.PrimFunc, list[Any]]] = {}
    for variable, function in module.functions.items():
        buffers = scratch_of(function)
        if buffers:
            lifted[variable] = (_as_outputs(function, buffers), buffers)
    if not lifted:
        return module
    return _Lifter(module, lifted).lifted_module()


def scratch_of(function: Any) -> list[Any]:
    """Buffers of known size that the kernels of a function share."""
    if not isinstance(function, tirx.PrimFunc) or not isinstance(function.body, SBlockRealize):
        return []
    return [buffer for buffer in function.body.block.alloc_buffers if _is_scratch(buffer)]


def _is_scratch(buffer: Any) -> bool:
    static = all(isinstance(dim, tirx.IntImm) for dim in buffer.shape)
    return static and buffer.scope() == "global"


def _as_outputs(function: tirx.PrimFunc, buffers: Sequence[Any]) -> tirx.PrimFunc:
    """The function with scratch buffers as parameters behind its tensors."""
    block = function.body.block
    left = [buffer for buffer in block.alloc_buffers if buffer not in buffers]
    tensors = [parameter for parameter in function.params if isinstance(parameter, tirx.Buffer)]
    sizes = [parameter for parameter in function.params if not isinstance(parameter, tirx.Buffer)]
    parameters = [*tensors, *buffers, *sizes]
    body = SBlockRealize([], True, changed(block, alloc_buffers=left))
    return tirx.PrimFunc(parameters, body, function.ret_type, function.attrs)


@mutator
class _Lifter(PyExprMutator):  # type: ignore[misc]
    """Rewrites the calls of functions that have got more outputs."""

    def __init__(
        self, module: tvm.IRModule, lifted: dict[Any, tuple[tirx.PrimFunc, list[Any]]]
    ) -> None:
        others = {v: function for v, function in module.functions.items() if v not in lifted}
        others_module = tvm.IRModule(others, attrs=module.attrs, global_infos=module.global_infos)
        super().__init__(others_module)
        self._others = others
        self._scratch = {variable: buffers for variable, (_, buffers) in lifted.items()}
        self._new = {
            variable: self.builder_.add_func(function, variable.name_hint)
            for variable, (function, _) in lifted.items()
        }

    def lifted_module(self) -> tvm.IRModule:
        """The whole module rewritten."""
        for variable, function in self._others.items():
            if isinstance(function, relax.Function):
                self.builder_.update_func(variable, self.visit_expr(function))
        return self.builder_.get()

    def visit_call_(self, call: Any) -> Any:
        """A call with the scratch as outputs, and what it gave before taken out of them."""
        call = super().visit_call_(call)
        if call.op != Op.get("relax.call_tir") or call.args[0] not in self._scratch:
            return call
        (outputs,) = call.ty_args
        single = not isinstance(outputs, relax.TupleType)
        fields = [outputs] if single else list(outputs.fields)
        scratch = [
            relax.TensorType(relax.ShapeExpr(buffer.shape), str(buffer.dtype))
            for buffer in self._scratch[call.args[0]]
        ]
        arguments = [self._new[call.args[0]], *call.args[1:]]
        everything = relax.TupleType([*fields, *scratch])
        whole = self.builder_.emit(
            relax.Call(call.op, arguments, call.attrs, [everything]), "with_scratch"
        )
        kept = [relax.TupleGetItem(whole, index) for index in range(len(fields))]
        return kept[0] if single else relax.Tuple(kept)
