"""Quotients and remainders of shifted positions, in a form that TVM's flattening does not mistake.

Once loops are fused to one variable ``x``, TVM 0.27 flattens an access such as

    w[x // 240, (x % 80 // 10 + 1) % 2]    to    (x + 10) // 240 * 2 + ...

It takes both indices as parts of ``x + 10``, since one of them is, and reads a wrong element where
the shift carries over. Here a shift is taken out of the division, where nothing carries:

    (a + c) % m  =  r - m if r >= m else r,            with r = a % m + c % m
    (a + c) // m  =  a // m + c // m + (1 if r >= m else 0)
"""

from __future__ import annotations

from typing import Any

import tvm_ffi
from tvm import tirx


def take_shifts_out(function: tirx.PrimFunc) -> tirx.PrimFunc:
    """The function with no constant added inside a quotient or a remainder."""
    body = tvm_ffi.structural_map(
        function.body, [(tirx.FloorMod, _remainder), (tirx.FloorDiv, _quotient)]
    )
    return function.with_body(body)


def _remainder(node: Any) -> Any:
    shifted = _shift(node)
    if shifted is None:
        return node
    position, shift = shifted
    rest = tirx.floormod(position, node.b) + shift % int(node.b)
    return tirx.Select(rest >= node.b, rest - node.b, rest)


def _quotient(node: Any) -> Any:
    shifted = _shift(node)
    if shifted is None:
        return node
    position, shift = shifted
    whole, rest = divmod(shift, int(node.b))
    carries = tirx.floormod(position, node.b) + rest >= node.b
    one = tirx.const(1, node.b.ty.dtype)
    return tirx.floordiv(position, node.b) + whole + tirx.Select(carries, one, one - one)


def _shift(node: Any) -> tuple[Any, int] | None:
    """What is divided without the constant in it, and that; ``None`` where it does not matter."""
    if not isinstance(node.b, tirx.IntImm) or int(node.b) < 2:
        return None
    sign = {tirx.Add: 1, tirx.Sub: -1}.get(type(node.a))
    if sign is None or not isinstance(node.a.b, tirx.IntImm):
        return None
    shift = sign * int(node.a.b)
    return (node.a.a, shift) if shift % int(node.b) else None
