"""A small model that was calibrated."""

import subprocess
import sys

import pytest

from hybridc.runtime.__main__ import COMPILER
from tests.calibration.devices import TARGETS
from tests.models import branched_model, save
from tests.support import hybridc


@pytest.fixture(scope="session")
def calibration(tmp_path_factory):
    """A folder with a model, its calibration bundle, and what was measured."""
    folder = tmp_path_factory.mktemp("calibration")
    save(branched_model(), folder / "m.onnx")
    built = hybridc(
        *("calibrate", "build", *TARGETS, "--model", folder / "m.onnx", "-o", folder / "cal.hyb")
    )
    assert built.code == 0, built
    code = (
        "import sys\n"
        f"for name in {(*COMPILER, 'ml_dtypes', 'google')}: sys.modules[name] = None\n"
        "from hybridc.cli.main import main\nmain()"
    )
    arguments = ["calibrate", "run", "cal.hyb", "-o", "machine.json", "--seconds", "0.02"]
    command = [sys.executable, "-c", code, *arguments]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert "launch_seconds" in result.stdout
    return folder
