"""Sizes that are known only when the model runs: what is known of them at compile time.

Lowering leaves the range of every dynamic dimension with ``main``. :func:`note_ranges` brings them
to the kernels, whose variables are their own. A kernel whose loops depend on such sizes is planned
for typical ones and is right for all.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import tvm
import tvm_ffi
from tvm import relax, tirx
from tvm.tirx.buffer import is_buffer_var

from hybridc.lowering.steps import RANGES

UNLIMITED = 10**6
"""Sizes from which on a highest value says nothing about typical ones."""

TYPICAL = 64
"""What is typical where nothing is known."""

_ARITHMETIC = (
    tirx.Add, tirx.Sub, tirx.Mul, tirx.FloorDiv, tirx.FloorMod, tirx.Div, tirx.Mod, tirx.Min,
    tirx.Max,
)  # fmt: skip

Bounds = Mapping[str, tuple[int, int]]


def ranges_of(function: Any) -> dict[str, tuple[int, int]]:
    """What is known of the variables in a function's shapes, by name."""
    attributes = function.attrs
    if attributes is None or RANGES not in attributes:
        return {}
    return {str(k): (int(v[0]), int(v[1])) for k, v in attributes[RANGES].items()}


def with_ranges(function: Any, ranges: Bounds) -> Any:
    """A function with that knowledge."""
    known = {name: [tirx.IntImm("int64", bound) for bound in ranges[name]] for name in ranges}
    return function.with_attr(RANGES, known)


def typical(low: int, high: int) -> int:
    """A size for which to plan: the geometric mean of a range."""
    if high >= UNLIMITED:
        return max(low, TYPICAL)
    return math.isqrt(max(low, 1) * high)


def bounds_of(size: Any, ranges: Bounds) -> tuple[int, int]:
    """Lowest and highest value of a size, from what is known of its variables."""
    analyzer = tvm.sym.Analyzer()
    for variable in tirx.analysis.undefined_vars(size):
        low, high = ranges.get(variable.name, (0, UNLIMITED))
        analyzer.bind(variable, tvm.ir.Range(low, high + 1))
    bound = analyzer.const_int_bound(size)
    return max(int(bound.min_value), 0), min(int(bound.max_value), UNLIMITED)


def typical_size(size: Any, ranges: Bounds) -> int:
    """What a size is where its variables are typical, and one at least."""
    if isinstance(size, int | tirx.IntImm):
        return int(size)

    def value(variable: Any) -> Any:
        low, high = ranges.get(variable.name, (0, UNLIMITED))
        return tirx.IntImm(variable.ty.dtype, typical(low, high))

    fixed = tvm_ffi.structural_map(size, (tirx.Var, value))
    return max(int(tvm.sym.Analyzer().simplify(fixed)), 1)


def note_ranges(module: tvm.IRModule) -> tvm.IRModule:
    """The module in which kernels know the ranges of their variables, as ``main`` does."""
    known: dict[Any, dict[str, tuple[int, int]]] = {}
    callers = [f for f in module.functions.values() if isinstance(f, relax.Function)]
    for caller in callers:
        calls = list(_calls(caller))
        ranges = _certain_ranges(caller, calls)
        for kernel, arguments in calls:
            found = known.setdefault(kernel, {})
            for own, size in _pairs(module[kernel].params, arguments):
                low, high = bounds_of(size, ranges)
                before = found.get(own.name, (low, high))
                found[own.name] = (min(low, before[0]), max(high, before[1]))
    functions = {
        variable: with_ranges(function, known[variable]) if known.get(variable) else function
        for variable, function in module.functions.items()
    }
    return tvm.IRModule(functions, attrs=module.attrs, global_infos=module.global_infos)


