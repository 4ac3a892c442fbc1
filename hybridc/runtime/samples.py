"""Run a bundle's stored samples and measure how far the results are from the reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hybridc.bundle.dtypes import EXTENSIONS, NARROW, numbers, restored
from hybridc.bundle.manifest import STRING, TensorSpec
from hybridc.bundle.read import Bundle
from hybridc.bundle.strings import unpack_strings
from hybridc.bundle.tensors import Array
from hybridc.errors import DeviceError
from hybridc.runtime.loader import Model, load_bundle, load_way, names_of


@dataclass(frozen=True)
class OutputError:
    """How far one output was from its reference.

    Attributes:
        sample: Index of the sample.
        output: Name of the output.
        error: Largest difference relative to the reference's largest magnitude; infinity where
            shapes, types, or the places of NaN and infinity differ.
        within: Whether that is within ``limit``.
        limit: The tolerance of the bundle, or of the plan.
        plan: Name of the plan that gave it, or the devices that did; empty if there is one way.
    """

    sample: int
    output: str
    error: float
    within: bool
    limit: float
    plan: str = ""


def run_samples(bundle: Bundle) -> list[OutputError]:
    """Load a bundle, run all its samples and compare; one entry per sample and output.

    Of several ways to run the model, all that this machine can run are compared.

    Raises:
        DeviceError: It can run none.
    """
    ways = bundle.manifest.ways()
    if len(ways) == 1:
        with load_bundle(bundle) as model:
            return _compare(bundle, model)
    errors: list[OutputError] = []
    missed = []
    for way in ways:
        try:
            model = load_way(bundle, way)
        except DeviceError as error:
            missed.append(str(error))
            continue
        with model:
            errors += _compare(bundle, model, names_of(way))
    if len(missed) == len(ways):
        raise DeviceError("; and ".join(missed))
    return errors


def run_plans(bundle: Bundle, repository: Path) -> list[OutputError]:
    """Run the samples by every plan, the server's parts out of a model repository."""
    from hybridc.runtime.loopback import Loopback
    from hybridc.runtime.remote_settings import RemoteSettings

    errors: list[OutputError] = []
    for plan in bundle.manifest.plans:
        settings = RemoteSettings(("localhost:1",), plan=plan.name, deadline=1e9)
        with load_bundle(bundle, remote=settings, client=Loopback(repository)) as model:
            errors += _compare(bundle, model, plan.name, plan.tolerance)
    return errors


def _compare(
    bundle: Bundle, model: Model, plan: str = "", tolerance: float | None = None
) -> list[OutputError]:
    limit = bundle.manifest.tolerance if tolerance is None else tolerance
    errors: list[OutputError] = []
    for index, sample in enumerate(bundle.manifest.samples):
        results = model.run(_read(bundle, sample.inputs, bundle.manifest.inputs))
        stored = _read(bundle, sample.outputs, bundle.manifest.outputs)
        for name, expected in stored.items():
            error = relative_error(results[name], expected)
            errors.append(OutputError(index, name, error, error <= limit, limit, plan))
    return errors


def _read(bundle: Bundle, path: str, specs: Sequence[TensorSpec]) -> dict[str, Array]:
    """The arrays of a sample."""
    types = {spec.name: spec.dtype for spec in specs}
    return {name: _unpacked(a, types.get(name, "")) for name, a in bundle.tensors(path).items()}


def _unpacked(array: Array, dtype: str) -> Array:
    if dtype == STRING:
        return unpack_strings(array)
    return restored(array, dtype) if dtype in NARROW else array


def relative_error(actual: Array, expected: Array) -> float:
    """Largest difference relative to the largest magnitude of ``expected``.

    Integers and booleans must be equal. NaN and infinity must stand in the same places.
    """
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return float("inf")
    if expected.dtype.name in EXTENSIONS:
        actual, expected = (numbers(array) for array in (actual, expected))
    if actual.size == 0 or np.array_equal(actual, expected):
        return 0.0
    if expected.dtype.kind not in "fc":
        return float("inf")
    finite = np.isfinite(expected)
    if not np.array_equal(actual[~finite], expected[~finite], equal_nan=True):
        return float("inf")
    left, right = actual[finite].astype(np.float64), expected[finite].astype(np.float64)
    if not np.isfinite(left).all():
        return float("inf")
    scale = float(np.abs(right).max(initial=0.0)) or 1.0
    return float(np.abs(left - right).max(initial=0.0)) / scale
