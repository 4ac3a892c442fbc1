"""What is known about the sizes of dynamic dimensions, for proofs about shapes.

Proofs are asked for all over the converters, on dimensions alone. What they may rest on is the
same for all of one section, so it is set once around its lowering instead of being handed down
through every call.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import tvm
from tvm import tirx

MAX_SIZE = 10**9
"""No dimension has as many elements; some exporters write this number for "to the end"."""

_KNOWN: ContextVar[Mapping[Any, tuple[int, int]]] = ContextVar("bounds of dimensions")


@contextmanager
def known_bounds(bounds: Mapping[Any, tuple[int, int]]) -> Iterator[None]:
    """Proofs inside this context may rest on these lowest and highest values of variables."""
    token = _KNOWN.set(bounds)
    try:
        yield
    finally:
        _KNOWN.reset(token)


def analyzer_for(dim: Any) -> Any:
    """An analyzer that knows the bounds of a dimension's variables.

    Every variable is a size, not negative and below :data:`MAX_SIZE`, if nothing more is known.
    """
    known = _KNOWN.get({})
    analyzer = tvm.sym.Analyzer()
    for variable in tirx.analysis.undefined_vars(dim):
        low, high = known.get(variable, (0, MAX_SIZE - 1))
        analyzer.bind(variable, tvm.ir.Range(low, high + 1))
    return analyzer