def _certain_ranges(function: relax.Function, calls: list[tuple[Any, list[Any]]]) -> Bounds:
    """Ranges of a function's variables, without names that two of them have."""
    ranges = ranges_of(function)
    values = [*function.params, *(argument for _, arguments in calls for argument in arguments)]
    variables: dict[str, set[Any]] = {}
    for value in values:
        shape = getattr(getattr(value, "ty", value), "shape", None)
        sizes = list(shape.values) if isinstance(shape, relax.ShapeExpr) else []
        sizes += [value] if _is_number(value) and value.name in ranges else []
        for size in sizes:
            for variable in tirx.analysis.undefined_vars(size):
                variables.setdefault(variable.name, set()).add(variable)
    return {name: bound for name, bound in ranges.items() if len(variables.get(name, ())) < 2}


def _is_number(value: Any) -> bool:
    """Whether a value is a variable of a number; those of tensors may have the same names."""
    return isinstance(value, tirx.Var) and isinstance(value.ty, tvm.ir.PrimType)


def _calls(main: relax.Function) -> Iterator[tuple[Any, list[Any]]]:
    """Kernels that a function calls, with what they take and the types of what they give."""
    found: list[Any] = []

    def visit(node: Any) -> None:
        if getattr(getattr(node, "op", None), "name", "") == "relax.call_tir":
            found.append(node)

    relax.analysis.post_order_visit(main, visit)
    for call in found:
        results = call.ty_args[0]
        fields = results.fields if isinstance(results, relax.TupleType) else [results]
        yield call.args[0], [*call.args[1].fields, *fields]


def _pairs(parameters: Any, arguments: list[Any]) -> Iterator[tuple[Any, Any]]:
    """Variables of a kernel, each with the size that a call gives it."""
    for parameter, argument in zip(parameters, arguments, strict=False):
        if not is_buffer_var(parameter):
            yield parameter, argument
            continue
        shape = getattr(getattr(argument, "ty", argument), "shape", None)
        if isinstance(shape, relax.ShapeExpr):
            pairs = zip(parameter.shape, shape.values, strict=True)
            yield from ((own, size) for own, size in pairs if isinstance(own, tirx.Var))


def buffers_of(function: tirx.PrimFunc) -> list[Any]:
    """The tensors that a function takes and gives."""
    return [parameter for parameter in function.params if is_buffer_var(parameter)]


def has_open_sizes(function: tirx.PrimFunc) -> bool:
    """Whether a parameter's shape is not known."""
    buffers = buffers_of(function)
    return any(not isinstance(dim, tirx.IntImm) for buffer in buffers for dim in buffer.shape)


def with_typical_sizes(function: tirx.PrimFunc) -> tirx.PrimFunc:
    """The function with typical sizes in place of variables in its shapes."""
    ranges = ranges_of(function)
    parameters = buffers_of(function)
    buffers = [*parameters, *function.body.block.alloc_buffers]
    variables = {v for b in buffers for dim in b.shape for v in tirx.analysis.undefined_vars(dim)}
    if not variables:
        return function
    replaced: dict[Any, Any] = {
        variable.__chandle__(): tirx.IntImm(variable.ty.dtype, typical_size(variable, ranges))
        for variable in variables
    }
    for buffer in buffers:
        sizes = [tirx.IntImm("int64", typical_size(dim, ranges)) for dim in buffer.shape]
        replaced[buffer.__chandle__()] = tirx.decl_buffer(sizes, buffer.dtype, buffer.name)

    def replace(variable: Any) -> Any:
        return replaced.get(variable.__chandle__(), variable)

    body = tvm_ffi.structural_map(function.body, [(tvm.ir.Var, replace)])
    body = tvm_ffi.structural_map(body, [(_ARITHMETIC, _folded)])
    return tirx.PrimFunc(list(map(replace, parameters)), body)


def _folded(value: Any) -> Any:
    """A number in place of an expression of numbers only."""
    if str(value.ty.dtype) not in ("int32", "int64") or tirx.analysis.undefined_vars(value):
        return value
    return tvm.sym.Analyzer().simplify(value)
