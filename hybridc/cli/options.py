"""Options that several commands have, and how a group of options is put on a command."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from hybridc.errors import UsageError

Function = TypeVar("Function", bound=Callable[..., Any])


def with_options(options: Sequence[Callable[[Any], Any]], function: Function) -> Function:
    """A command with options, listed in this order."""
    for option in reversed(options):
        function = option(function)
    return function


def bundle_output_option(function: Function) -> Function:
    """Where to write a bundle, as ``output``."""
    return click.option(
        "-o",
        "--output",
        type=click.Path(path_type=Path),
        required=True,
        metavar="BUNDLE",
        help="Where to write: a folder, or one file if the name ends in .hyb.",
    )(function)


def input_option(function: Function) -> Function:
    """A file with a model's inputs, as ``source``."""
    return click.option(
        "-i",
        "--input",
        "source",
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="Inputs by name in an npz, or the only input in an npy; random ones without it.",
    )(function)


def seed_option(function: Function) -> Function:
    """What random inputs are made from, as ``seed``."""
    return click.option("--seed", type=int, default=0, help="Seed of random inputs.")(function)


def cache_options(function: Function) -> Function:
    """Where built kernels are kept, as ``cache`` and ``no_cache``: see :func:`read_cache`."""
    folder = click.option(
        "--cache",
        type=click.Path(path_type=Path, file_okay=False),
        metavar="FOLDER",
        help="Where kernels for CPUs are kept, for compiles to come. Default: "
        "$HYBRIDC_KERNEL_CACHE, or a folder of the user's.",
    )
    none = click.option("--no-cache", is_flag=True, help="Build every kernel, and keep none.")
    return with_options((folder, none), function)


def read_cache(folder: Path | None, none: bool) -> Path | None:
    """The folder of kernels that the options ask for; ``None`` if they ask for none.

    Raises:
        UsageError: They contradict each other.
    """
    from hybridc.targets.llvm.object_cache import default_folder

    if folder is not None and none:
        raise UsageError("--cache and --no-cache contradict each other; give one of them")
    return None if none else folder or default_folder()
