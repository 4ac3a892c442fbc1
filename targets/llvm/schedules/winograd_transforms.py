"""The transforms of Winograd's convolution for kernels of three taps.

``size`` outputs of one axis take ``size + 2`` inputs d and 3 taps g, but only ``size + 2``
multiplications, one for each point at which the polynomials with coefficients d and g are
multiplied. In two dimensions, with tiles of 4 x 4 outputs, that is 36 in place of 144:

    outputs = A' [ (G taps G') * (B' inputs B) ] A

The points are 0, infinity and pairs +p, -p, so that a pair shares its even and its odd terms. Those
of tiles of 4 were chosen for small errors: with 3/4 and 3/2 they are a quarter of those with the
usual 1 and 2. Their powers are exact in binary, and so are all factors in B and A.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hybridc.bundle.tensors import Array

TAPS = 3
"""Taps of the kernel, in each axis."""

_PAIRS = {2: (1.0,), 4: (0.75, 1.5)}

SIZES = tuple(_PAIRS)
"""Outputs of a tile in one axis for which there are transforms."""

Keep = Callable[[Any], Any]
"""Binds a value that is used several times."""


def input_transform(
    size: int, inputs: Sequence[Any], keep: Keep = lambda value: value
) -> list[Any]:
    """B' times a vector of ``size + 2`` numbers, arrays or expressions."""
    pairs = _PAIRS[size]
    whole = _product(pairs)
    found = [_combination(whole, inputs[0::2])]
    for point in pairs:
        others = _product([other for other in pairs if other != point])
        even = keep(_combination(others, inputs[2::2]))
        odd = keep(_combination(others, inputs[1:-1:2]))
        found += [even + _scaled(odd, point), even - _scaled(odd, point)]
    return [*found, _combination(whole, inputs[1::2])]


def output_transform(
    size: int, products: Sequence[Any], keep: Keep = lambda value: value
) -> list[Any]:
    """A' times a vector of ``size + 2`` numbers, arrays or expressions: ``size`` outputs."""
    pairs = _PAIRS[size]
    sums, differences = [], []
    for plus, minus in zip(products[1:-1:2], products[2:-1:2], strict=True):
        sums.append(keep(plus + minus))
        differences.append(keep(plus - minus))
    found = []
    for power in range(size):
        terms = differences if power % 2 else sums
        value = _combination([point**power for point in pairs], terms)
        value = products[0] + value if power == 0 else value
        found.append(value + products[-1] if power == size - 1 else value)
    return found


def input_matrix(size: int) -> Array:
    """B', of ``size + 2`` rows and columns, float64."""
    return np.stack(input_transform(size, list(np.eye(size + TAPS - 1))))


def output_matrix(size: int) -> Array:
    """A', of ``size`` rows and ``size + 2`` columns, float64."""
    return np.stack(output_transform(size, list(np.eye(size + TAPS - 1))))


def weight_matrix(size: int) -> Array:
    """G, of ``size + 2`` rows and 3 columns, float64."""
    points = [0.0, *(sign * point for point in _PAIRS[size] for sign in (1, -1))]
    rows = []
    for number, point in enumerate(points):
        others = points[:number] + points[number + 1 :]
        scale = np.prod([point - other for other in others])
        rows.append([point**power / scale for power in range(TAPS)])
    return np.array([*rows, [0.0] * (TAPS - 1) + [1.0]])


def transform_weight(weight: Array, size: int) -> Array:
    """Kernels ``(..., 3, 3)`` as ``(..., size + 2, size + 2)``, computed in float64."""
    matrix = weight_matrix(size)
    transformed: Array = matrix @ weight.astype(np.float64) @ matrix.T
    return transformed.astype(weight.dtype)


def _product(points: Sequence[float]) -> list[float]:
    """Coefficients of the product of all ``t - point ** 2``, that of the lowest power first."""
    coefficients = np.atleast_1d(np.poly([point**2 for point in points]))
    return [float(coefficient) for coefficient in coefficients[::-1]]


def _combination(factors: Sequence[float], values: Sequence[Any]) -> Any:
    """The sum of the values times their factors, the last one first: its factor often is one."""
    *pairs, (factor, value) = zip(factors, values, strict=True)
    total = _scaled(value, factor)
    for factor, value in pairs:
        total = total + _scaled(value, factor)
    return total


def _scaled(value: Any, factor: float) -> Any:
    return value if factor == 1.0 else value * factor
