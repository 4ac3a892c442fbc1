"""Activations and elementary functions of one input, as scalar functions."""

from __future__ import annotations

from collections.abc import Callable
from math import pi, sqrt
from typing import Any

from tvm import relax, tirx

from hybridc.lowering.call import Call, Converter, Operator, Unsupported
from hybridc.lowering.ops.common import (
    HALF_TYPES,
    broadcast_shape,
    element_type,
    map_elements,
    number,
    same_dim,
)
from hybridc.lowering.value import Expression

ScalarFunction = Callable[..., Any]


def function_of(function: ScalarFunction, name: str, **defaults: float) -> Converter:
    """Converter for a scalar function of the input and of float attributes with defaults.

    Half-precision elements are computed in float32: TVM has not every function in float16.
    """

    def convert(call: Call) -> Expression:
        dtype = call.dtype(0)
        work = "float32" if dtype in HALF_TYPES else dtype
        options = {
            key: tirx.const(float(call.attribute(key, value)), work)
            for key, value in defaults.items()
        }
        return map_elements(
            call,
            lambda x: function(x.astype(work), **options),
            call.value(0),
            dtype=dtype,
            name=name,
        )

    return convert


def tanh(x: Any) -> Any:
    """Hyperbolic tangent of a ``tirx`` expression, exact to the last digits near zero too.

    LLVM's is a difference of exponentials in float32, which cancels there; three terms of the
    series do not, and up to 0.1 the fourth is below half a unit in the last place.
    """
    if element_type(x) != "float32":
        return tirx.tanh(x)
    square = x * x
    series = x * (number(1, x) + square * (number(-1 / 3, x) + square * number(2 / 15, x)))
    return tirx.Select(tirx.abs(x) < number(0.1, x), series, tirx.tanh(x))


def sinh(x: Any) -> Any:
    """Hyperbolic sine of a ``tirx`` expression, right to the last digits wherever it is finite."""
    one, square = number(1, x), x * x
    series = one
    for n in range(19, 1, -2):  # up to one, what is left out is below half a unit of float64
        series = one + series * square * number(1 / (n * (n - 1)), x)
    half = _half_exponential(x)
    size = half - number(0.25, x) / half
    return tirx.Select(tirx.abs(x) < one, x * series, tirx.Select(x < number(0, x), -size, size))


def cosh(x: Any) -> Any:
    """Hyperbolic cosine of a ``tirx`` expression, right to the last digits."""
    half = _half_exponential(x)
    return half + number(0.25, x) / half


def _half_exponential(x: Any) -> Any:
    # exp(|x|) itself overflows where half of it is still finite.
    root = tirx.exp(tirx.abs(x) * number(0.5, x))
    return root * number(0.5, x) * root


def _atanh(x: Any) -> Any:
    # The logarithm cancels near zero; up to a quarter these terms are exact for float64.
    one, square, series = number(1, x), x * x, number(1 / 27, x)
    for n in range(25, 0, -2):
        series = number(1 / n, x) + series * square
    logarithm = number(0.5, x) * tirx.log((one + x) / (one - x))
    return tirx.Select(tirx.abs(x) < number(0.25, x), x * series, logarithm)


def _softplus(x: Any) -> Any:
    # exp of a large argument overflows, exp(-|x|) never does.
    return tirx.max(x, number(0, x)) + tirx.log(number(1, x) + tirx.exp(-tirx.abs(x)))


def _hard_sigmoid(x: Any, alpha: Any, beta: Any) -> Any:
    return tirx.max(number(0, x), tirx.min(number(1, x), alpha * x + beta))


def _hard_swish(x: Any) -> Any:
    return x * _hard_sigmoid(x, number(1 / 6, x), number(0.5, x))


def _leaky_relu(x: Any, alpha: Any) -> Any:
    return tirx.Select(x < number(0, x), alpha * x, x)


def _elu(x: Any, alpha: Any) -> Any:
    return tirx.Select(x < number(0, x), alpha * (tirx.exp(x) - number(1, x)), x)


def _selu(x: Any, alpha: Any, gamma: Any) -> Any:
    return gamma * _elu(x, alpha)


def _celu(x: Any, alpha: Any) -> Any:
    return tirx.Select(x < number(0, x), alpha * (tirx.exp(x / alpha) - number(1, x)), x)


