"""What the compiler promises of any file: a lowered model, or an error that the user can mend."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from pathlib import Path

import onnx
from hybridc.passes.pipeline import run_passes
from hybridc.targets.registry import parse_targets

from hybridc.errors import UserError
from hybridc.frontend.read import Source, read_model, source_of
from hybridc.frontend.shapes import model_inputs, specialize
from hybridc.lowering.ops import default_table
from hybridc.placement.decide import Request
from hybridc.placement.fallback import place_and_lower


def try_file(path: Path) -> str:
    """Read, simplify, place and lower a file; returns how it ended.

    Raises:
        Exception: Anything but a :class:`UserError` breaks the promise.
    """
    return _try(lambda: read_model(path))


def try_model(model: onnx.ModelProto) -> str:
    """The same for a model in memory."""
    return _try(lambda: source_of(model))


def _try(read: Callable[[], Source]) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            _lower(read())
        except UserError as refusal:
            return type(refusal).__name__
    return "lowered"


def _lower(source: Source) -> None:
    dimensions = {
        dim.value
        for value in model_inputs(source.model)
        for dim in value.shape or ()
        if not isinstance(dim, int) and dim.value
    }
    ranges = specialize(source.model, dict.fromkeys(map(str, dimensions), (2,)))
    table = default_table()
    model, _notes = run_passes(source.model, table.lowers)
    fallback = "HYBRIDC_FUZZ_FALLBACK" in os.environ
    place_and_lower(model.graph, Request(parse_targets(["llvm"])), fallback, ranges)
