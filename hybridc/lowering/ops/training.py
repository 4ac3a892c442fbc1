"""Optimizers of the domain ai.onnx.preview.training: one step for any number of tensors.

Inputs are the learning rate, the number of steps before this one, then the tensors, their
gradients, and one or two running averages of each; results are new tensors and new averages. What
depends on the step alone is a few numbers, computed in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tvm import tirx

from hybridc.lowering.call import Call, Converter, Operator, Unsupported
from hybridc.lowering.ops.common import map_elements, number, reshape
from hybridc.lowering.value import Value

DOMAIN = "ai.onnx.preview.training"

Options = Mapping[str, float]
"""The float attributes of a node."""


@dataclass(frozen=True)
class _Optimizer:
    """An optimizer's formulas and what a node must or may give.

    Attributes:
        numbers: ``(options, rate, times)``, both float64, to the numbers of the step.
        step: ``(options, numbers, tensor, gradient, *averages)`` to the new tensor and averages.
        averages: How many running averages each tensor has.
        defaults: Names of float attributes with their defaults; ``None`` for those required.
    """

    numbers: Callable[[Options, Any, Any], list[Any]]
    step: Callable[..., list[Any]]
    averages: int
    defaults: Mapping[str, float | None]


def _converter(how: _Optimizer) -> Converter:
    def convert(call: Call) -> tuple[Value, ...]:
        options = {name: _option(call, name, value) for name, value in how.defaults.items()}
        numbers = _numbers(call, how, options)
        kinds = 2 + how.averages
        several, rest = divmod(len(call.inputs) - 2, kinds)
        if rest or not several:
            raise Unsupported(f"{call.node.op_type} with {len(call.inputs)} inputs")
        groups = [
            [call.value(2 + several * kind + i) for kind in range(kinds)] for i in range(several)
        ]
        updated = [_updated(call, how, options, numbers, group) for group in groups]
        return tuple(result for kind in zip(*updated, strict=True) for result in kind)

    return convert


def _option(call: Call, name: str, default: float | None) -> float:
    value = call.attribute(name, default)
    if value is None:
        raise Unsupported(f"{call.node.op_type} without {name}")
    return float(value)


def _numbers(call: Call, how: _Optimizer, options: Options) -> list[Value]:
    """The numbers of the step as scalars."""
    rate, times = (reshape(call, call.value(index), ()) for index in (0, 1))

    def one(which: int) -> Value:
        def element(r: Any, t: Any) -> Any:
            return how.numbers(options, r.astype("float64"), t.astype("float64"))[which]

        return map_elements(call, element, rate, times, dtype="float64", name="step_number")

    zero = tirx.const(0.0, "float64")
    return [one(which) for which in range(len(how.numbers(options, zero, zero)))]


def _updated(
    call: Call, how: _Optimizer, options: Options, numbers: Sequence[Value], group: Sequence[Value]
) -> list[Value]:
    """A tensor and its averages after the step, one kernel each."""

    def result(which: int) -> Value:
        def element(*items: Any) -> Any:
            scalars, (x, *others) = items[: len(numbers)], items[len(numbers) :]
            like = [scalar.astype(x.ty.dtype) for scalar in scalars]
            return how.step(options, like, x, *others)[which]

        return map_elements(call, element, *numbers, *group, name=call.node.op_type.lower())

    return [result(which) for which in range(1 + how.averages)]


def _regularized(options: Options, x: Any, g: Any) -> Any:
    return number(options["norm_coefficient"], x) * x + g


def _momentum_numbers(options: Options, r: Any, t: Any) -> list[Any]:
    beta = tirx.const(options["beta"], "float64")
    return [r, tirx.Select(t > number(0, t), beta, number(1, t))]


def _momentum(options: Options, numbers: Sequence[Any], x: Any, g: Any, v: Any) -> list[Any]:
    rate, beta = numbers
    moved = number(options["alpha"], x) * v + beta * _regularized(options, x, g)
    return [x - rate * moved, moved]


def _nesterov(options: Options, numbers: Sequence[Any], x: Any, g: Any, v: Any) -> list[Any]:
    _, moved = _momentum(options, numbers, x, g, v)
    direction = _regularized(options, x, g) + number(options["alpha"], x) * moved
    return [x - numbers[0] * direction, moved]


def _adagrad_numbers(options: Options, r: Any, t: Any) -> list[Any]:
    return [r / (number(1, t) + t * number(options["decay_factor"], t))]


def _adagrad(options: Options, numbers: Sequence[Any], x: Any, g: Any, h: Any) -> list[Any]:
    gradient = _regularized(options, x, g)
    squares = h + gradient * gradient
    root = tirx.sqrt(squares) + number(options["epsilon"], x)
    return [x - numbers[0] * gradient / root, squares]


def _adam_numbers(options: Options, r: Any, t: Any) -> list[Any]:
    one = number(1, t)
    first, second = (one - tirx.power(number(options[n], t), t) for n in ("alpha", "beta"))
    started = t > number(0, t)
    # The first step has no average to correct; its divisor would be zero.
    return [tirx.Select(started, r * tirx.sqrt(second) / tirx.Select(started, first, one), r)]


def _adam(options: Options, numbers: Sequence[Any], x: Any, g: Any, v: Any, h: Any) -> list[Any]:
    alpha, beta = options["alpha"], options["beta"]
    gradient = _regularized(options, x, g)
    mean = number(alpha, x) * v + number(1 - alpha, x) * gradient
    squares = number(beta, x) * h + number(1 - beta, x) * (gradient * gradient)
    root = tirx.sqrt(squares) + number(options["epsilon"], x)
    moved = x - numbers[0] * (mean / root)
    return [number(1 - options["norm_coefficient_post"], x) * moved, mean, squares]


_MOMENTUM = dict.fromkeys(("norm_coefficient", "alpha", "beta"))
_OPTIMIZERS = {
    "standard": _Optimizer(_momentum_numbers, _momentum, 1, _MOMENTUM),
    "nesterov": _Optimizer(_momentum_numbers, _nesterov, 1, _MOMENTUM),
    "Adagrad": _Optimizer(
        *(_adagrad_numbers, _adagrad, 1),
        {"norm_coefficient": 0.0, "decay_factor": 0.0, "epsilon": 1e-6},
    ),
    "Adam": _Optimizer(
        *(_adam_numbers, _adam, 2),
        {
            "norm_coefficient": 0.0,
            "norm_coefficient_post": 0.0,
            "alpha": 0.9,
            "beta": 0.999,
            "epsilon": 1e-6,
        },
    ),
}


def momentum(call: Call) -> Value | tuple[Value, ...]:
    """Gradient descent with momentum, the standard one or Nesterov's."""
    mode = str(call.attribute("mode"))
    if mode not in ("standard", "nesterov"):
        raise Unsupported(f"Momentum with mode {mode!r}")
    return _converter(_OPTIMIZERS[mode])(call)


OPERATORS: tuple[Operator, ...] = (
    Operator("Momentum", momentum, domain=DOMAIN),
    Operator("Adagrad", _converter(_OPTIMIZERS["Adagrad"]), domain=DOMAIN),
    Operator("Adam", _converter(_OPTIMIZERS["Adam"]), domain=DOMAIN),
)
