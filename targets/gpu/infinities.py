"""Infinities and NaNs of bfloat16 as their bits: TVM writes them as ``inff``, which CUDA lacks."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import tvm
import tvm_ffi
from hybridc.targets.relax_pipeline import map_kernels
from tvm import tirx


def infinities_as_bits(module: tvm.IRModule) -> tvm.IRModule:
    """The module with what is not finite in bfloat16 reinterpreted from integers."""

    def number(node: Any) -> Any:
        if str(node.ty.dtype) != "bfloat16" or math.isfinite(node.value):
            return node
        bits = np.array(node.value, ml_dtypes.bfloat16).view(np.uint16)
        return tirx.reinterpret("bfloat16", tirx.const(int(bits), "uint16"))

    rewrites = [(tirx.FloatImm, number)]
    return map_kernels(module, lambda kernel: tvm_ffi.structural_map(kernel, rewrites))
