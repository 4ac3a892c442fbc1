"""Sizes that are known only when the model runs."""

from __future__ import annotations

from hybridc.lowering.call import Call
from hybridc.lowering.value import Dim


def known_or_read(call: Call, index: int, what: str) -> list[Dim]:
    """Input ``index`` as sizes, read when the model runs unless they are known before.

    Args:
        call: The node being lowered.
        index: An integer input of rank 0 or 1 whose elements are sizes as they stand.
        what: What it is, for a refusal.
    """
    if call.is_known(index):
        return call.integers(index, what)
    return call.dims_of(call.tensor(index), what)
