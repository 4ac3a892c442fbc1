"""Which reductions the threads of a block can share.

TVM knows sums, products, and largest and smallest elements that start from the smallest or largest
finite number. The largest of nothing but minus infinity is minus infinity, so hybridc starts from
infinities; these reducers are made known here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import tvm_ffi
from hybridc.targets.llvm.schedules.blocks import loads_of, store_of
from tvm import tirx

_STARTS = {tirx.Add: 0.0, tirx.Mul: 1.0}


def combines(node: Any) -> bool:
    """Whether the threads of a block can share the reduction of a block of a function."""
    store, initial = store_of(node), node.init
    if store is None or not isinstance(initial, tirx.BufferStore):
        return False
    dtype = str(store.value.ty.dtype)
    own = [load for load in loads_of(node) if load.source.same_as(store.buffer)]
    if len(own) != 1 or not dtype.startswith(("float", "int", "uint")):
        return False
    kind, start = type(store.value), initial.value
    if not isinstance(start, tirx.IntImm | tirx.FloatImm):
        return False
    if kind in _STARTS:
        return float(start.value) == _STARTS[kind]
    if kind not in (tirx.Max, tirx.Min) or dtype.startswith("uint"):
        return False
    make_known()
    return float(start.value) in _extremes(kind, dtype)


def _extremes(kind: Any, dtype: str) -> tuple[float, ...]:
    limit = tirx.min_value(dtype) if kind is tirx.Max else tirx.max_value(dtype)
    infinity = -math.inf if kind is tirx.Max else math.inf
    return (float(limit.value), infinity)


@cache
def make_known() -> None:
    """Tell TVM of reductions that start from an infinity."""
    register = tvm_ffi.get_global_func("s_tir.schedule.RegisterReducer")
    for name, combine, infinity in (("max", tirx.max, -math.inf), ("min", tirx.min, math.inf)):
        combiner = _kept(f"hybridc.reducers.{name}.combiner", _combiner(combine))
        register(1, combiner, _kept(f"hybridc.reducers.{name}.identity", _identity(infinity)))


def _kept(name: str, function: Any) -> Any:
    """A function that outlives Python: TVM lets go of its reducers only when the process ends."""
    tvm_ffi.register_global_func(name, function, override=True)
    return tvm_ffi.get_global_func(name)


def _combiner(combine: Any) -> Any:
    def combined(left: Sequence[Any], right: Sequence[Any]) -> list[Any]:
        return [combine(left[0], right[0])]

    return combined


def _identity(infinity: float) -> Any:
    def identity(values: Sequence[Any]) -> list[Any]:
        dtype = str(values[0].ty.dtype)
        if not dtype.startswith(("float", "bfloat")):
            return [tirx.const(0, dtype)]  # which no largest or smallest integer starts from
        return [tirx.const(infinity, dtype)]

    return identity
