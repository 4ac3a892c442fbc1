"""Options that several commands have, and how a group of options is put on a command."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

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
