"""Shape arithmetic: nodes that compute sizes are evaluated while compiling.

When every input of a node is known (a constant or :class:`Integers`) and at least one holds a
symbolic dimension, the result is computed here as expressions, element by element, and no kernel
is made. Nodes whose inputs are all constants were folded by a pass before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from tvm import tirx

from hybridc.lowering.bounds import analyzer_for
from hybridc.lowering.call import Call, as_expression
from hybridc.lowering.value import Constant, Integers, Value

MAX_ELEMENTS = 64
"""Constants longer than this are data, not sizes."""

MAX_EXPRESSION = 256
"""Parts of an expression for one size; larger ones are computed when the model runs."""


def evaluate(call: Call) -> Value | None:
    """Result of a node that only computes sizes, or ``None`` if it is not such a node."""
    if call.node.op_type == "Shape":
        return _shape(call)
    if call.node.op_type == "Size":
        return _size(call)
    rule = _RULES.get(call.node.op_type)
    if rule is None or call.node.domain or not any(isinstance(v, Integers) for v in call.inputs):
        return None
    arrays = [_as_objects(value) for value in call.inputs]
    given = [value is not None for value in call.inputs]
    if given != [array is not None for array in arrays]:
        return None
    return _as_value(rule(call, *arrays), call)


def _shape(call: Call) -> Integers:
    dims = call.shape(0)
    start, end = call.attribute("start", 0), call.attribute("end", len(dims))
    return Integers(tuple(dims[slice(start, end)]))


def _size(call: Call) -> Integers:
    return Integers((_product(list(call.shape(0))),), rank=0)


def _product(dims: list[Any]) -> Any:
    total: Any = 1
    for dim in dims:
        total = total * dim
    return total


def _as_objects(value: Value | None) -> np.ndarray[Any, Any] | None:
    """A known integer tensor as a numpy array of Python ints and expressions."""
    if isinstance(value, Integers):
        array = np.empty(len(value.elements), object)
        array[:] = value.elements
        return array.reshape(value.shape)
    if isinstance(value, Constant) and value.array.size <= MAX_ELEMENTS:
        if value.array.dtype.kind not in "iub":
            return None
        return np.array(value.array.tolist(), object)
    return None


_OPERANDS = ("a", "b", "condition", "true_value", "false_value", "value")
"""Fields of arithmetic expressions that hold expressions."""


def _is_large(element: Any) -> bool:
    """Whether an expression is so large that simplifying it would not end."""
    pending, count = [element], 0
    while pending and count <= MAX_EXPRESSION:
        item = pending.pop()
        count += 1
        pending += [getattr(item, name) for name in _OPERANDS if hasattr(item, name)]
    return count > MAX_EXPRESSION


def _as_value(result: np.ndarray[Any, Any] | None, call: Call) -> Integers | None:
    if result is None or np.ndim(result) > 1:
        return None
    if any(_is_large(element) for element in np.ravel(result)):
        return None
    elements = tuple(_simplified(element) for element in np.ravel(result))
    dtype = call.node.outputs[0].dtype
    return Integers(elements, np.ndim(result), "int64" if dtype is None else dtype.numpy().name)


def _simplified(element: Any) -> Any:
    if isinstance(element, bool | int | np.integer):
        return int(element)
    reduced = analyzer_for(element).simplify(element)
    return int(reduced) if isinstance(reduced, tirx.IntImm) else reduced


def _elementwise(function: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    apply = np.frompyfunc(function, 2, 1)
    return lambda _call, left, right: np.asarray(apply(left, right), object)


def _divide(left: Any, right: Any) -> Any:
    """ONNX integer division truncates towards zero."""
    if isinstance(left, int) and isinstance(right, int):
        quotient = abs(left) // abs(right)
        return quotient if (left < 0) == (right < 0) else -quotient
    return tirx.truncdiv(as_expression(left), as_expression(right))


def _maximum(left: Any, right: Any) -> Any:
    both = isinstance(left, int) and isinstance(right, int)
    return max(left, right) if both else tirx.max(left, right)


def _minimum(left: Any, right: Any) -> Any:
    both = isinstance(left, int) and isinstance(right, int)
    return min(left, right) if both else tirx.min(left, right)


def _equal(_call: Call, left: Any, right: Any) -> np.ndarray[Any, Any] | None:
    """Whether sizes are equal, if that is the same for all inputs."""
    differences = [_simplified(d) for d in np.ravel(np.asarray(left - right, object))]
    if not all(isinstance(difference, int) for difference in differences):
        return None
    results = np.array([int(difference == 0) for difference in differences], object)
    shaped: np.ndarray[Any, Any] = results.reshape(np.shape(left - right))
    return shaped


def _cast(call: Call, data: np.ndarray[Any, Any]) -> np.ndarray[Any, Any] | None:
    dtype = call.node.outputs[0].dtype
    return data if dtype is not None and dtype.numpy().kind in "iu" else None


def _gather(call: Call, data: Any, indices: Any) -> Any:
    return np.take(data, indices.astype(np.int64), axis=call.attribute("axis", 0))


def _concat(_call: Call, *parts: Any) -> Any:
    return np.concatenate(parts)


def _unsqueeze(_call: Call, data: Any, *_axes: Any) -> Any:
    return np.reshape(data, (-1,)) if data.ndim == 0 else None


def _squeeze(_call: Call, data: Any, *_axes: Any) -> Any:
    return data.reshape(()) if data.size == 1 else data


def _reshape(_call: Call, data: Any, shape: Any) -> Any:
    target = [int(dim) for dim in shape]
    return data.reshape(target) if len(target) <= 1 else None


def _slice(call: Call, data: Any, *bounds: Any) -> Any:
    if not bounds:
        starts, ends, steps = call.attribute("starts"), call.attribute("ends"), [1]
    else:
        starts, ends = bounds[0], bounds[1]
        steps = bounds[3] if len(bounds) > 3 else [1]
    return data[int(starts[0]) : int(ends[0]) : int(steps[0])]


_RULES: dict[str, Callable[..., Any]] = {
    "Add": _elementwise(lambda left, right: left + right),
    "Sub": _elementwise(lambda left, right: left - right),
    "Mul": _elementwise(lambda left, right: left * right),
    "Div": _elementwise(_divide),
    "Max": _elementwise(_maximum),
    "Min": _elementwise(_minimum),
    "Cast": _cast,
    "Equal": _equal,
    "Concat": _concat,
    "Gather": _gather,
    "Identity": lambda _call, data: data,
    "Reshape": _reshape,
    "Slice": _slice,
    "Squeeze": _squeeze,
    "Unsqueeze": _unsqueeze,
}
