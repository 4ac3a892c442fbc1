"""``hybridc verify``."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hybridc.cli.output import format_option, show, table
from hybridc.errors import AccuracyError

if TYPE_CHECKING:
    from hybridc.bundle.read import Bundle
    from hybridc.runtime.samples import OutputError


@click.command("verify")
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--no-run", is_flag=True, help="Check the files only; needs no matching device.")
@format_option
def command(bundle: Path, no_run: bool, format_: str) -> None:
    """Check the BUNDLE: every file's checksum, and its results on the stored samples.

    Of a chain of bundles, each is checked by itself; the steps between them are not run. Needs the
    loader only. Exit code 6 means damaged, 4 that results are off, 7 that this machine cannot run
    it.
    """
    from hybridc.bundle.read import open_bundle
    from hybridc.runtime.chain import chain_folder, open_stages

    if not chain_folder(bundle):
        checked = _check(open_bundle(bundle), no_run)
        show(format_, checked.data, lambda: checked.lines)
        _refuse([checked])
        return
    stages = {spec.name: _check(opened, no_run) for spec, opened in open_stages(bundle)}
    data = {"stages": {name: own.data for name, own in stages.items()}}
    show(format_, data, lambda: [f"{n}: {line}" for n, own in stages.items() for line in own.lines])
    _refuse(list(stages.values()))


@dataclasses.dataclass(frozen=True)
class _Checked:
    """A bundle whose files are in order.

    Attributes:
        count: Number of its files.
        tolerance: Largest relative error that it allows.
        errors: How far its results are off; none if it was not run.
    """

    count: int
    tolerance: float
    errors: Sequence[OutputError]

    @property
    def data(self) -> dict[str, Any]:
        """What was found, for JSON."""
        errors = [dataclasses.asdict(error) for error in self.errors]
        return {"files": self.count, "tolerance": self.tolerance, "errors": errors}

    @property
    def lines(self) -> list[str]:
        """What was found, for people."""
        rows = [["sample", "output", "relative error", ""]]
        rows += [
            [str(e.sample), e.output, f"{e.error:.3g}", "ok" if e.within else "TOO LARGE"]
            for e in self.errors
        ]
        head = f"{self.count} files are as they were written"
        return [head, *(table(rows, indent=0) if self.errors else [])]


def _check(bundle: Bundle, no_run: bool) -> _Checked:
    """Check the files of a bundle, and run its samples.

    Raises:
        BundleError: It is damaged.
        DeviceError: This machine cannot run it.
    """
    from hybridc.runtime.samples import run_samples

    bundle.check_all()
    errors = [] if no_run else run_samples(bundle)
    return _Checked(len(bundle.manifest.files), bundle.manifest.tolerance, errors)


def _refuse(bundles: Sequence[_Checked]) -> None:
    """Raise an error if results of any bundle are off."""
    for own in bundles:
        if not all(error.within for error in own.errors):
            raise AccuracyError(
                f"results differ from the reference by more than {own.tolerance:g} relative"
            )
