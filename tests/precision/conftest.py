"""A small network that was calibrated, for all tests of this folder."""

from __future__ import annotations

import onnx
import pytest

from hybridc.precision.samples import load_samples
from hybridc.precision.static import calibrate_model
from tests.precision.data import network, samples, write_samples
from tests.precision.test_samples import SPECS


@pytest.fixture(scope="session")
def loaded(tmp_path_factory):
    """Samples to calibrate with."""
    data = write_samples(tmp_path_factory.mktemp("calibrated") / "data", samples(12))
    return load_samples(str(data), SPECS, {})


@pytest.fixture(scope="session")
def calibrated(loaded):
    """The network, calibrated."""
    return calibrate_model(onnx.shape_inference.infer_shapes(network()), loaded, "percentile")
