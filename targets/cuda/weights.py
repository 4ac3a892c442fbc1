"""Weights that are stored in another order, since kernels for tensor cores want them so."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tvm
from hybridc.targets.llvm.layout.graph import bindings_of
from hybridc.targets.llvm.layout.main_writer import MainWriter, weight_names, weights_left

from hybridc.bundle.tensors import Array


def reorder_weights(
    module: tvm.IRModule,
    weights: Mapping[str, Array],
    is_chosen: Callable[[Any, Mapping[Any, str]], bool],
    reorder: Callable[[str, Array], tuple[str, Array]],
    compute: Callable[[MainWriter, Any, Any], Any],
) -> tuple[tvm.IRModule, Mapping[str, Array]]:
    """A module and its weights, with some weights in another order.

    Args:
        module: A Relax module whose ``main`` takes the weights as one tuple, last.
        weights: Their arrays by name, in order.
        is_chosen: Whether a value reads such a weight as its second operand; takes the value and
            the names of the weights' variables.
        reorder: Name and array of a weight in the other order.
        compute: What stands in place of such a value; takes a writer, its binding and the weight.
    """
    names = weight_names(module, weights)
    chosen = {
        binding.var: names[binding.value.args[1]]
        for binding in bindings_of(module["main"])
        if is_chosen(getattr(binding, "value", None), names)
    }
    if not chosen:
        return module, weights
    packed = weights_left(module, weights, names, chosen)
    items = {}
    for variable, name in chosen.items():
        items[variable], array = reorder(name, weights[name])
        packed[items[variable]] = np.ascontiguousarray(array)
    writer = MainWriter(module, packed)
    return writer.rewritten(names, items, lambda *given: compute(writer, *given)), packed
