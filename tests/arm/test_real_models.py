"""Real models on AArch64 give what ONNX Runtime gives here.

HYBRIDC_ARM_MODELS chooses them: names with spaces between, or ``all``, which takes half an hour.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from tests.arm import emulator
from tests.arm.test_cases import TARGET, pytestmark  # noqa: F401
from tests.models import run_reference
from tests.real.test_real_models import CATALOG_MODELS, shapes_of
from tests.support import assert_close, compile_to
from tools.models import LIGHT_MODELS, light_model, model_feeds, model_path

FEW = "squeezenet magika-model openwakeword-embedding-model rapidocr-ch-ppocr-mobile-v2.0-cls-infer"
ALL = " ".join([*LIGHT_MODELS, *CATALOG_MODELS])


def chosen() -> list[str]:
    names = os.environ.get("HYBRIDC_ARM_MODELS", FEW)
    return (ALL if names == "all" else names).split()


@pytest.mark.parametrize("name", chosen())
def test_real_model(name: str, tmp_path: Path) -> None:
    light = name in LIGHT_MODELS
    path = light_model(name) if light else model_path(name)
    bundle = tmp_path / "model.hyb"
    compile_to(bundle, path, targets=(TARGET,), shapes=() if light else shapes_of(name))
    feeds = _light_feeds(path) if light else model_feeds(name)
    np.savez(bundle.with_suffix(".npz"), **feeds)
    emulator.run_all(tmp_path)
    tolerance = CATALOG_MODELS.get(name, 1e-4)
    assert_close(emulator.outputs_of(bundle), run_reference(path, feeds), tolerance)


def _light_feeds(path: Path) -> dict[str, np.ndarray]:
    from hybridc.frontend.read import read_model
    from hybridc.frontend.shapes import model_inputs

    random = np.random.RandomState(0)
    values = model_inputs(read_model(path).model)
    return {
        str(value.name): random.standard_normal(value.shape.numpy()).astype(np.float32)
        for value in values
    }
