"""``hybridc verify``."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import click

from hybridc.cli.output import format_option, show, table
from hybridc.errors import AccuracyError


@click.command("verify")
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--no-run", is_flag=True, help="Check the files only; needs no matching device.")
@format_option
def command(bundle: Path, no_run: bool, format_: str) -> None:
    """Check the BUNDLE: every file's checksum, and its results on the stored samples.

    Needs the loader only. Exit code 6 means damaged, 4 that results are off, 7 that this machine
    cannot run it.
    """
    from hybridc.bundle.read import open_bundle
    from hybridc.runtime.samples import run_samples

    opened = open_bundle(bundle)
    opened.check_all()
    errors = [] if no_run else run_samples(opened)
    data = {
        "files": len(opened.manifest.files),
        "tolerance": opened.manifest.tolerance,
        "errors": [dataclasses.asdict(error) for error in errors],
    }
    rows = [["sample", "output", "relative error", ""]]
    rows += [
        [str(e.sample), e.output, f"{e.error:.3g}", "ok" if e.within else "TOO LARGE"]
        for e in errors
    ]
    head = f"{len(opened.manifest.files)} files are as they were written"
    show(format_, data, lambda: [head, *(table(rows, indent=0) if errors else [])])
    if not all(error.within for error in errors):
        raise AccuracyError(
            f"results differ from the reference by more than {opened.manifest.tolerance:g} relative"
        )
