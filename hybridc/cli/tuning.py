"""Options about choices that are measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hybridc.cli.options import Function, with_options
from hybridc.errors import UsageError

if TYPE_CHECKING:
    from hybridc.targets.protocol import Device
    from hybridc.tuning.tune import TuningJob

_OPTIONS = (
    click.option(
        "--tuning",
        type=click.Path(path_type=Path, dir_okay=False),
        metavar="FILE",
        help="Tiles of convolutions and matrix products that --tune measured to be fast. The same "
        "file gives the same bundle.",
    ),
    click.option(
        "--tune",
        type=click.FloatRange(min=0, min_open=True),
        metavar="SECONDS",
        help="Measure kernels that are not in the --tuning file, for so long at most, and write "
        "them there.",
    ),
)


def tuning_options(function: Function) -> Function:
    """A tuning file, and how long to measure."""
    return with_options(_OPTIONS, function)


def read_tuning(values: Mapping[str, Any], devices: Sequence[Device]) -> TuningJob | None:
    """What the options ask for; ``None`` if they ask for nothing.

    Raises:
        UserError: They do not fit each other, the file, the devices or this machine.
    """
    path, seconds = values["tuning"], values["tune"]
    if path is None:
        if seconds is not None:
            raise UsageError("--tune needs a --tuning file to write what it measures to")
        return None
    from hybridc.tuning.tune import open_tuning

    return open_tuning(path, seconds, devices)
