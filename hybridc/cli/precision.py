"""Options about precision, and the compile that they ask for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hybridc.cli.options import Function, with_options
from hybridc.errors import UsageError

if TYPE_CHECKING:
    from hybridc.compiler import Report

PRECISIONS = (
    "fp32", "fp16", "bf16", "auto", "int8", "int8-dynamic", "int8-weights", "int4-weights",
)  # fmt: skip
METHODS = ("min-max", "percentile", "entropy", "mse")

_OPTIONS = (
    click.option(
        "--precision",
        type=click.Choice(PRECISIONS),
        default="fp32",
        show_default=True,
        help="fp16, bf16: floats of 16 bits; auto: int8, or integers of 16 bits, for as many "
        "layers as --accuracy-budget allows, else fp32; "
        "int8: convolutions and matrix products on integers, with ranges from "
        "--calibration; int8-dynamic: matrix products, with ranges found in each run; "
        "int8-weights, int4-weights: only the weights of matrix products are stored in fewer bits.",
    ),
    click.option(
        "--calibration",
        metavar="DATA",
        help="Samples of the inputs: a folder with npz or npy files, or module:function.",
    ),
    click.option(
        "--calibration-method",
        type=click.Choice(METHODS),
        default="percentile",
        show_default=True,
        help="How ranges are found from the samples.",
    ),
    click.option(
        "--accuracy-budget",
        metavar="METRIC=BOUND",
        help="What the precision may cost, such as cosine=0.99, relative=0.05, top1=0.99 or "
        "module:function=0.1. Checked on every fifth sample, which is held out from calibration; "
        "if it is not kept, nothing is written.",
    ),
    click.option(
        "--keep-model",
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="Write the model in the precision as ONNX, too.",
    ),
    click.option(
        "--trade-off",
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="Write the curve of accuracy against predicted latency and size that --precision auto "
        "went along, as .json, .md or .svg.",
    ),
)


def precision_options(function: Function) -> Function:
    """Precision, calibration and budget."""
    return with_options(_OPTIONS, function)


def compile_function(values: Mapping[str, Any]) -> Callable[..., Report]:
    """The compile that the options ask for.

    Raises:
        UsageError: Options do not fit each other, or one cannot be read.
    """
    from hybridc.compiler import compile_model

    names = ("calibration", "accuracy_budget", "keep_model", "trade_off")
    if values["precision"] == "fp32":
        given = [name.replace("_", "-") for name in names if values[name] is not None]
        if given:
            raise UsageError(f"--{given[0]} is for a --precision other than fp32")
        return compile_model
    from hybridc.precision.budget import parse_budget
    from hybridc.precision.compile import Wanted, compile_in_precision

    budget = values["accuracy_budget"]
    wanted = Wanted(
        values["precision"],
        values["calibration"],
        values["calibration_method"],
        None if budget is None else parse_budget(budget),
        values["keep_model"],
        values["trade_off"],
    )
    return partial(compile_in_precision, wanted=wanted)
