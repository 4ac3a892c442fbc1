"""Fit a roofline to measurements.

    seconds = launch + sum over classes of  factor x (operations / peak)
                     + moving x (bytes / bandwidth)

The unknowns are the launch, a factor for each class of operators, and that for moving. They are
linear, so least squares finds the best; they are kept at or above zero, since no kernel gives time
back. Rows are divided by the measured seconds, so that small and large groups count alike.

The error is measured on groups that a fit did not see: each fifth with a fit to the others.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from hybridc.cost_models.device import DeviceProfile
from hybridc.cost_models.group_work import GroupWork
from hybridc.cost_models.measured import Measurement
from hybridc.cost_models.roofline import CalibratedRoofline, ideal_seconds

FEWEST = 10
"""Fewer measurements than this are not fitted."""

_FOLDS = 5
_SWEEPS = 5000

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
    return fit_roofline(rows, device, _held_out_error(rows, device))


def _held_out_error(rows: Sequence[Measurement], device: DeviceProfile) -> float:
    """Median relative error on groups left out; what cannot be predicted counts as wholly wrong."""
    errors = []
    for fold in range(_FOLDS):
        model = fit_roofline([r for i, r in enumerate(rows) if i % _FOLDS != fold], device)
        for row in rows[fold::_FOLDS]:
            cost = model.estimate(row.work, device)
            errors.append(1.0 if cost is None else abs(cost.seconds / row.seconds - 1))
    return statistics.median(errors)


def fit_roofline(
    measurements: Sequence[Measurement], device: DeviceProfile, error: float = 1.0
) -> CalibratedRoofline:
    """A roofline fitted to measurements of groups that compute or move something.

    Args:
        measurements: At least one.
        device: The device's profile.
        error: What is known about its error on other groups.
    """
    rows = sorted(measurements, key=lambda one: one.work.signature)
    kinds = sorted({kind for row in rows for kind in ideal_seconds(row.work, device)})
    features = np.array([_features(row.work, device, kinds) for row in rows])
    seconds = np.array([row.seconds for row in rows])
    launch, moving, *factors = _nonnegative(features / seconds[:, None], np.ones(len(rows)))
    return CalibratedRoofline(dict(zip(kinds, factors, strict=True)), moving, launch, error)


def _features(group: GroupWork, device: DeviceProfile, kinds: Sequence[str]) -> list[float]:
    times = ideal_seconds(group, device)
    moving = group.bytes / device.level(group.bytes).bytes_per_second
    return [1.0, moving, *(times.get(kind, 0.0) for kind in kinds)]


def _nonnegative(matrix: Matrix, wanted: Matrix) -> list[float]:
    """Least squares with unknowns at or above zero, one unknown after the other until it rests.

    The problem is convex, so this ends at the optimum. Columns are scaled to length one first:
    launches and bytes differ by orders of magnitude.
    """
    scale = np.linalg.norm(matrix, axis=0)
    scale[scale == 0] = 1.0
    gram = (matrix / scale).T @ (matrix / scale)
    target = (matrix / scale).T @ wanted
    found = np.zeros(len(scale))
    for _ in range(_SWEEPS):
        before = found.copy()
        for i in np.flatnonzero(np.diag(gram)):
            found[i] = max(0.0, found[i] + (target[i] - gram[i] @ found) / gram[i, i])
        if np.max(np.abs(found - before), initial=0.0) <= 1e-12 * np.max(found, initial=1e-30):
            break
    return [float(value) for value in found / scale]
