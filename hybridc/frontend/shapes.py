"""Shapes asked for on the command line, and how they are set on a model.

x=1x3x224x224     every dimension of input x
x=1x3x32..640x?   dimension 2 may be 32 to 640; dimension 3 stays as the model has it
h=32..960/32      32, 64, 96 and so on to 960
batch=4           a dynamic dimension by the name it has in the model
batch=1..8        the same with a range
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from hybridc.errors import ModelError, UsageError
from hybridc.frontend.limits import MAX_TENSOR_BYTES, tensor_bytes

_RANGE = re.compile(r"(\d+)\.\.(\d+)(?:/([1-9]\d*))?")


@dataclass(frozen=True)
class Range:
    """A dynamic dimension's lowest and highest value, and the step between its values."""

    low: int
    high: int
    step: int = 1

    def __str__(self) -> str:
        return f"{self.low}..{self.high}" + (f"/{self.step}" if self.step > 1 else "")


Request = int | Range | None
"""One dimension asked for; ``None`` leaves it as it is."""


def parse_shapes(options: Sequence[str]) -> dict[str, tuple[Request, ...]]:
    """``--shape`` options as requests by name of an input or of a dimension.

    Raises:
        UsageError: An option cannot be read, or one name is given twice.
    """
    requests: dict[str, tuple[Request, ...]] = {}
    for option in options:
        name, separator, text = option.rpartition("=")
        if not separator or not name:
            raise UsageError(f"--shape {option!r} is not of the form NAME=DIMENSIONS")
        if name in requests:
            raise UsageError(f"--shape names {name!r} twice")
        requests[name] = tuple(_parse_dim(part, option) for part in text.split("x"))
    return requests


def _parse_dim(text: str, option: str) -> Request:
    if text == "?":
        return None
    if text.isdecimal():
        return int(text)
    match = _RANGE.fullmatch(text)
    if match is None or int(match[1]) > int(match[2]):
        raise UsageError(
            f"--shape {option!r}: {text!r} is neither a number, nor a range such as 1..8 or "
            "32..960/32, nor ?"
        )
    wanted = Range(int(match[1]), int(match[2]), int(match[3] or 1))
    if (wanted.high - wanted.low) % wanted.step:
        raise UsageError(
            f"--shape {option!r}: no number of steps leads from one end of {text} to the other"
        )
    return wanted


def specialize(model: ir.Model, requests: Mapping[str, tuple[Request, ...]]) -> dict[str, Range]:
    """Set the shapes asked for on the model's inputs.

    Returns:
        The range of each dimension that stays dynamic, by name.

    Raises:
        UsageError: A request names nothing or contradicts the model, or a dimension stays
            without a value.
        ModelError: An input is larger than any memory.
    """
    inputs = {str(value.name): value for value in model_inputs(model) if _is_tensor(value)}
    _name_dimensions(inputs)
    dimensions = {dim for value in inputs.values() for dim in _dynamic(value)}
    values: dict[str, int | Range] = {}
    for name, request in requests.items():
        if name in inputs:
            _bind_input(inputs[name], request, values)
        elif name in dimensions:
            _bind(name, _single(name, request), values)
        else:
            raise UsageError(_unknown(name, inputs, dimensions))
    unbound = [name for name in inputs if any(dim not in values for dim in _dynamic(inputs[name]))]
    if unbound:
        raise UsageError(_unbound(unbound, inputs, values))
    _apply(inputs, values)
    for value in inputs.values():
        _check_size(value, values)
    return {name: value for name, value in values.items() if isinstance(value, Range)}


def _check_size(value: ir.Value, values: Mapping[str, int | Range]) -> None:
    """Refuse an input that no memory can hold, at its largest."""
    dims = []
    for dim in value.shape or ():
        size = dim if isinstance(dim, int) else values[str(dim.value)]
        dims.append(size.high if isinstance(size, Range) else size)
    if value.dtype is not None and tensor_bytes(dims, value.dtype) > MAX_TENSOR_BYTES:
        raise ModelError(f"input {value.name!r} of shape {dims} is larger than any memory")


