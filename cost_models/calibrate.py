"""Fit a roofline to measurements.

    seconds = sum over its terms of  factor x term  +  factor' x root of the term

The terms are those of :func:`hybridc.cost_models.roofline.terms`: a launch, weights, and computing
and moving by class of operators. Their roots are for groups that do not fill the device, see
:func:`hybridc.cost_models.roofline.filling`. With them times of whole models that the fit had not
seen were off by 19 % in place of 42 on an H200 by CUDA, by 20 in place of 22 by OpenCL, and by 17
in place of 24 on 16 cores of a CPU (medians of 16 models, each with a fit to the other ones).

Factors are kept at or above zero, since no kernel gives time back. What is least is the sum of
squares of log(predicted / measured): small and large groups count alike, and half as long is as
wrong as twice as long. With relative errors instead, which never are below -1, a fit to groups that
differ more than their terms tell would be too fast for most of them.

The error is measured on groups that a fit did not see: each fifth with a fit to the others.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from hybridc.cost_models.device import DeviceProfile
from hybridc.cost_models.measured import Measurement
from hybridc.cost_models.roofline import CalibratedRoofline, filling, terms

FEWEST = 10
"""Fewer measurements than this are not fitted."""

_FOLDS = 5
_SWEEPS = 5000
_STEPS = 50
_RESTS = 1e-4
"""Relative change of predicted times below which a fit rests."""

_LEAST_SECONDS = 1e-9

Matrix = npt.NDArray[np.float64]


def calibrate(
    measurements: Sequence[Measurement], device: DeviceProfile
) -> CalibratedRoofline | None:
    """A roofline fitted to a device's measurements; ``None`` if there are too few of them.

    Args:
        measurements: Groups with their times on the device.
        device: Its profile, for peaks and bandwidths.
    """
    rows = [
        one
        for one in measurements
        if one.work.is_known and not one.work.is_view and not one.is_lost
    ]
    if len(rows) < FEWEST:
        return None
    rows = sorted(rows, key=lambda one: one.work.signature)
    return fit_roofline(rows, device, _held_out_error(rows, device), fills=True)


def _held_out_error(rows: Sequence[Measurement], device: DeviceProfile) -> float:
    """Median relative error on groups left out; what cannot be predicted counts as wholly wrong."""
    errors = []
    for fold in range(_FOLDS):
        others = [row for index, row in enumerate(rows) if index % _FOLDS != fold]
        model = fit_roofline(others, device, fills=True)
        for row in rows[fold::_FOLDS]:
            cost = model.estimate(row.work, device)
            errors.append(1.0 if cost is None else abs(cost.seconds / row.seconds - 1))
    return statistics.median(errors)


def fit_roofline(
    measurements: Sequence[Measurement],
    device: DeviceProfile,
    error: float = 1.0,
    fills: bool = False,
) -> CalibratedRoofline:
    """A roofline fitted to measurements of groups that compute or move something.

    Args:
        measurements: At least one.
        device: The device's profile.
        error: What is known about its error on other groups.
        fills: Whether to fit the roots of the terms, too.
    """
    rows = sorted(measurements, key=lambda one: one.work.signature)
    found = [terms(row.work, device) for row in rows]
    if fills:
        found = [{**row, **filling(row)} for row in found]
    names = sorted({name for row in found for name in row})
    matrix = np.array([[row.get(name, 0.0) for name in names] for row in found])
    factors = _least_logarithms(matrix, np.array([row.seconds for row in rows]))
    return CalibratedRoofline(dict(zip(names, factors.tolist(), strict=True)), error)


def _least_logarithms(matrix: Matrix, seconds: Matrix) -> Matrix:
    """Factors at or above zero with the least squares of logarithms of errors.

    By Gauss-Newton: near what was found last, a logarithm is linear. Steps are damped, and no row
    asks for more than e times its time at once, so that one that is far off does not throw all.
    """
    found = _nonnegative(matrix / seconds[:, None], np.ones(len(seconds)))
    for _ in range(_STEPS):
        now = np.maximum(matrix @ found, _LEAST_SECONDS)
        wanted = 1 + np.clip(np.log(seconds / now), -1, 1)
        step = (_nonnegative(matrix / now[:, None], wanted, found) - found) / 2
        found = found + step
        if np.max(np.abs(matrix @ step) / now) <= _RESTS:
            break
    return found


def _nonnegative(matrix: Matrix, wanted: Matrix, start: Matrix | None = None) -> Matrix:
    """Least squares with unknowns at or above zero, one unknown after the other until it rests.

    The problem is convex, so this ends at the optimum. Columns are scaled to length one first:
    launches and bytes differ by orders of magnitude.
    """
    scale = np.linalg.norm(matrix, axis=0)
    scale[scale == 0] = 1.0
    gram = (matrix / scale).T @ (matrix / scale)
    target = (matrix / scale).T @ wanted
    found = np.zeros(len(scale)) if start is None else start * scale
    for _ in range(_SWEEPS):
        before = found.copy()
        for i in np.flatnonzero(np.diag(gram)):
            found[i] = max(0.0, found[i] + (target[i] - gram[i] @ found) / gram[i, i])
        if np.max(np.abs(found - before), initial=0.0) <= 1e-9 * np.max(found, initial=1e-30):
            break
    factors: Matrix = found / scale
    return factors
