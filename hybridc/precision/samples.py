"""Inputs for calibration and for checks: from a folder of files, or from a Python function.

    --calibration samples/            a folder of npz files, or npy files for a model of one input
    --calibration module:function     called without arguments, it gives or yields dicts of arrays

Samples are read one at a time, each time they are needed, so a folder may be larger than memory. A
function is called once for each pass over the samples and must give the same ones.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from hybridc.bundle.manifest import TensorSpec
from hybridc.bundle.tensors import Array
from hybridc.errors import UsageError
from hybridc.frontend.shapes import Range, model_inputs
from hybridc.runtime.arrays import read_arrays

FEW = 500
"""Samples below which quantization is warned about."""

HELD_OUT = 5
"""One sample in so many is held out from calibration, to check the result with."""

Sample = Mapping[str, Array]


@dataclass(frozen=True)
class Samples:
    """Samples in order, read when they are asked for.

    Attributes:
        name: What they are called in messages.
        read: Reads all of them anew.
        count: How many there are.
    """

    name: str
    read: Callable[[], Iterator[Sample]]
    count: int

    def __iter__(self) -> Iterator[Sample]:
        return self.read()

    def part(self, held_out: bool) -> Samples:
        """Every fifth sample from the last one back, or all the others."""
        last = self.count - 1

        def chosen(index: int) -> bool:
            return ((last - index) % HELD_OUT == 0) == held_out

        def read() -> Iterator[Sample]:
            return (sample for index, sample in enumerate(self.read()) if chosen(index))

        return Samples(self.name, read, sum(map(chosen, range(self.count))))


def load_samples(data: str, inputs: Sequence[TensorSpec], dims: Mapping[str, Range]) -> Samples:
    """Find samples and check every one of them.

    Args:
        data: A folder, or ``module:function``.
        inputs: The inputs that a sample must have.
        dims: Range of each dynamic dimension.

    Raises:
        UsageError: There are none, or one does not fit the inputs, holds numbers that are not
            finite, or all of them hold one number only.
    """
    read = _reader(data, inputs)
    count, spread = 0, dict.fromkeys((spec.name for spec in inputs if _is_float(spec)), False)
    first: dict[str, Any] = {}
    for sample in read():
        check_sample(sample, inputs, dims, f"sample {count} of {data}")
        for name in spread:
            array = sample[name]
            value = first.setdefault(name, array.reshape(-1)[0])
            spread[name] = spread[name] or bool(np.any(array != value))
        count += 1
    if not count:
        raise UsageError(f"{data} holds no samples; give a folder with npz or npy files")
    for name, varies in spread.items():
        if not varies:
            raise UsageError(
                f"input {name!r} is {first[name]:g} everywhere in the samples of {data}, from "
                "which no range can be told; give real inputs"
            )
    return Samples(data, read, count)


def specs_of(model: ir.Model) -> tuple[TensorSpec, ...]:
    """The inputs of a model whose shapes were set.

    Raises:
        UsageError: One is no tensor of numbers.
    """
    specs = []
    for value in model_inputs(model):
        if value.dtype is None or value.shape is None or value.dtype == ir.DataType.STRING:
            raise UsageError(f"input {value.name!r} is no tensor of numbers of a known rank")
        dims = tuple(dim if isinstance(dim, int) else str(dim.value) for dim in value.shape)
        specs.append(TensorSpec(str(value.name), value.dtype.numpy().name, dims))
    return tuple(specs)


def check_sample(
    sample: Any, inputs: Sequence[TensorSpec], dims: Mapping[str, Range], where: str
) -> None:
    """Refuse a sample that does not fit a model's inputs.

    Raises:
        UsageError: What does not fit, and what was expected.
    """
    names = ", ".join(spec.name for spec in inputs)
    if not isinstance(sample, Mapping):
        raise UsageError(f"{where} is a {type(sample).__name__} and not arrays by name: {names}")
    for name in sample:
        if name not in {spec.name for spec in inputs}:
            raise UsageError(f"{where} has {name!r}, which is no input; the model takes {names}")
    sizes: dict[str, int] = {}
    for spec in inputs:
        if spec.name not in sample:
            raise UsageError(f"{where} lacks the input {spec.name!r}; the model takes {names}")
        _check_array(sample[spec.name], spec, dims, sizes, f"{where}: input {spec.name!r}")


def _check_array(
    array: Any, spec: TensorSpec, dims: Mapping[str, Range], sizes: dict[str, int], where: str
) -> None:
    if not isinstance(array, np.ndarray) or array.dtype.name != spec.dtype:
        found = array.dtype.name if isinstance(array, np.ndarray) else type(array).__name__
        raise UsageError(f"{where} is {found} and must be {spec.dtype}")
    shape = "x".join(map(str, spec.shape)) or "a scalar"
    fits = array.ndim == len(spec.shape) and all(
        size == (dim if isinstance(dim, int) else sizes.setdefault(dim, size))
        and (isinstance(dim, int) or dim not in dims or dims[dim].low <= size <= dims[dim].high)
        for size, dim in zip(array.shape, spec.shape, strict=True)
    )
    if not fits:
        found = "x".join(map(str, array.shape)) or "a scalar"
        raise UsageError(f"{where} is {found} and must be {shape}")
    if array.size == 0:
        raise UsageError(f"{where} is empty")
    if _is_float(spec) and not np.all(np.isfinite(array)):
        raise UsageError(f"{where} holds NaN or infinity")


def _is_float(spec: TensorSpec) -> bool:
    return spec.dtype.startswith(("float", "bfloat"))


def _reader(data: str, inputs: Sequence[TensorSpec]) -> Callable[[], Iterator[Sample]]:
    folder = Path(data)
    if folder.is_dir():
        paths = sorted(p for p in folder.iterdir() if p.suffix in (".npz", ".npy"))
        return lambda: (read_arrays(path, inputs) for path in paths)
    module, separator, name = data.partition(":")
    if not separator or folder.exists():
        raise UsageError(f"{data} is neither a folder with npz or npy files nor module:function")
    function = load_function(data, module, name)
    return lambda: _called(function, data, inputs)


def load_function(option: str, module: str, name: str) -> Callable[..., Any]:
    """A function by the name of its module, which may be a file in the current folder.

    Raises:
        UsageError: There is none.
    """
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)
    try:
        function = getattr(importlib.import_module(module), name)
    except Exception as error:  # a user's module may fail in any way
        raise UsageError(f"{option} cannot be imported: {error}") from error
    if not callable(function):
        raise UsageError(f"{option} is not a function")
    found: Callable[..., Any] = function
    return found


def _called(
    function: Callable[[], Iterable[Any]], data: str, inputs: Sequence[TensorSpec]
) -> Iterator[Sample]:
    try:
        for sample in function():
            single = isinstance(sample, np.ndarray) and len(inputs) == 1
            yield {inputs[0].name: sample} if single else sample
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(f"{data} failed: {type(error).__name__}: {error}") from error
