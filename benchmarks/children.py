"""A process of its own for each measurement, so that none inherits another's threads or memory."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path


def run_child(
    script: str, arguments: Sequence[str], check: bool = True
) -> subprocess.CompletedProcess[str]:
    """Run a script of this folder in a new process; what it prints is captured.

    Args:
        script: Its path.
        arguments: Of its command line, behind ``--child``.
        check: Whether a failure is an error here.

    Raises:
        subprocess.CalledProcessError: It failed, and ``check`` is set; its messages are shown.
    """
    search = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-P", script, "--child", *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": search},
    )
    if check and done.returncode:
        sys.stderr.write(done.stderr)
        done.check_returncode()
    return done
