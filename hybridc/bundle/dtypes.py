"""Element types that numpy does not have: bfloat16 and float8, through the package ml_dtypes.

They are looked up only when a bundle uses them, so that the loader does without the package
otherwise.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hybridc.errors import DeviceError

NARROW = frozenset(
    ("bfloat16", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz")
)
"""Names of the element types that ml_dtypes provides."""


def dtype_named(name: str) -> np.dtype[Any]:
    """The numpy dtype of a name out of a manifest.

    Raises:
        DeviceError: The type needs ml_dtypes and it is not installed.
    """
    if name not in NARROW:
        return np.dtype(name)
    try:
        import ml_dtypes
    except ImportError as error:
        raise DeviceError(
            f"the bundle uses {name}, which needs a package; run: pip install ml-dtypes"
        ) from error
    dtype: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name))
    return dtype


def carrier(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The unsigned integer type of the same size, which DLPack carries everywhere."""
    return np.dtype(f"uint{8 * dtype.itemsize}")
