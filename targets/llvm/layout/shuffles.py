"""Channel shuffles that the convolution behind them can take in.

    reshape (n, p e, y, x) -> (n, p, e, y, x)
    transpose                 (n, e, p, y, x)
    reshape                   (n, e p, y, x)    -> grouped convolution

A convolution of a blocked input reads its channels one by one; which one comes next is a matter of
an index. So the three kernels in front of it need not run, if nothing else reads what they make.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import tvm
from hybridc.targets.llvm.schedules.blocks import (
    axes_of,
    blocks_of,
    is_spatial,
    same_variables,
    store_of,
)
from tvm import relax, tirx
from tvm.s_tir import Schedule

_EXCHANGE = (0, 2, 1, 3, 4)


@dataclass(frozen=True)
class Shuffle:
    """A shuffle of channels.

    Attributes:
        source: What is shuffled.
        parts: In how many parts the channels of the source are; the first ones of each part come
            first in the result.
        variables: What the three kernels' results are bound to, the last one last.
    """

    source: Any
    parts: int
    variables: tuple[Any, ...]


def find_shuffles(module: tvm.IRModule, bindings: list[Any], uses: Counter[Any]) -> dict[Any, Any]:
    """The shuffles by the variable of their result, of those whose parts one reader reads.

    Args:
        module: Holds the kernels.
        bindings: Those of ``main``, in order.
        uses: How often each variable is read.
    """
    moved = {b.var: b.value for b in bindings if _operand(b.value) is not None and uses[b.var] == 1}
    found = {}
    for last, value in moved.items():
        middle = _operand(value)
        first = _operand(moved[middle]) if middle in moved else None
        if first in moved and len(_sizes(last)) == 4 and len(_sizes(middle)) == 5:
            source = _operand(moved[first])
            kernels = [module[moved[v].args[0]] for v in (first, middle, last)]
            if _sizes(source) == _sizes(last) and _is_exchange(*kernels):
                found[last] = Shuffle(source, _sizes(first)[1], (first, middle, last))
    return found


def _operand(value: Any) -> Any | None:
    """The tensor that a kernel takes, if it takes nothing else."""
    if not isinstance(value, tvm.ir.Call) or getattr(value.op, "name", "") != "relax.call_tir":
        return None
    operands = value.args[1]
    alone = isinstance(operands, relax.Tuple) and len(operands.fields) == 1
    return operands.fields[0] if alone and len(value.args) == 2 else None


def _sizes(variable: Any) -> list[int]:
    """The shape of a variable; nothing if it is not known, but for the number of images."""
    shape = getattr(variable.ty, "shape", None)
    if not isinstance(shape, relax.ShapeExpr):
        return []
    rest = list(shape.values)[1:]
    known = all(isinstance(dim, tirx.IntImm) for dim in rest)
    return [0, *map(int, rest)] if known else []


def _is_exchange(first: Any, middle: Any, last: Any) -> bool:
    """Whether kernels reshape, exchange the second axis for the third, and reshape."""
    is_reshape = relax.analysis.has_reshape_pattern
    return is_reshape(first) and is_reshape(last) and _exchanges(middle)


def _exchanges(function: tirx.PrimFunc) -> bool:
    """Whether a kernel exchanges the second axis for the third."""
    schedule = Schedule(tvm.IRModule({"main": function}))
    blocks = [schedule.get(block) for block in blocks_of(schedule)]
    store = store_of(blocks[0]) if len(blocks) == 1 and is_spatial(blocks[0]) else None
    if store is None or not isinstance(store.value, tvm.ir.TensorLoad):
        return False
    axes, indices = axes_of(blocks[0]), list(store.value.indices)
    fits = len(axes) == len(indices) == len(_EXCHANGE) and same_variables(store.indices, axes)
    return fits and same_variables(indices, [axes[axis] for axis in _EXCHANGE])
