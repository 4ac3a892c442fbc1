"""Element types that numpy does not have, and how the loader does without the package for them.

The package ml_dtypes has bfloat16 and the narrow types: floats of a byte or less, and integers
below a byte. It is looked up only when a bundle uses them.

Compiled code, weights and stored samples hold each number of a narrow type in a byte, its carrier:
int4 as int8, uint4 as uint8, a float as its bit pattern in the low bits of a uint8. Without the
package, callers give and get the carriers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from hybridc.errors import DeviceError

Array: TypeAlias = "np.ndarray[Any, Any]"


@dataclass(frozen=True)
class Carrier:
    """The byte that holds a number of a narrow type.

    Attributes:
        dtype: numpy's name of its type.
        low: Least value.
        high: Greatest value.
    """

    dtype: str
    low: int
    high: int


NARROW = {
    "int2": Carrier("int8", -2, 1),
    "uint2": Carrier("uint8", 0, 3),
    "int4": Carrier("int8", -8, 7),
    "uint4": Carrier("uint8", 0, 15),
    "float4_e2m1fn": Carrier("uint8", 0, 15),
    "float6_e2m3fn": Carrier("uint8", 0, 63),
    "float6_e3m2fn": Carrier("uint8", 0, 63),
    "float8_e4m3fn": Carrier("uint8", 0, 255),
    "float8_e4m3fnuz": Carrier("uint8", 0, 255),
    "float8_e5m2": Carrier("uint8", 0, 255),
    "float8_e5m2fnuz": Carrier("uint8", 0, 255),
    "float8_e8m0fnu": Carrier("uint8", 0, 255),
}
"""The narrow types by ml_dtypes' names."""

EXTENSIONS = frozenset(("bfloat16", *NARROW))
"""Names of the element types that ml_dtypes provides."""


def dtype_named(name: str) -> np.dtype[Any]:
    """The numpy dtype of a name out of a manifest.

    Raises:
        DeviceError: The type needs ml_dtypes and it is not installed.
    """
    if name not in EXTENSIONS:
        return np.dtype(name)
    try:
        import ml_dtypes
    except ImportError as error:
        raise DeviceError(
            f"the bundle uses {name}, which needs a package; run: pip install ml-dtypes"
        ) from error
    dtype: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name))
    return dtype


def container(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The unsigned integer type of the same size, which DLPack carries everywhere."""
    return np.dtype(f"uint{8 * dtype.itemsize}")


def carried(array: Array) -> Array:
    """An array of a narrow type of ml_dtypes as its carriers; any other array as it is."""
    carrier = NARROW.get(array.dtype.name)
    if carrier is None:
        return array
    if carrier.dtype == "int8":
        return array.astype(np.int8)  # ml_dtypes leaves the upper bits of a byte undefined
    codes = array.view(np.uint8)
    return codes if carrier.high == 255 else codes & np.uint8(carrier.high)


def numbers(array: Array) -> Array:
    """An array of a type of ml_dtypes as numpy's integers or float32; exact."""
    return carried(array) if "int" in array.dtype.name else array.astype(np.float32)


def restored(carriers: Array, name: str) -> Array:
    """Carriers as an array of the narrow type, or as they are if ml_dtypes is not installed."""
    try:
        dtype = dtype_named(name)
    except DeviceError:
        return carriers
    is_signed = NARROW[name].dtype == "int8"
    return carriers.astype(dtype) if is_signed else carriers.view(dtype)
