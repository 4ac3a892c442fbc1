"""Inputs that are always the same: bound to a value at compile time, and no inputs any more.

sr=16000        a scalar, or all elements of the input alike
axes=[0,2]      a list, as JSON
table=@t.npy    the contents of a file
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from hybridc.errors import UsageError
from hybridc.frontend.shapes import model_inputs

Array = np.ndarray[Any, Any]


def parse_bindings(options: Sequence[str]) -> dict[str, Array]:
    """``--bind`` options as arrays by input name.

    Raises:
        UsageError: An option cannot be read, or one name is given twice.
    """
    bindings: dict[str, Array] = {}
    for option in options:
        name, separator, text = option.partition("=")
        if not separator or not name:
            raise UsageError(f"--bind {option!r} is not of the form INPUT=VALUE")
        if name in bindings:
            raise UsageError(f"--bind names {name!r} twice")
        bindings[name] = _parse_value(text, option)
    return bindings


def _parse_value(text: str, option: str) -> Array:
    try:
        if text.startswith("@"):
            return np.asarray(np.load(Path(text[1:]), allow_pickle=False))
        return np.asarray(json.loads(text))
    except (OSError, ValueError) as error:
        raise UsageError(
            f"--bind {option!r}: {text!r} is neither a number, nor a list such as [0,1], nor "
            "@FILE.npy"
        ) from error


def bind_inputs(model: ir.Model, bindings: Mapping[str, Array]) -> dict[str, Array]:
    """Turn inputs into initializers.

    Returns:
        The values by name, of the inputs' types.

    Raises:
        UsageError: A name is no input, or a value does not fit the input's type or shape.
    """
    inputs = {str(value.name): value for value in model_inputs(model)}
    bound = {}
    for name, array in bindings.items():
        if name not in inputs:
            raise UsageError(f"--bind names {name!r}; the model's inputs are {', '.join(inputs)}")
        value = inputs[name]
        bound[name] = _fitted(value, array)
        value.const_value = ir.tensor(bound[name], name=name)
        value.shape = ir.Shape(bound[name].shape)
        model.graph.inputs.remove(value)
        model.graph.register_initializer(value)
    return bound


def _fitted(value: ir.Value, array: Array) -> Array:
    """An array as the input's element type and rank; a scalar fills a shape that is known."""
    if value.dtype is None or value.dtype == ir.DataType.STRING:
        raise UsageError(f"--bind {value.name}: the input is not a tensor of numbers")
    dtype = value.dtype.numpy()
    with np.errstate(all="ignore"):  # what does not fit is told below
        converted = array.astype(dtype)
    if not _keeps(array, converted):
        raise UsageError(f"--bind {value.name}: {array.tolist()} does not fit {dtype.name}")
    dims = [] if value.shape is None else list(value.shape)
    if converted.ndim == 0 and all(isinstance(dim, int) for dim in dims):
        return np.full([dim for dim in dims if isinstance(dim, int)], converted)
    known = zip(converted.shape, dims, strict=False)
    fits = len(dims) == converted.ndim and all(d == s for s, d in known if isinstance(d, int))
    if value.shape is not None and not fits:
        raise UsageError(f"--bind {value.name}: shape {list(converted.shape)} does not fit {dims}")
    return converted


def _keeps(array: Array, converted: Array) -> bool:
    """Whether a conversion kept the values; floats may be rounded, but not to infinity."""
    if converted.dtype.kind in "iub":
        return np.array_equal(converted.astype(array.dtype), array)
    return np.array_equal(np.isfinite(converted.astype(np.float64)), np.isfinite(array))
