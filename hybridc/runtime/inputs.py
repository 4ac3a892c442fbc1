"""From a caller's arrays to tensors, with one clear sentence for each way to get them wrong."""

from __future__ import annotations

import difflib
from collections.abc import Container, Mapping, Sequence
from typing import Any

import numpy as np
import tvm_ffi

from hybridc.bundle.dtypes import NARROW, carried, dtype_named
from hybridc.bundle.manifest import Manifest, TensorSpec
from hybridc.bundle.tensors import Array
from hybridc.errors import UsageError
from hybridc.runtime.tensors import HOST, Place, float8_codes, place_of, to_array, to_tensor


class InputReader:
    """Checks and converts the inputs of one model.

    A numpy array is passed on without a copy if it is contiguous and writable (DLPack cannot
    carry a read-only flag to TVM); anything else with ``__dlpack__`` is taken as it is.
    """

    def __init__(self, manifest: Manifest, places: Container[Place] = (HOST,)) -> None:
        self._places = places
        self._specs = manifest.inputs
        self._ranges = manifest.dimensions
        self._steps = manifest.steps
        self._names = frozenset(spec.name for spec in manifest.inputs)
        self._expected = [
            (spec.name, dtype_named(spec.dtype) if _is_plain(spec) else None, _static_shape(spec))
            for spec in manifest.inputs
        ]

    def read(self, arrays: Mapping[str, Any]) -> list[Any]:
        """The inputs as tvm_ffi tensors, in the model's order.

        Raises:
            UsageError: An input is missing, unknown, or has the wrong type or shape.
        """
        if arrays.keys() != self._names:
            self._refuse_names(arrays)
        tensors = []
        shapes: dict[str, tuple[int, ...]] = {}
        for name, dtype, shape in self._expected:
            array = arrays[name]
            if dtype is None:
                tensors.append(self._read_other(name, array, shapes))
                continue
            if isinstance(array, np.ndarray):
                found_dtype, found_shape = array.dtype, array.shape
                tensor = None
            else:
                tensor = _from_other(name, array, self._places)
                found_dtype, found_shape = dtype_named(str(tensor.dtype)), tuple(tensor.shape)
            if found_dtype != dtype or (shape is not None and found_shape != shape):
                self._refuse(name, found_dtype, found_shape)
            if shape is None:
                shapes[name] = found_shape
            tensors.append(to_tensor(array) if tensor is None else tensor)
        if shapes:
            self._check_dimensions(shapes)
        return tensors

    def _read_other(self, name: str, value: Any, shapes: dict[str, tuple[int, ...]]) -> Any:
        """What has no numpy type; a sequence, a map or an optional is passed on as it is."""
        spec = next(spec for spec in self._specs if spec.name == name)
        if not spec.is_tensor:
            return value
        if spec.dtype in NARROW:
            carriers = self._read_narrow(spec, value)
            shapes[name] = carriers.shape
            return to_tensor(carriers)
        array = np.asarray(value)
        if array.dtype.kind not in "UO":
            self._refuse(name, array.dtype, array.shape)
        shapes[name] = array.shape
        return array.astype(object)

    def _read_narrow(self, spec: TensorSpec, value: Any) -> Array:
        """Numbers of a narrow type, given as such or as carriers, as carriers."""
        carrier = NARROW[spec.dtype]
        plain = isinstance(value, np.ndarray)
        found = value if plain else _from_other(spec.name, value, (HOST,))
        name, shape = str(found.dtype), tuple(found.shape)
        if name not in (spec.dtype, carrier.dtype):
            self._refuse(spec.name, name, shape)
        if not plain:
            found = float8_codes(found) if name == spec.dtype else to_array(found)
        array = carried(found)
        low, high = int(array.min(initial=0)), int(array.max(initial=0))
        if low < carrier.low or high > carrier.high:
            raise UsageError(
                f"input {spec.name!r} holds {low}..{high}, and as {spec.dtype} it may hold "
                f"{carrier.low}..{carrier.high}"
            )
        return array

    def _refuse_names(self, arrays: Mapping[str, Any]) -> None:
        expected = ", ".join(describe(spec) for spec in self._specs) or "none"
        missing = [spec.name for spec in self._specs if spec.name not in arrays]
        unknown = [name for name in arrays if name not in self._names]
        parts = []
        if missing:
            parts.append(f"input {', '.join(map(repr, missing))} is missing")
        if unknown:
            close = difflib.get_close_matches(str(unknown[0]), self._names, 1)
            hint = f" (did you mean {close[0]!r}?)" if close else ""
            parts.append(f"there is no input {', '.join(map(repr, unknown))}{hint}")
        raise UsageError(f"{' and '.join(parts)}; the model takes {expected}")

    def _refuse(self, name: str, dtype: Any, shape: Sequence[int | str]) -> None:
        spec = next(spec for spec in self._specs if spec.name == name)
        got = describe(TensorSpec(name, str(dtype), tuple(shape))).partition(": ")[2]
        also = f", or the same of {NARROW[spec.dtype].dtype}" if spec.dtype in NARROW else ""
        raise UsageError(f"input {name!r} is {got} and must be {describe(spec)}{also}")

    def _check_dimensions(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Dynamic dimensions agree between inputs and lie in their ranges."""
        found: dict[str, int] = {}
        for spec in self._specs:
            if spec.name not in shapes:
                continue
            shape = shapes[spec.name]
            if not _fits(spec.shape, shape):
                self._refuse(spec.name, spec.dtype, shape)
            for dim, size in zip(spec.shape, shape, strict=True):
                if isinstance(dim, str) and found.setdefault(dim, size) != size:
                    raise UsageError(
                        f"dimension {dim!r} is {found[dim]} in one input and {size} in "
                        f"{spec.name!r}"
                    )
        for name, (low, high) in self._ranges.items():
            step = self._steps.get(name, 1)
            size = found.get(name, low)
            if not low <= size <= high or (size - low) % step:
                steps = f" in steps of {step}" if step > 1 else ""
                raise UsageError(
                    f"dimension {name!r} is {size} and the bundle was compiled for "
                    f"{low}..{high}{steps}"
                )


def describe(spec: TensorSpec) -> str:
    """A tensor's name, type and shape in one word for messages."""
    return f"{spec.name}: {spec.dtype}[{'x'.join(map(str, spec.shape))}]"


def _is_plain(spec: TensorSpec) -> bool:
    """Whether an input is a tensor of a type that compiled code computes with."""
    return spec.is_numeric and spec.dtype not in NARROW


def _static_shape(spec: TensorSpec) -> tuple[int, ...] | None:
    return spec.shape if all(isinstance(dim, int) for dim in spec.shape) else None  # type: ignore[return-value]


def _fits(expected: Sequence[int | str], shape: Sequence[int]) -> bool:
    """Whether a shape has the expected rank and static dimensions."""
    return len(shape) == len(expected) and all(
        isinstance(dim, str) or dim == size for dim, size in zip(expected, shape, strict=True)
    )


def _from_other(name: str, value: Any, places: Container[Place]) -> Any:
    """A DLPack tensor of another library as a tvm_ffi tensor over the same memory."""
    if not hasattr(value, "__dlpack__"):
        raise UsageError(
            f"input {name!r} is a {type(value).__name__} and must be a numpy array or a tensor "
            "that has __dlpack__"
        )
    try:
        tensor = tvm_ffi.from_dlpack(value, require_contiguous=True)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        raise UsageError(f"input {name!r} cannot be read through DLPack: {error}") from error
    place = place_of(tensor)
    if place != HOST and place not in places:
        raise UsageError(
            f"input {name!r} is on {tensor.device} and must be in host memory"
            + (" or on a device of the plan" if places != {HOST} else "")
        )
    return tensor