def _shrink(x: Any, bias: Any, lambd: Any) -> Any:
    return tirx.Select(x < -lambd, x + bias, tirx.Select(x > lambd, x - bias, number(0, x)))


def _gelu_erf(x: Any) -> Any:
    return number(0.5, x) * x * (number(1, x) + tirx.erf(x * number(sqrt(0.5), x)))


def _gelu_tanh(x: Any) -> Any:
    inner = number(sqrt(2 / pi), x) * (x + number(0.044715, x) * x * x * x)
    return number(0.5, x) * x * (number(1, x) + tanh(inner))


def gelu(call: Call) -> Expression:
    """Gelu, exact or by the tanh approximation that the model asks for."""
    approximate = call.attribute("approximate", "none")
    if approximate not in ("none", "tanh"):
        raise Unsupported(f"Gelu with approximate={approximate!r}")
    function = _gelu_erf if approximate == "none" else _gelu_tanh
    return function_of(function, "gelu")(call)


def relu(call: Call) -> Expression:
    """The larger of zero and the input."""
    return call.emit(relax.op.nn.relu(call.tensor(0)))


def parametric_relu(call: Call) -> Expression:
    """Relu with a slope for negative inputs that broadcasts to the input's shape."""
    result = broadcast_shape(call.shape(0), call.shape(1))
    data = call.shape(0)
    if len(result) != len(data) or not all(map(same_dim, result, data)):
        raise Unsupported("PRelu's slope must broadcast to the shape of the data")

    def function(x: Any, slope: Any) -> Any:
        return tirx.Select(x < number(0, x), slope * x, x)

    return map_elements(call, function, call.value(0), call.value(1), name="prelu")


ACTIVATIONS: tuple[Operator, ...] = (
    Operator("Relu", relu),
    Operator("PRelu", parametric_relu),
    Operator("Gelu", gelu),
    Operator("LeakyRelu", function_of(_leaky_relu, "leaky_relu", alpha=0.01)),
    Operator("Elu", function_of(_elu, "elu", alpha=1.0)),
    Operator(
        "Selu", function_of(_selu, "selu", alpha=1.6732632423543772, gamma=1.0507009873554805)
    ),
    Operator("Celu", function_of(_celu, "celu", alpha=1.0)),
    Operator(
        "ThresholdedRelu",
        function_of(
            lambda x, alpha: tirx.Select(x > alpha, x, number(0, x)), "thresholded_relu", alpha=1.0
        ),
    ),
    Operator("Shrink", function_of(_shrink, "shrink", bias=0.0, lambd=0.5)),
    Operator("HardSigmoid", function_of(_hard_sigmoid, "hard_sigmoid", alpha=0.2, beta=0.5)),
    Operator("HardSwish", function_of(_hard_swish, "hard_swish")),
    Operator("Sigmoid", function_of(tirx.sigmoid, "sigmoid")),
    Operator(
        "Swish", function_of(lambda x, alpha: x * tirx.sigmoid(alpha * x), "swish", alpha=1.0)
    ),
    Operator("Softplus", function_of(_softplus, "softplus")),
    Operator("Softsign", function_of(lambda x: x / (number(1, x) + tirx.abs(x)), "softsign")),
    Operator("Mish", function_of(lambda x: x * tanh(_softplus(x)), "mish")),
    Operator("Tanh", function_of(tanh, "tanh")),
    Operator("Erf", function_of(tirx.erf, "erf")),
    Operator("Exp", function_of(tirx.exp, "exp")),
    Operator("Log", function_of(tirx.log, "log")),
    Operator("Sqrt", function_of(tirx.sqrt, "sqrt")),
    Operator("Reciprocal", function_of(lambda x: number(1, x) / x, "reciprocal")),
    Operator("Sin", function_of(tirx.sin, "sin")),
    Operator("Cos", function_of(tirx.cos, "cos")),
    Operator("Tan", function_of(tirx.tan, "tan")),
    Operator("Asin", function_of(tirx.asin, "asin")),
    Operator("Acos", function_of(tirx.acos, "acos")),
    Operator("Atan", function_of(tirx.atan, "atan")),
    Operator("Sinh", function_of(sinh, "sinh")),
    Operator("Cosh", function_of(cosh, "cosh")),
    Operator("Asinh", function_of(tirx.asinh, "asinh")),
    Operator("Acosh", function_of(tirx.acosh, "acosh")),
    Operator("Atanh", function_of(_atanh, "atanh")),
)