def model_inputs(model: ir.Model) -> list[ir.Value]:
    """Inputs that a caller must give: those that are not initializers too."""
    return [value for value in model.graph.inputs if value.name not in model.graph.initializers]


def _is_tensor(value: ir.Value) -> bool:
    """Whether a value has dimensions: sequences, maps and optionals have none."""
    return isinstance(value.type, ir.TensorType)


def _name_dimensions(inputs: Mapping[str, ir.Value]) -> None:
    """Give each dimension without a usable name one of its own."""
    for name, value in inputs.items():
        if value.shape is None:
            raise UsageError(f"input {name!r} has no shape in the model; it cannot be compiled")
        dims = list(value.shape)
        for axis, dim in enumerate(dims):
            known = isinstance(dim, int)  # a zero is a size like any other
            named = isinstance(dim, ir.SymbolicDim) and dim.value not in (None, "", "?")
            if not known and not named:
                dims[axis] = ir.SymbolicDim(f"{name}_{axis}")
        value.shape = ir.Shape(dims)


def _dynamic(value: ir.Value) -> list[str]:
    assert value.shape is not None
    return [str(dim.value) for dim in value.shape if isinstance(dim, ir.SymbolicDim)]


def _bind_input(
    value: ir.Value, request: tuple[Request, ...], values: dict[str, int | Range]
) -> None:
    assert value.shape is not None
    if len(request) != len(value.shape):
        raise UsageError(
            f"--shape gives input {value.name!r} {len(request)} dimensions and it has "
            f"{len(value.shape)}: {_text(value)}"
        )
    for dim, wanted in zip(value.shape, request, strict=True):
        if wanted is None:
            continue
        if isinstance(dim, ir.SymbolicDim):
            _bind(str(dim.value), wanted, values)
        elif dim != wanted:
            raise UsageError(
                f"--shape gives input {value.name!r} a dimension of {wanted} where the "
                f"model has {dim}: {_text(value)}"
            )


def _bind(name: str, wanted: int | Range, values: dict[str, int | Range]) -> None:
    if values.setdefault(name, wanted) != wanted:
        raise UsageError(f"--shape gives dimension {name!r} both {values[name]} and {wanted}")


def _single(name: str, request: tuple[Request, ...]) -> int | Range:
    if len(request) != 1 or request[0] is None:
        raise UsageError(f"--shape {name}=... names a dimension and takes one number or range")
    return request[0]


def _apply(inputs: Mapping[str, ir.Value], values: Mapping[str, int | Range]) -> None:
    for value in inputs.values():
        assert value.shape is not None
        value.shape = ir.Shape([_bound(dim, values) for dim in value.shape])


def _bound(dim: int | ir.SymbolicDim, values: Mapping[str, int | Range]) -> int | ir.SymbolicDim:
    """A dimension with its value put in; one with a range stays symbolic."""
    if isinstance(dim, int):
        return dim
    value = values[str(dim.value)]
    return value if isinstance(value, int) else dim


def _text(value: ir.Value) -> str:
    assert value.shape is not None
    dims = [str(dim.value) if isinstance(dim, ir.SymbolicDim) else str(dim) for dim in value.shape]
    return f"{value.name}={'x'.join(dims)}"


def _unknown(name: str, inputs: Mapping[str, ir.Value], dimensions: set[str]) -> str:
    known = ", ".join(_text(value) for value in inputs.values())
    names = f"; its dynamic dimensions are {', '.join(sorted(dimensions))}" if dimensions else ""
    return f"--shape names {name!r}, which the model has not; its inputs are {known}{names}"


def _unbound(
    unbound: Sequence[str], inputs: Mapping[str, ir.Value], values: Mapping[str, int | Range]
) -> str:
    shapes = ", ".join(_text(inputs[name]) for name in unbound)
    example = inputs[unbound[0]]
    assert example.shape is not None
    dims = [
        str(values.get(str(dim.value), 1) if isinstance(dim, ir.SymbolicDim) else dim)
        for dim in example.shape
    ]
    return (
        f"the model has dynamic dimensions without a value: {shapes}; give them with --shape, for "
        f"example --shape {example.name}={'x'.join(dims)}"
    )
