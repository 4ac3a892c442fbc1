"""Scratch memory of a function becomes one more output of it, which is planned like other tensors.

    f(in, out) { scratch = alloc; ... }              f(in, out, scratch) { ... }
    out      = call_tir(f, in)                       (out, _) = call_tir(f, in)

TVM would take such memory from a pool of the calling thread in every call, so it would be missing
from the memory that is planned, and would not be shared with tensors that are not in use then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tvm
from tvm import relax, tirx
from tvm.ir import Op
from tvm.relax.expr_functor import PyExprMutator, mutator


def give_scratch(
    module: tvm.IRModule, lifted: Mapping[Any, tuple[tirx.PrimFunc, Sequence[Any]]]
) -> tvm.IRModule:
    """The module with some functions replaced by ones that take scratch buffers, and their calls.

    Args:
        module: Functions, and the graph that calls them.
        lifted: By variable, functions with more parameters, and the buffers that these are.
    """
    return _Lifter(module, lifted).lifted_module() if lifted else module


def with_parameters(function: tirx.PrimFunc, buffers: Sequence[Any], body: Any) -> tirx.PrimFunc:
    """The function with another body, and buffers as parameters behind its tensors."""
    tensors = [parameter for parameter in function.params if isinstance(parameter, tirx.Buffer)]
    sizes = [parameter for parameter in function.params if not isinstance(parameter, tirx.Buffer)]
    parameters = [*tensors, *buffers, *sizes]
    return tirx.PrimFunc(parameters, body, function.ret_type, function.attrs)


@mutator
class _Lifter(PyExprMutator):  # type: ignore[misc]
    """Rewrites the calls of functions that have got more outputs."""

    def __init__(
        self, module: tvm.IRModule, lifted: Mapping[Any, tuple[tirx.PrimFunc, Sequence[Any]]]
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
